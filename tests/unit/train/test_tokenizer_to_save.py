"""The tokenizer of checkpoints has the chat template that was trained with, and no other beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmsuite.data.chat_template import BUILTIN, tokenizer_template
from llmsuite.train.data import tokenizer_to_save
from tests.paths import DATA


@pytest.mark.parametrize("has_file", [False, True])
def test_only_the_template_trained_with_is_saved(tmp_path: Path, has_file: bool) -> None:
    own = shutil.copytree(DATA / "tokenizer", tmp_path / "own")
    if has_file:
        (own / "chat_template.jinja").write_text("another one")
    recipe: Any = SimpleNamespace(data=SimpleNamespace(chat_template="plain"))
    plan: Any = SimpleNamespace(recipe=recipe, tokenizer=own, output_dir=tmp_path / "run")
    saved = tokenizer_to_save(plan)
    assert saved is not None
    assert tokenizer_template(saved) == BUILTIN["plain"]
    before, after = (json.loads((path / "tokenizer_config.json").read_text()) for path in (own, saved))
    assert before.pop("chat_template")
    assert after == before
    recipe.data.chat_template = "tokenizer"
    assert tokenizer_to_save(plan) == own
