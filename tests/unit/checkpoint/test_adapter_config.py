"""The configuration of adapters: its patterns are names, and each of its keys is what a table says."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.adapter_base import read_base
from llmsuite.checkpoint.adapter_config import KINDS, read_adapter_config, value_for
from tests.support.damage import values

MODULE = "model.layers.1.self_attn.q_proj"
WHERE = Path("adapter_config.json")


def of_peft(pattern: str) -> bool:
    """Whether PEFT 0.21 finds a pattern in the name (`get_pattern_key` in peft/utils/other.py)."""
    return re.match(rf"(.*\.)?({pattern})$", MODULE) is not None


def found(pattern: str) -> bool:
    return bool(value_for(WHERE, {"rank_pattern": {pattern: True}}, "rank_pattern", MODULE, False))


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "q_proj",
            "proj",
            "self_attn.q_proj",
            r"self_attn\.q_proj",
            MODULE,
            re.escape(MODULE),
            f"^{MODULE}",
            "^q_proj",
        ),
        *(r".*\.q_proj", ".*proj", ".*q_proj", r".*\.proj", "q_proj$", "k_proj", f".*{MODULE}", rf".*\.{MODULE}"),
    ],
)
def test_patterns_of_names_match_as_in_peft(pattern: str) -> None:
    assert found(pattern) == of_peft(pattern)


parts = st.lists(st.sampled_from(["model", "layers", "1", "11", "self_attn", "q_proj"]), min_size=1, max_size=5)


@given(parts, st.sampled_from(["", "^", r".*\.", ".*"]), st.booleans())
def test_any_module_name_matches_as_in_peft(words: list[str], before: str, escaped: bool) -> None:
    name = ".".join(words)
    pattern = before + (re.escape(name) if escaped else name)
    assert found(pattern) == of_peft(pattern)


@pytest.mark.parametrize(
    "pattern", ["([a-z0-9_.]+)+!", "(.*)*(.*)*x!", "(", "q_proj|k_proj", r"layers\.\d+\.q_proj", ""]
)
def test_other_regular_expressions_are_refused_by_name(pattern: str) -> None:
    began = time.process_time()
    with pytest.raises(UserError, match=rf"rank_pattern has {re.escape(repr(pattern))}, which is not a name"):
        found(pattern)
    assert time.process_time() - began < 1


def test_a_long_pattern_matches_fast() -> None:
    began = time.process_time()
    assert not found("a." * 100_000 + "a")
    assert not found("\\." * 100_000)
    assert time.process_time() - began < 2


def write(tmp_path: Path, data: Any, name: str = "adapter_config.json") -> Path:
    (tmp_path / name).write_text(json.dumps(data))
    return tmp_path / name


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "is a list, not an object"),
        ({"r": 0}, "r is 0; a whole number from 1"),
        ({"r": 8.0}, "r is 8.0"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'; a number"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1"),
        ({"rank_pattern": ["x"]}, r"rank_pattern is \['x'\]; an object"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern is"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern is"),
        ({"target_modules": [1]}, "target_modules is"),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path is 5"),
        ({"peft_type": {}}, "peft_type is"),
    ],
)
def test_a_key_of_another_kind_is_refused(data: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"adapter_config\.json: {said}"):
        read_adapter_config(write(tmp_path, data))


@given(st.sampled_from(sorted(KINDS)), values)
def test_wrong_types_are_refused_on_reading(tmp_path_factory: pytest.TempPathFactory, key: str, value: Any) -> None:
    path = write(tmp_path_factory.getbasetemp(), {key: value})
    try:
        config = read_adapter_config(path)
        value_for(path, config, "alpha_pattern", MODULE, None)
        value_for(path, config, "rank_pattern", MODULE, None)
    except UserError:
        pass


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([1], "is a list, not an object"),
        ({"path": 5, "sha256": "a"}, "path is 5; a text or null"),
        ({"path": "x"}, "sha256 is None"),
        ({"path": "x", "sha256": "a", "stored_as": [1]}, r"stored_as is \[1\]; an object"),
        ({"path": "x", "sha256": "a", "stored_as": {"dtype": "fp3", "block": 64}}, "stored_as: dtype is 'fp3'"),
        ({"path": "x", "sha256": "a", "stored_as": {"dtype": [], "block": 64}}, "stored_as: dtype is"),
        ({"path": "x", "sha256": "a", "stored_as": {"dtype": "nf4", "block": 0}}, "stored_as: block is 0"),
    ],
)
def test_base_json_of_another_form_is_refused(data: Any, said: str, tmp_path: Path) -> None:
    write(tmp_path, data, "base.json")
    with pytest.raises(UserError, match=rf"base\.json: {said}"):
        read_base(tmp_path)
