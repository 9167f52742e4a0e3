"""Special tokens from every file that may name them: ends, what is put around texts, and what no text becomes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from llmsuite.base.errors import UserError
from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.control_tokens import ControlTokens
from llmsuite.data.special_tokens import looks_special, read_token_files, role_ids
from llmsuite.data.tokenizer import TextTokenizer, stop_token_ids_of
from llmsuite.inference.prompts import Prompter

MARKS = ("<s>", "</s>", "<|U|>", "<|A|>", "<x>y", "[INST]")
WORDS = ("Hello", " world", "a", "<", "|", ">", "U|>", "<|", "s>", " ", "\n", "\u00e9", "\uff1c", "[", "INST]")
TEXTS = st.lists(st.sampled_from([*MARKS, *WORDS]), max_size=7).map("".join)
_FLAGS = ("special", "normalized", "lstrip", "rstrip")
FLAGS = st.tuples(
    *[st.fixed_dictionaries({flag: st.booleans() for flag in _FLAGS})] * 4,  # words may be next to those of a template
    *[st.fixed_dictionaries({flag: st.booleans() for flag in (*_FLAGS, "single_word")})] * 2,
)
KINDS = ("bytes", "prefix", "first", "none", "lower")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|U|>' if m['role'] == 'user' else '<|A|>' }}{{ m['content'] }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|A|>{% endif %}"
)


def made(kind: str, flags: Sequence[dict[str, bool]], prefix: str = "", suffix: str = "") -> Tokenizer:
    """A small tokenizer with MARKS as added tokens: byte-level, or as SentencePiece with and without a space in front
    of a text; `prefix` and `suffix` are what its post-processor adds."""
    if kind == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        fast = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
    else:
        vocab = {f"<0x{i:02X}>": i for i in range(256)} | {c: 256 + i for i, c in enumerate("\u2581<>|sUAINT[]/xyae")}
        fast = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
        fast.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        if kind == "prefix":
            fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        elif kind == "first":
            fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        elif kind == "lower":
            fast.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    for text, given_flags in zip(MARKS, flags):
        token = AddedToken(text, **given_flags)
        (fast.add_special_tokens if given_flags["special"] else fast.add_tokens)([token])
    used = [name for name in (prefix, suffix) if name]
    if used:
        single = " ".join(part for part in (prefix, "$A", suffix) if part)
        ids = [(name, fast.token_to_id(name)) for name in used]
        fast.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return fast


def write(where: Path, fast: Tokenizer, files: dict[str, Any]) -> Path:
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    fast.save(str(where / "tokenizer.json"))
    for name, content in files.items():
        (where / name).write_text(json.dumps(content))
    return where


CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
PLAIN = [{"special": False, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}] * len(MARKS)


@pytest.fixture(scope="module", autouse=True)
def tried() -> Iterator[None]:
    """Each example is a tokenizer of its own, which would be tried out in a process of its own."""
    patch = pytest.MonkeyPatch()
    patch.setattr("llmsuite.data.tokenizer.probe_tokenizer", lambda path, digest: None)
    yield
    patch.undo()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(KINDS), FLAGS, TEXTS, TEXTS)
def test_no_text_of_a_user_becomes_a_control_token(
    tmp_path_factory: pytest.TempPathFactory, kind: str, flags: Sequence[dict[str, bool]], text: str, other: str
) -> None:
    if kind == "prefix":  # the library finds a normalized token there only where a space is in front of it
        flags = [{**each, "normalized": False} for each in flags]
    directory = write(tmp_path_factory.getbasetemp() / "control", made(kind, flags), {"tokenizer_config.json": CONFIG})
    tokenizer = TextTokenizer(directory)
    control = ControlTokens(tokenizer)
    assert {"<s>", "</s>", "<|U|>", "<|A|>"} <= control.tokens
    assert control.tokens == {"<s>", "</s>", "<|U|>", "<|A|>", *(t for t, f in zip(MARKS, flags) if f["special"])}
    ids = {tokenizer.token_id(token) for token in control.tokens}
    prompter = Prompter(tokenizer, "tokenizer")
    assert ids.isdisjoint(prompter.plain(text))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "e"}, {"role": "user", "content": "a"}]
    frame = [token for token in prompter.row({"messages": turns}).ids if token in ids]
    said = [{**turn, "content": words} for turn, words in zip(turns, (text, other, text))]
    found = prompter.row({"messages": said}).ids
    assert [token for token in found if token in ids] == frame


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(KINDS), TEXTS)
def test_escaped_text_decodes_unchanged(tmp_path_factory: pytest.TempPathFactory, kind: str, text: str) -> None:
    """Taking a token apart adds no space, and changes nothing else of the text."""
    directory = write(tmp_path_factory.getbasetemp() / "text", made(kind, PLAIN), {"tokenizer_config.json": CONFIG})
    tokenizer = TextTokenizer(directory)
    without = Tokenizer.from_str(tokenizer._fast.to_str())
    data = json.loads(without.to_str())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] in ("<x>y", "[INST]")]
    expected = Tokenizer.from_str(json.dumps(data)).encode(text, add_special_tokens=False)
    names = [expected.tokens[i] for i in range(len(expected.ids))]
    control = ControlTokens(tokenizer)
    pieces = [str(tokenizer._fast.id_to_token(i)) for i in control.encode(control.escape(text))]
    assert pieces == names


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(KINDS), FLAGS, TEXTS,
    st.sampled_from(["", "<s>"]), st.sampled_from(["", "</s>"]),
)  # fmt: skip
def test_raw_text_gets_the_tokenizer_prefix(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    flags: Sequence[dict[str, bool]],
    text: str,
    prefix: str,
    suffix: str,
) -> None:
    fast = made(kind, flags, prefix, suffix)
    directory = write(tmp_path_factory.getbasetemp() / "raw", fast, {"tokenizer_config.json": CONFIG})
    tokenizer = TextTokenizer(directory)
    bos = tokenizer.token_id("<s>")
    eos = tokenizer.token_id("</s>")
    whole = tokenizer._fast.encode(text, add_special_tokens=True).ids
    if prefix and whole[1:2] == [bos]:
        whole = whole[1:]
    assert tokenizer.with_special_tokens(tokenizer.encode(text)) == (whole[:-1] if suffix else whole)
    if suffix and whole[-2:-1] == [eos]:
        whole = whole[:-1]
    assert tokenizer.with_special_tokens(tokenizer.encode(text), is_complete=True) == whole
    prompter = Prompter(tokenizer, None, control_tokens=True)
    assert prompter.plain(text) == prompter.text(text).ids == tokenizer.with_special_tokens(tokenizer.encode(text))
    chat = Prompter(tokenizer, "tokenizer", control_tokens=True).text("a").ids
    assert chat == tokenizer.encode("<s><|U|>a</s><|A|>"), "a template writes it itself"


PLACES = {
    "tokenizer": ("tokenizer_config.json", lambda text, number: {"eos_token": text}),
    "map": ("special_tokens_map.json", lambda text, number: {"eos_token": {"content": text}}),
    "generation": ("generation_config.json", lambda text, number: {"eos_token_id": number}),
    "list": ("generation_config.json", lambda text, number: {"eos_token_id": [number]}),
    "config": ("config.json", lambda text, number: {"eos_token_id": number, "vocab_size": 900}),
    "nested": ("config.json", lambda text, number: {"text_config": {"eos_token_id": [number], "vocab_size": 900}}),
}


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(PLACES)), st.sampled_from(MARKS), min_size=1))
def test_stop_token_ids_come_from_all_files(tmp_path_factory: pytest.TempPathFactory, named: dict[str, str]) -> None:
    fast = made("bytes", PLAIN)
    files = {"tokenizer_config.json": dict[str, Any]()}
    for place, text in named.items():
        name, content = PLACES[place]
        files[name] = {**files.get(name, {}), **content(text, fast.token_to_id(text))}
    tokenizer = TextTokenizer(write(tmp_path_factory.getbasetemp() / "ends", fast, files))
    if "map" in named:
        named.pop("tokenizer", None)  # what transformers reads instead
    if {"generation", "list"} <= named.keys():  # two values of one key, of which the later one was written
        del named[min(("generation", "list"), key=list(named).index)]
    assert tokenizer.stop_token_ids() == {fast.token_to_id(text) for text in named.values()}
    assert set(stop_token_ids_of(tokenizer.directory, 0)) == tokenizer.stop_token_ids()
    order = ("map", "tokenizer", "generation", "list", "config", "nested")
    assert tokenizer.special_tokens["eos_token"] == next(named[place] for place in order if place in named)


@pytest.mark.parametrize("role", ["bos_token", "eos_token", "pad_token", "unk_token", "cls_token"])
@pytest.mark.parametrize("place", ["tokenizer_config.json", "special_tokens_map.json", "list", "dict", "decoder"])
def test_tokens_that_a_file_names_are_special(tmp_path: Path, role: str, place: str) -> None:
    fast = made("bytes", PLAIN)
    config = {"eos_token": "</s>"}
    number = fast.token_to_id("[INST]")
    config |= {
        "list": {"additional_special_tokens": ["<s>", {"content": "[INST]"}]},
        "dict": {"extra_special_tokens": {"begin": "[INST]"}},
        "decoder": {"added_tokens_decoder": {str(number): {"content": "[INST]", "special": True}}},
    }.get(place, {})
    files: dict[str, Any] = {"tokenizer_config.json": config}
    if place.endswith(".json"):
        files[place] = {**files.get(place, {}), role: "[INST]"}
    tokenizer = TextTokenizer(write(tmp_path / "t", fast, files))
    assert "[INST]" in tokenizer.control_tokens
    assert tokenizer.decode([number, fast.token_to_id("a")]) == "a", "nor is it shown"
    assert number not in Prompter(tokenizer, None).plain("a[INST]")


@pytest.mark.parametrize("role", ["bos_token", "pad_token", "eos_token"])
def test_tokens_with_an_id_in_a_config_are_control_tokens(tmp_path: Path, role: str) -> None:
    fast = made("bytes", PLAIN)
    files = {"tokenizer_config.json": {"eos_token": "</s>"}}
    files["config.json"] = {f"{role}_id": fast.token_to_id("[INST]")}
    tokenizer = TextTokenizer(write(tmp_path / "t", fast, files))
    assert "[INST]" in tokenizer.control_tokens
    if role == "pad_token":
        assert tokenizer.pad_id == fast.token_to_id("[INST]")
    if role != "eos_token":
        assert tokenizer.special_tokens[role] == "[INST]"
        files["tokenizer_config.json"][role] = None
        files["tokenizer_config.json"]["eos_token"] = "</s>"
        assert role not in TextTokenizer(write(tmp_path / "none", fast, files)).special_tokens, (
            "null says there is none"
        )


def test_precedence_of_files_is_that_of_transformers(tmp_path: Path) -> None:
    fast = made("bytes", PLAIN)
    config = {"eos_token": "</s>", "bos_token": "<s>"}
    named = {"eos_token": "<|A|>"}
    files = {"tokenizer_config.json": config, "special_tokens_map.json": named}
    assert TextTokenizer(write(tmp_path / "a", fast, files)).special_tokens == {
        "eos_token": "<|A|>",
        "bos_token": "<s>",
    }
    entry = {"content": "<|A|>", "special": False, "lstrip": True, "normalized": False}
    files["tokenizer_config.json"] = {**config, "added_tokens_decoder": {str(fast.token_to_id("<|A|>")): entry}}
    tokenizer = TextTokenizer(write(tmp_path / "b", fast, files))
    assert tokenizer.special_tokens == {"eos_token": "</s>", "bos_token": "<s>"}
    assert tokenizer.encode("a  <|A|>") == fast.encode("a<|A|>").ids, "its flags go before those of tokenizer.json"


def test_tokens_that_tokenizer_json_lacks_are_added(tmp_path: Path) -> None:
    fast = made("bytes", PLAIN)
    size = fast.get_vocab_size()
    for name, content in (("added_tokens.json", {"<new>": size}), ("tokenizer_config.json", None)):
        files: dict[str, Any] = {"tokenizer_config.json": dict(CONFIG)}
        if content is None:
            files[name]["added_tokens_decoder"] = {str(size): {"content": "<new>", "special": True}}
        else:
            files[name] = content
        tokenizer = TextTokenizer(write(tmp_path / "t", fast, files))
        assert (tokenizer.vocab_size, tokenizer.encode("<new>")) == (size + 1, [size])
    with pytest.raises(UserError, match=rf"added_tokens\.json: '<new>' has the id {size + 5}, and"):
        TextTokenizer(
            write(tmp_path / "t", fast, {"tokenizer_config.json": CONFIG, "added_tokens.json": {"<new>": size + 5}})
        )


def test_an_eos_token_of_the_vocabulary_is_matched_in_text(tmp_path: Path) -> None:
    vocab = {c: i for i, c in enumerate(["</s>", *"abs</>"])}
    fast = Tokenizer(models.BPE(vocab, []))
    tokenizer = TextTokenizer(write(tmp_path / "t", fast, {"tokenizer_config.json": {"eos_token": "</s>"}}))
    assert tokenizer.encode("ab</s>") == [1, 2, 0]
    assert 0 not in Prompter(tokenizer, None).plain("ab</s>")


def test_ordinary_words_are_no_control_tokens(tmp_path: Path) -> None:
    """A pad token "!", or an added token of spaces or letters that a template has too, is text wherever it stands."""
    assert [looks_special(t) for t in ("!", "\n\n", "user", "<s>", "</think>", "\uff1cA\uff1e")] == [False] * 3 + [
        True
    ] * 3
    fast = made("bytes", PLAIN)
    fast.add_tokens([AddedToken("user"), AddedToken("\n\n")])
    template = "{% for m in messages %}user\n\n{{ m['content'] }}{% endfor %}"
    config = {"eos_token": "</s>", "pad_token": "!", "chat_template": template}
    tokenizer = TextTokenizer(write(tmp_path / "t", fast, {"tokenizer_config.json": config}))
    assert ControlTokens(tokenizer).tokens == {"</s>"}
    assert Prompter(tokenizer, None).plain("user!\n\n") == tokenizer.encode("user!\n\n")


def test_the_assistant_may_write_the_inner_tokens_of_a_template(tmp_path: Path) -> None:
    fast = made("bytes", PLAIN)
    fast.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    template = (
        "{% for m in messages %}{{ '<|U|>' if m['role'] == 'user' else '<|A|>' }}"
        "{% if '</think>' in m['content'] %}{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|A|><think>{% endif %}"
    )
    config = {**CONFIG, "chat_template": template}
    tokenizer = TextTokenizer(write(tmp_path / "t", fast, {"tokenizer_config.json": config}))
    control = ControlTokens(tokenizer)
    assert control.tokens - control.turn_tokens == {"<think>", "</think>"}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c"}]
    ids = Prompter(tokenizer, "tokenizer").row({"messages": [*turns, turns[0]]}).ids
    assert ids == tokenizer.encode("<|U|>a<|A|>c<|U|>a<|A|><think>")
    turns[0]["content"] = "<think>"
    ids = Prompter(tokenizer, "tokenizer").row({"messages": turns[:1]}).ids
    assert ids.count(tokenizer.token_id("<think>")) == 1, "that of the prompt"
    assert control.find_in_turns([("assistant", "<think>"), ("user", "b")]) is None
    assert control.find_in_turns([("assistant", "a<|U|>"), ("user", "b")]) == "<|U|>"
    assert control.find_in_turns([("user", "<think>")]) == "<think>"


def test_a_template_of_the_recipe_adds_control_tokens(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(write(tmp_path / "t", made("bytes", PLAIN), {"tokenizer_config.json": CONFIG}))
    assert "[INST]" not in ControlTokens(tokenizer).tokens
    other = ChatTemplate("{% for m in messages %}[INST]{{ m['content'] }}{% endfor %}", {}, "another")
    assert {"[INST]", "<|U|>"} <= ControlTokens(tokenizer, lambda: other).turn_tokens


@pytest.mark.parametrize(
    ("before", "key", "value", "expected"),
    [
        ("", "add_bos_token", True, [1, 9]),
        ("<s>", "add_bos_token", True, [1, 9]),
        ("<s>", "add_bos_token", False, [9]),
        ("<s>", "add_bos_token", None, [1, 9]),
        ("", "add_eos_token", True, [9]),
    ],
)
def test_add_bos_and_eos_flags_of_the_config_are_used(
    tmp_path: Path, before: str, key: str, value: bool | None, expected: list[int]
) -> None:
    fast = made("bytes", PLAIN, before)
    config = {**CONFIG, key: value}
    tokenizer = TextTokenizer(write(tmp_path / "t", fast, {"tokenizer_config.json": config}))
    names = {1: fast.token_to_id("<s>"), 9: fast.token_to_id("a")}
    assert tokenizer.with_special_tokens([names[9]]) == [names[i] for i in expected]
    if key == "add_eos_token":
        assert tokenizer.with_special_tokens([names[9]], is_complete=True) == [names[9], tokenizer.eos_id]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", {"bos_token": 3}, "bos_token is 3; it has to be a text"),
        ("tokenizer_config.json", {"bos_token": {"text": "a"}}, "bos_token is .*; it has to be a text"),
        ("tokenizer_config.json", {"additional_special_tokens": "<s>"}, "additional_special_tokens is '<s>'"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, "added_tokens_decoder is a list"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "has to be a token, an object, by its id"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": {"content": "a", "special": 1}}}, "special is 1"),
        ("special_tokens_map.json", [], "is a list, not an object"),
        ("special_tokens_map.json", {"eos_token": ["</s>"]}, "eos_token is "),
        ("added_tokens.json", {"<x>": "5"}, "'<x>' is '5'; it has to be the id"),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id is '2'; it has to be a number"),
        ("generation_config.json", {"eos_token_id": [2, True]}, "eos_token_id is .*True"),
        ("generation_config.json", {"eos_token_id": 5000}, "eos_token_id has 5000, and ids of tokens end at 261"),
        ("config.json", {"eos_token_id": [0, -7]}, "eos_token_id has -7"),
        ("config.json", {"eos_token_id": 900, "vocab_size": 900}, "eos_token_id has 900, .* end at 899"),
        ("config.json", {"text_config": {"eos_token_id": 1.5}}, "eos_token_id is 1.5"),
    ],
)
def test_faulty_files_are_named(tmp_path: Path, name: str, content: Any, message: str) -> None:
    files: dict[str, Any] = {"tokenizer_config.json": dict(CONFIG)}
    files[name] = {**files[name], **content} if name in files else content
    directory = write(tmp_path / "t", made("bytes", PLAIN), files)
    with pytest.raises(UserError, match=f"{name}: .*{message}" if name != "special_tokens_map.json" else message):
        TextTokenizer(directory).stop_token_ids()


def test_invalid_flags_and_missing_bos_tokens_are_named(tmp_path: Path) -> None:
    for config, message in (({"add_bos_token": "yes"}, "is true or false"), ({"add_bos_token": True}, "no bos_token")):
        files = {"tokenizer_config.json": {"eos_token": "</s>", **config}}
        with pytest.raises(UserError, match=rf"tokenizer_config\.json: add_bos_token .*{message}"):
            TextTokenizer(write(tmp_path / "t", made("bytes", PLAIN), files)).with_special_tokens([0])


def test_an_id_of_minus_one_is_ignored(tmp_path: Path) -> None:
    files = {"tokenizer_config.json": CONFIG, "config.json": {"pad_token_id": -1, "eos_token_id": -1}}
    tokenizer = TextTokenizer(write(tmp_path / "t", made("bytes", PLAIN), files))
    assert (tokenizer.pad_id, tokenizer.stop_token_ids()) == (tokenizer.eos_id, {tokenizer.eos_id})
    assert read_token_files(tokenizer.directory).ids("pad_token", 900) == []


@pytest.mark.parametrize("content", [[], {}, None, 1])
def test_a_token_without_a_text_has_no_id(tmp_path: Path, content: Any) -> None:
    tokens = {"model": {"vocab": [[content, 0.5], ["a", 0.5]]}, "added_tokens": [{"content": content, "id": 2}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    assert role_ids(tmp_path) == {"eos_token": 1}
