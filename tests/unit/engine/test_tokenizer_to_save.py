"""The tokenizer of checkpoints has the chat template that was trained with, and no other one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmsuite.data.chat_template import BUILTIN, chosen_template, tokenizer_template
from llmsuite.engine.data import tokenizer_to_save
from tests.support.paths import DATA


@pytest.mark.parametrize("has_file", [False, True])
def test_only_the_template_trained_with_is_saved(tmp_path: Path, has_file: bool) -> None:
    own = shutil.copytree(DATA / "tokenizer", tmp_path / "own")
    if has_file:
        (own / "chat_template.jinja").write_text("another one")
    saved = tokenizer_to_save(own, "plain", tmp_path / "run")
    assert saved is not None
    assert tokenizer_template(saved) == BUILTIN["plain"]
    before, after = (json.loads((path / "tokenizer_config.json").read_text()) for path in (own, saved))
    assert before.pop("chat_template")
    assert after == before
    assert tokenizer_to_save(own, "tokenizer", tmp_path / "run") == own


@pytest.mark.parametrize("choice", ["qwen3", "{{ messages[0].content }}"])
def test_a_named_template_and_ones_own_are_saved(tmp_path: Path, choice: str) -> None:
    saved = tokenizer_to_save(DATA / "tokenizer", choice, tmp_path / "run")
    assert saved is not None
    assert tokenizer_template(saved) == chosen_template(choice)
    assert "chat_template" not in json.loads((saved / "tokenizer_config.json").read_text())
