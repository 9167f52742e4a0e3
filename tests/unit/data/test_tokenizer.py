"""Text to ids and back: the embedded tokenizer, faulty directories, and SentencePiece by way of paddlenlp."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.data import tokenizer_probe
from llmsuite.data.tokenizer import TextTokenizer
from tests.support.paths import DATA

EMBEDDED = TextTokenizer(DATA / "tokenizer")
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def copy(tmp_path: Path, **changes: Any) -> Path:
    """The embedded tokenizer with keys of its config changed, or with None, taken away."""
    shutil.copytree(DATA / "tokenizer", tmp_path / "copy")
    path = tmp_path / "copy" / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return tmp_path / "copy"


def test_special_tokens_and_sizes_are_read() -> None:
    assert EMBEDDED.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    }
    assert (EMBEDDED.eos_id, EMBEDDED.pad_id, EMBEDDED.vocab_size) == (2, 0, 512)
    assert EMBEDDED.token_id("<|im_start|>") == 1
    with pytest.raises(UserError, match="'absent' is not in the vocabulary"):
        EMBEDDED.token_id("absent")


@given(TEXT)
def test_tokens_have_the_bytes_of_their_parts_of_characters(text: str) -> None:
    ids = [token for token in EMBEDDED.encode(text) if token > 2]
    assert b"".join(EMBEDDED.token_bytes(token) or b"?" for token in ids).decode() == EMBEDDED.decode(ids)


def test_token_bytes_of_sentencepiece_and_of_unknown_tokens(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "<0xC3>": 1, "<0xA9>": 2, "é": 3, "?\ufffd ": 4}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    made.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<unk>"}')
    tokenizer = TextTokenizer(tmp_path)
    assert [tokenizer.token_bytes(token) for token in (1, 2, 3, 4)] == [b"\xc3", b"\xa9", "é".encode(), None]


@given(TEXT)
def test_no_token_is_added_and_none_is_lost(text: str) -> None:
    ids = EMBEDDED.encode(text)
    assert all(0 <= i < EMBEDDED.vocab_size for i in ids)
    if "<|" not in text:
        assert not {0, 1, 2} & set(ids)
        assert EMBEDDED.decode(ids) == text


@given(st.lists(TEXT, max_size=4))
def test_a_batch_is_each_of_its_texts(texts: list[str]) -> None:
    assert EMBEDDED.encode_batch(texts) == [EMBEDDED.encode(text) for text in texts]


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    text = "some words é " * 20_000
    ticks = [0]
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(0.001):
            ticks[0] += 1

    plain = EMBEDDED._fast.encode(text, add_special_tokens=False).ids
    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks[0]
    found = EMBEDDED.encode(text)
    during = ticks[0] - before
    ended.set()
    thread.join()
    assert found == plain
    assert during > 10


def test_special_tokens_in_a_text_are_tokens_and_are_not_shown() -> None:
    ids = EMBEDDED.encode("<|im_start|>user\nHi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert not {0, 1, 2} & set(ids[1:-1])
    assert EMBEDDED.decode(ids) == "user\nHi"
    assert EMBEDDED.encode("") == []


def test_padding_and_truncation_of_the_file_are_switched_off(tmp_path: Path) -> None:
    directory = copy(tmp_path)
    content = json.loads((directory / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    text = "What is 7 + 5? Reply with the number only."
    for sample in (text, "a"):
        assert TextTokenizer(directory).encode(sample) == EMBEDDED.encode(sample)
    assert TextTokenizer(directory).encode_batch([text, "a"]) == EMBEDDED.encode_batch([text, "a"])


def test_without_a_padding_token_the_eos_token_pads(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(copy(tmp_path, pad_token=None))
    assert "pad_token" not in tokenizer.special_tokens
    assert tokenizer.pad_id == tokenizer.eos_id == 2


def test_a_token_may_be_an_object(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(copy(tmp_path, eos_token={"__type": "AddedToken", "content": "<|im_start|>"}))
    assert (tokenizer.special_tokens["eos_token"], tokenizer.eos_id) == ("<|im_start|>", 1)


@pytest.mark.parametrize(
    ("eos", "message"), [(None, "names no eos_token"), ("", "names no eos_token"), ("</s>", "not in the vocabulary")]
)
def test_a_missing_eos_token_is_named(tmp_path: Path, eos: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TextTokenizer(copy(tmp_path, eos_token=eos))


@pytest.mark.parametrize(("name", "text"), [("tokenizer_config.json", "["), ("tokenizer_config.json", "[]")])
@pytest.mark.parametrize("other", ["", "{", '{"version": "1.0"}'])
def test_garbled_files_are_named(tmp_path: Path, name: str, text: str, other: str) -> None:
    directory = copy(tmp_path)
    (directory / "tokenizer.json").write_text(other)
    with pytest.raises(UserError, match=r"tokenizer\.json: is not a readable tokenizer"):
        TextTokenizer(directory)
    (directory / name).write_text(text)
    with pytest.raises(UserError, match=r"tokenizer_config\.json: is "):
        TextTokenizer(directory)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither tokenizer\.json nor tokenizer_config\.json"):
        TextTokenizer(tmp_path)


def test_the_digest_is_that_of_the_tokenizer_alone(tmp_path: Path) -> None:
    directory = copy(tmp_path)
    expected = TextTokenizer(directory).digest()
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "tokenizers").mkdir()  # not a file
    assert TextTokenizer(directory).digest() == expected
    seen = {expected}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        before = (directory / name).read_bytes()
        (directory / name).write_bytes(before + b"\n")
        seen.add(TextTokenizer(directory).digest())
        (directory / name).write_bytes(before)
    for name in ("added_tokens.json", "merges.txt", "vocab.json"):
        (directory / name).write_text("{}")
        seen.add(TextTokenizer(directory).digest())
    assert len(seen) == 6


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as PaddleNLP's Llama models have it: SentencePiece and a config, no tokenizer.json."""
    directory = tmp_path_factory.mktemp("sentencepiece")
    rows = (DATA / "preference" / "train.jsonl").read_text().splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(json.loads(row)["prompt"][0]["content"] for row in rows),
        model_prefix=str(directory / "pieces"),
        vocab_size=400,
        byte_fallback=True,
        character_coverage=1.0,
        minloglevel=2,
    )
    (directory / "pieces.model").rename(directory / "sentencepiece.bpe.model")
    (directory / "pieces.vocab").unlink()
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_a_vocabulary_of_tiktoken_is_refused_with_the_way_to_a_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("IQ== 0\n")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[EOS]", "tokenizer_class": "TikTokenTokenizer"}')
    with pytest.raises(UserError, match=r"tiktoken\.model, which only Python code .*`TikTokenConverter`"):
        TextTokenizer(tmp_path)


def test_sentencepiece_is_read_by_paddlenlp(pieces: Path) -> None:
    tokenizer = TextTokenizer(pieces)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(pieces / "sentencepiece.bpe.model"))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (400, 2, 2)
    assert tokenizer.token_id("<unk>") == 0
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    texts = ["What is 7 + 5? Reply with the number only.", "\u4e16\u754c \U0001f600", "a"]
    for text in texts:
        assert tokenizer.encode(text) == reference.encode(text)  # and so nothing is added
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode("") == []
    ids = tokenizer.encode("<s>Hi</s>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "Hi"


def test_a_token_sentencepiece_does_not_have_is_not_the_unknown_one(pieces: Path) -> None:
    with pytest.raises(UserError, match="'<pad>' is not in the vocabulary"):
        TextTokenizer(pieces).token_id("<pad>")


@pytest.mark.parametrize(("changes", "word"), [({}, "vocab_file"), ({"tokenizer_class": "Absent"}, "Absent")])
def test_tokenizers_that_paddlenlp_cannot_read_are_named(
    pieces: Path, tmp_path: Path, changes: dict[str, str], word: str
) -> None:
    config = json.loads((pieces / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UserError, match=f"paddlenlp cannot read its tokenizer: .*{word}"):
        TextTokenizer(tmp_path)


@pytest.mark.further
def test_sentencepiece_is_probed_with_limits(pieces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "other"
    shutil.copytree(pieces, directory)
    (directory / "added_tokens.json").write_text(json.dumps({"<other>": 400}))  # one that has not passed yet
    monkeypatch.setattr(tokenizer_probe, "SECONDS", -1)
    with pytest.raises(UserError, match=r"other: takes more than -1 s of the processor for common texts"):
        TextTokenizer(directory)
    monkeypatch.undo()
    assert TextTokenizer(directory).encode("a")
    monkeypatch.setattr(tokenizer_probe, "SECONDS", -1)
    assert TextTokenizer(directory).encode("a"), "what has passed is not tried out again"
