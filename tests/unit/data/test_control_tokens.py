"""Control tokens that users write are text, and nothing else is encoded otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.data.chat_template import BUILTIN, ChatTemplate
from llmsuite.data.control_tokens import ControlTokens, doubled_bos
from llmsuite.data.rows import Conversation, Message, Preference, Prompt, Unpaired, turns_of
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.prompts import Prompter
from tests.support.paths import DATA
from tests.support.sft_case import make_stage

TOKENIZER = TextTokenizer(DATA / "tokenizer")
CONTROL = {TOKENIZER.token_id(token) for token in TOKENIZER.control_tokens}
TOKENS = ControlTokens(TOKENIZER)
PARTS = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_", "|>", "<", "end|>", "a", " ", "\n", "\ufdd2", "é"]


@given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join))
def test_no_text_becomes_a_control_token(text: str) -> None:
    ids = TOKENS.encode(f"<|im_start|>{TOKENS.escape(text)}<|im_end|>")
    assert [token in CONTROL for token in ids] == [True, *[False] * (len(ids) - 2), True]
    assert TOKENIZER.decode(ids) == text.replace("\ufdd2", "")


@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\ufdd2"), max_size=20))
def test_escaping_does_not_change_other_texts(text: str) -> None:
    assert TOKENS.encode(TOKENS.escape(text)) == TOKENIZER.encode(text)


def test_a_turn_is_encoded_with_the_text_around_it() -> None:
    prompter = Prompter(TOKENIZER, "chatml")
    assert prompter.text("how are you?").ids == TOKENIZER.encode(
        "<|im_start|>user\nhow are you?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_overlapping_control_tokens_are_all_escaped() -> None:
    class Toy:
        control_tokens = frozenset({"<<a>>", "<a>", "[", "a>>"})
        added_tokens = control_tokens

        def masked(self, hidden: frozenset[str]) -> None:
            return None

        def encode(self, text: str) -> list[str]:
            return [text]

    toy: Any = Toy()
    assert ControlTokens(toy).encode(ControlTokens(toy).escape("x<<a>>")) == ["x<", "<", "a", ">>"]
    assert ControlTokens(toy).find(["a", "<<a>>"]) == "<<a>>"
    with pytest.raises(UserError, match=r"has the control token '\['"):
        ControlTokens(toy).escape("x[y")


def test_control_tokens_are_found_in_all_turns_of_a_row() -> None:
    turns = (Message("user", "a"), Message("assistant", "b"))
    said = [("user", "a"), ("assistant", "b")]
    good = Message("assistant", "c")
    bad = Message("assistant", "d")
    assert turns_of(Conversation(turns, (False, True))) == said
    assert turns_of(Prompt(turns)) == said
    assert turns_of(Preference(turns, good, bad)) == [*said, ("assistant", "c"), ("assistant", "d")]
    assert turns_of(Unpaired(turns, good, True)) == [*said, ("assistant", "c")]
    assert turns_of({"text": "a"}) == []


TWICE = (
    "{{ bos_token }}<|im_start|>{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_a_template_that_writes_two_bos_tokens_is_reported() -> None:
    assert TOKENIZER.special_tokens["bos_token"] == "<|im_start|>"
    warning = doubled_bos(TOKENIZER, ChatTemplate(TWICE, TOKENIZER.special_tokens, "twice"))
    assert warning is not None
    assert "the chat template of twice begins a conversation with two tokens <|im_start|>" in warning
    assert Prompter(TOKENIZER, TWICE).warning == warning.replace("twice", "data.chat_template")
    assert Prompter(TOKENIZER, "tokenizer").warning is None
    assert Prompter(TOKENIZER, None).warning is None
    for name, source in BUILTIN.items():
        assert doubled_bos(TOKENIZER, ChatTemplate(source, TOKENIZER.special_tokens, name)) is None


def test_training_reports_it_once() -> None:
    reports: list[str] = []
    stage = make_stage(template=TWICE, report=reports.append)
    path = DATA / "sft" / "train.jsonl"
    assert stage.reader.read_all(path, {"": path})[0]
    assert [text for text in reports if "two tokens" in text] == [reports[0]]


@pytest.mark.parametrize(("last", "is_masked"), [(2_000, True), (3_000_000_000, False)])
def test_a_vocabulary_that_leaves_out_very_many_ids(tmp_path: Path, last: int, is_masked: bool) -> None:
    words = {"<unk>": 0, "a": 1, "b": last}
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    data = {"version": "1.0", "added_tokens": [{"id": last + 1, "content": "<end>", **token}], "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    tokens = ControlTokens(TextTokenizer(tmp_path))
    assert (tokens._masked is not None) is is_masked
    escaped = tokens.escape("a<end>b")
    assert last + 1 not in tokens.encode(escaped)
    assert tokens.find(["a<end>b"]) == "<end>"
