"""The tokenizer of a model with an adapter: the adapter's files where it brings them, else the base's."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.tokenizer_files import TOKENIZER_FILES, copy_tokenizer, tokenizer_of_adapter
from llmsuite.data.chat_template import tokenizer_template
from llmsuite.data.tokenizer import TextTokenizer
from tests.support.tiny_llama import TOKENIZER

OTHERS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
OTHERS += ("generation_config.json",)
FILES = (*TOKENIZER_FILES, "own.tiktoken")
VOCABULARY = set(FILES) - set(OTHERS)


def write(directory: Path, names: Any, who: str, template: bool = False) -> Path:
    """Files that say whose they are; `template`: whether tokenizer_config.json has one."""
    directory.mkdir(parents=True)
    for name in names:
        content: dict[str, Any] = {"of": who}
        if name == "tokenizer_config.json" and template:
            content["chat_template"] = who
        text = who if name == "chat_template.jinja" else json.dumps(content)
        (directory / name).write_text(text)
    return directory


def whose(path: Path) -> str | None:
    if not path.is_file():
        return None
    text = path.read_text()
    return text if path.suffix == ".jinja" else json.loads(text)["of"]


@settings(max_examples=120, deadline=None)
@given(
    own=st.sets(st.sampled_from(FILES)),
    base=st.sets(st.sampled_from(FILES)),
    own_template=st.booleans(),
    base_template=st.booleans(),
)
def test_each_part_comes_from_adapter_or_base(
    own: set[str], base: set[str], own_template: bool, base_template: bool
) -> None:
    with tempfile.TemporaryDirectory() as place:
        adapter = write(Path(place) / "adapter", own, "adapter", own_template)
        model = write(Path(place) / "base", base, "base", base_template)
        found = tokenizer_of_adapter(adapter, model)
        if not own:
            assert found == model
            return
        for name in FILES:
            assert name not in own or whose(found / name) == "adapter", "what it brings is its own"
        vocabulary = {whose(found / name) for name in VOCABULARY} - {None}
        assert len(vocabulary) <= 1, "no vocabulary is made of two"
        assert vocabulary or not VOCABULARY & base, "a vocabulary is there if any of the two has one"
        expected = "adapter" if "tokenizer_config.json" in own else "base" if "tokenizer_config.json" in base else None
        assert whose(found / "tokenizer_config.json") == expected
        ends = "generation_config.json"
        assert whose(found / ends) == ("adapter" if ends in own else "base" if ends in base else None)
        has_own = "chat_template.jinja" in own or (own_template and "tokenizer_config.json" in own)
        in_base = "chat_template.jinja" in base or (base_template and "tokenizer_config.json" in base)
        is_whole = bool(VOCABULARY & own) and "tokenizer_config.json" in own
        assert tokenizer_template(found) == ("adapter" if has_own else "base" if in_base and not is_whole else None)
        target = Path(place) / "copied"
        target.mkdir()
        copy_tokenizer(found, target)
        assert {path.name for path in target.iterdir()} == {n for n in FILES if (found / n).is_file()}


def test_a_template_alone_is_used_with_the_tokenizer_of_the_base(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("own")
    found = tokenizer_of_adapter(tmp_path, TOKENIZER)
    assert tokenizer_template(found) == "own"
    assert "chat_template" not in json.loads((found / "tokenizer_config.json").read_text()), "no other one is left"
    assert TextTokenizer(found).encode("hello") == TextTokenizer(TOKENIZER).encode("hello")
    assert tokenizer_of_adapter(tmp_path, TOKENIZER) == found, "it is made once"
    (found / "tokenizer.json").write_text("{}")
    assert TextTokenizer(tokenizer_of_adapter(tmp_path, TOKENIZER)).vocab_size == 512, "what is damaged is made again"


def test_settings_that_name_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": {"2": {"content": "<|im_end|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert TextTokenizer(tokenizer_of_adapter(tmp_path, TOKENIZER)).eos_id == 2
    config["added_tokens_decoder"] = {"512": {"content": "<new>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"the added token '<new>' with id 512.*put the tokenizer.json"):
        tokenizer_of_adapter(tmp_path, TOKENIZER)


def test_an_invalid_tokenizer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match="is a list, not an object"):
        tokenizer_of_adapter(tmp_path, TOKENIZER)
