"""Tokens that a run adds to its tokenizer: the ids of the `tokenizers` library, and files that other readers share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from llmsuite.base.errors import UserError
from llmsuite.data.new_tokens import tokenizer_with_tokens
from llmsuite.data.tokenizer import TextTokenizer
from tests.support.paths import DATA

PLAIN = ["<call>", "</call>"]
SPECIAL = ["<|tool|>"]
TEXT = "a <call>b</call> <|tool|><|im_end|> c<call>"


def test_new_tokens_get_the_next_ids() -> None:
    before = TextTokenizer(DATA / "tokenizer")
    found = TextTokenizer(tokenizer_with_tokens(DATA / "tokenizer", PLAIN, SPECIAL))
    assert before.vocab_size == 512
    assert found.vocab_size == 515
    assert [found.token_id(text) for text in (*PLAIN, *SPECIAL)] == [512, 513, 514]
    library = Tokenizer.from_file(str(DATA / "tokenizer" / "tokenizer.json"))
    library.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    library.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    ids = found.encode(TEXT)
    assert ids == library.encode(TEXT, add_special_tokens=False).ids
    assert ids.count(512) == 2
    assert found.decode(ids) == library.decode(ids)
    assert "<call>" in found.decode(ids)
    assert "<|tool|>" not in found.decode(ids)
    assert found.special_tokens == before.special_tokens
    assert found.digest() != before.digest()


def test_no_tokens_are_the_tokenizer_itself() -> None:
    assert tokenizer_with_tokens(DATA / "tokenizer", [], []) == DATA / "tokenizer"


def test_a_token_of_the_vocabulary_keeps_its_id() -> None:
    before = TextTokenizer(DATA / "tokenizer")
    word = before.pieces(before.encode("the"))[0]
    found = TextTokenizer(tokenizer_with_tokens(DATA / "tokenizer", ["<|im_end|>", word, "<new>"], []))
    assert found.vocab_size == 513
    assert found.token_id("<|im_end|>") == 2
    assert found.token_id(word) == before.token_id(word)
    assert found.token_id("<new>") == 512


def test_settings_that_list_added_tokens_list_new_ones(tmp_path: Path) -> None:
    own = shutil.copytree(DATA / "tokenizer", tmp_path / "own")
    path = own / "tokenizer_config.json"
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    listed = {str(number): {"content": text, **flags} for number, text in enumerate(names)}
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens_decoder": listed}))
    found = tokenizer_with_tokens(own, PLAIN, SPECIAL)
    config = json.loads((found / "tokenizer_config.json").read_text())
    assert config["added_tokens_decoder"] == {
        **listed,
        "512": {"content": "<call>", **flags, "special": False},
        "513": {"content": "</call>", **flags, "special": False},
        "514": {"content": "<|tool|>", **flags},
    }
    assert config["additional_special_tokens"] == SPECIAL
    assert TextTokenizer(found).encode(TEXT) == TextTokenizer(tokenizer_with_tokens(own, PLAIN, SPECIAL)).encode(TEXT)


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"^model\.new_tokens: .* has no tokenizer\.json, to which tokens can be added"):
        tokenizer_with_tokens(tmp_path, PLAIN, [])
