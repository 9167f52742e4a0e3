"""Rows of another kind than the stage trains on: what they are is said, and rows that only have more are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.given import plugin_from_specs
from llmsuite.contract.hookspecs import DataFormat, Section, StageSpec
from llmsuite.contract.registry import Registry
from llmsuite.data.keys import ALL, ColumnRules
from llmsuite.data.read import read_rows
from tests.conftest import registry_with

HUMAN = {"from": "human", "value": "2+2?"}
GPT = {"from": "gpt", "value": "4"}
TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
SHAREGPT_PAIR = {"conversations": [HUMAN], "chosen": GPT, "rejected": {**GPT, "value": "5"}}
PADDLENLP_PAIR = {"src": ["2+2?"], "tgt": [], "response": ["4", "5"], "sort": [1, 0]}
ALPACA_PAIR = {"instruction": "2+2?", "input": "", "chosen": "4", "rejected": "5"}
PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}


def read(directory: Path, registry: Registry, kind: str, row: dict[str, Any], **options: Any) -> list[Any]:
    path = directory / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    name = options.pop("name", "auto")
    formats = {**registry.data_formats, **options.pop("more", {})}
    return read_rows(path, kind, name, formats, readers=registry.stages_by_row_kind(), **options)


def refusal(directory: Path, registry: Registry, kind: str, row: dict[str, Any], **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(directory, registry, kind, row, **options)
    return str(caught.value).removeprefix(f"{directory / 'rows.jsonl'}:1: ")


def test_stages_name_their_kinds_of_rows(registry: Registry) -> None:
    for stage in registry.stages.values():
        if isinstance(stage, StageSpec):
            assert stage.row_kind == stage.factory().row_kind, stage.name


@pytest.mark.parametrize(
    ("kind", "row", "others"),
    [
        ("conversation", PAIR, "one with preference rows (trl_preference), which stages dpo and rm train on"),
        ("conversation", ALPACA_PAIR, "one with preference rows (alpaca_preference), which stages dpo and rm train on"),
        ("unpaired", PAIR, "one with preference rows (trl_preference), which stages dpo and rm train on"),
        (
            "conversation",
            {"prompt": "2+2?"},
            "one with prompt rows (prompt), which stages grpo, online_dpo and ppo train on",
        ),
        (
            "preference",
            {"messages": TURNS, "label": True},
            "one with unpaired rows (openai_unpaired), which stage kto trains on",
        ),
        (
            "preference",
            {"messages": TURNS, "id": 1},
            "one with conversation rows (openai), which stages sft, lora and gkd train on, "
            "or one with prompt rows (openai_prompt), which stages grpo, online_dpo and ppo train on",
        ),
    ],
)
def test_rows_for_other_stages_are_recognised(
    tmp_path: Path, registry: Registry, kind: str, row: dict[str, Any], others: str
) -> None:
    said = refusal(tmp_path, registry, kind, row)
    assert said.startswith(f"keys {sorted(row)} fit no format with {kind} rows, but {others}. Known: ")


def test_formats_of_plugins_are_considered(tmp_path: Path, registry: Registry) -> None:
    def lines(**matches: Any) -> dict[str, DataFormat]:
        return {"lines": DataFormat(name="lines", help="text", kind="text", convert=dict, **matches)}

    row = {"line": "a"}
    said = "keys ['line'] fit no format with conversation rows"
    of_text = refusal(tmp_path, registry, "conversation", row, more=lines(matches=lambda row: "line" in row))
    assert of_text.startswith(f"{said}, but one with text rows (lines). Known: ")
    for matches in (lambda row: True, lambda row: row["kind"] == "text"):
        assert refusal(tmp_path, registry, "conversation", row, more=lines(matches=matches)).startswith(
            f"{said}. Known"
        )


def test_stages_of_plugins_are_named(tmp_path: Path) -> None:
    spec = StageSpec(name="spin", help="", config_cls=Section, factory=lambda: object, row_kind="preference")
    registry = registry_with(plugin=plugin_from_specs([spec]))
    said = refusal(tmp_path, registry, "conversation", PAIR)
    assert "one with preference rows (trl_preference), which stages dpo, rm and spin train on" in said


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (SHAREGPT_PAIR, "sharegpt_preference: conversations of from/value, chosen, rejected"),
        ({**SHAREGPT_PAIR, "id": 1, "system": "Be brief."}, "sharegpt_preference: "),
        (PADDLENLP_PAIR, "paddlenlp_preference: src, tgt, response, sort"),
        ({**ALPACA_PAIR, "output": ""}, "alpaca_preference: "),
    ],
)
def test_pairs_are_no_conversations(tmp_path: Path, registry: Registry, row: dict[str, Any], said: str) -> None:
    message = refusal(tmp_path, registry, "conversation", row, on_bad_row="skip")
    assert message.startswith(f"is a pair of answers ({said}")
    assert "), which stages dpo and rm train on; to train on the conversation without '" in message


def test_explicit_columns_disable_the_hint(tmp_path: Path, registry: Registry) -> None:
    row = {**SHAREGPT_PAIR, "answered": [HUMAN, GPT]}
    assert refusal(tmp_path, registry, "conversation", row).endswith(
        """'chosen', 'rejected', set data.format=sharegpt and data.ignore_columns=["chosen", "rejected"]"""
    )
    ignored = ["chosen", "rejected", "answered"]
    assert read(tmp_path, registry, "conversation", row, name="sharegpt", columns=ColumnRules(ignored=ignored))
    assert read(tmp_path, registry, "conversation", row, columns=ColumnRules({"conversations": "answered"}))


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("conversation", {"conversations": [HUMAN, GPT], "chosen": GPT, "rejected": GPT}),  # it is answered
        ("conversation", {"conversations": [HUMAN, GPT], "chosen": True, "rejected": False}),
        ("conversation", {"conversations": [HUMAN, GPT], "chosen": GPT}),
        ("conversation", {"messages": TURNS, **PAIR}),  # as in HuggingFaceH4/ultrafeedback_binarized
        ("conversation", {**ALPACA_PAIR, "output": "4"}),
        ("conversation", {"messages": TURNS, "label": 1}),
        ("conversation", {"prompt": "2+2?", "completion": "4", "label": True}),
        ("conversation", {"prompt": "2+2?", "completion": "4", "chosen": "4", "rejected": "5"}),
        ("conversation", {"instruction": "2+2?", "output": "4", "kto_tag": False, "chosen": "4", "rejected": "5"}),
        ("conversation", {"src": "2+2?", "tgt": "4", "sort": [1]}),
        ("prompt", SHAREGPT_PAIR),
        ("prompt", PAIR),
        ("unpaired", {**PADDLENLP_PAIR, "response": ["4"], "sort": [1]}),
    ],
)
def test_rows_with_more_columns_are_read(tmp_path: Path, registry: Registry, kind: str, row: dict[str, Any]) -> None:
    assert len(read(tmp_path, registry, kind, row, columns=ColumnRules(ignored=[ALL]))) == 1
    if kind == "conversation":
        assert "has the columns" in refusal(tmp_path, registry, kind, row)
