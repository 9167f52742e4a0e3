"""Adapters and prefixes of PaddleNLP's argument files in recipes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.paddlenlp_arguments import LORA, SFT, Convert


def test_prefix_tuning(converted: Convert) -> None:
    found = converted({**SFT, "prefix_tuning": True, "num_prefix_tokens": 16})
    assert (found.recipe["stage"], found.recipe["prefix"]) == ("sft", {"tokens": 16})
    assert any("positions of the text start after the prefix" in note for note in found.notes)
    assert converted({**SFT, "prefix_tuning": True}).recipe["prefix"] == {"tokens": 128}
    made = converted({**SFT, "prefix_tuning": True, "prefix_projection": True})
    assert made.recipe["prefix"] == {"tokens": 128, "projection": True}
    wide = converted({**SFT, "prefix_tuning": True, "prefix_projection": True, "prefix_projection_hidden_size": 64})
    assert wide.recipe["prefix"] == {"tokens": 128, "projection": True, "projection_hidden_size": 64}
    plain = converted({**SFT, "prefix_tuning": False, "num_prefix_tokens": 16})
    assert "prefix" not in plain.recipe
    assert ("num_prefix_tokens", 16, "belongs to prefix_tuning") in plain.left_out


def test_lora_becomes_a_recipe(converted: Convert) -> None:
    recipe = converted(LORA).recipe
    assert recipe["stage"] == "lora"
    assert recipe["lora"] == {"rank": 16, "alpha": 32.0}
    assert recipe["model"]["family"] == "qwen"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lora_dropout": 0.05}, {"dropout": 0.05}),
        ({"lora_dropout": 0}, {}),
        ({"pissa": True, "rslora": True}, {"init": "pissa", "alpha": 16.0}),
        ({"loraga": True}, {"init": "lora_ga", "init_batches": 8}),
        (
            {"loraga": True, "loraga_init_iters": 9, "loraga_stable_gamma": 16, "loraga_gradient_offload": True},
            {"init": "lora_ga", "init_batches": 3, "init_gamma": 16.0},
        ),
        ({"loraga": False, "loraga_init_iters": 9}, {}),
    ],
)
def test_kinds_of_adapters(converted: Convert, given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert converted({**LORA, **given}).recipe["lora"] == {"rank": 16, "alpha": 32.0, **expected}


def test_mora_has_no_scale(converted: Convert) -> None:
    recipe = converted({**LORA, "use_mora": True, "rslora": True, "lora_plus_scale": 4.0}).recipe
    assert recipe["lora"] == {"rank": 16, "method": "mora"}


def test_lokr_gets_its_rank_alone(converted: Convert) -> None:
    found = converted({**SFT, "lokr": True, "lokr_dim": 4, "lora_rank": 16})
    assert found.recipe["stage"] == "lora"
    assert found.recipe["lora"] == {"rank": 4, "alpha": 4.0, "method": "lokr"}
    assert converted({**SFT, "lokr": True}).recipe["lora"]["rank"] == 8
    assert "lora" not in converted({**SFT, "lokr": False, "lokr_dim": 4}).recipe
