"""Variants of DPO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.cache import isolated_cache
from llmsuite.stages.dpo import DpoStage
from llmsuite.stages.pairs import Pair
from tests.support import dpo_case

VARIANTS: dict[str, dict[str, Any]] = {
    "orpo": {"loss": "orpo", "beta": 0.5},
    "simpo": {"loss": "simpo", "beta": 2.0, "gamma": 0.5},
    "kto_pair": {"loss": "kto_pair", "beta": 0.5},
    "sigmoid and sft": {"sft_weight": 0.3},
    "cpo and sft of answers": {"loss": "cpo", "beta": 0.5, "sft_weight": 0.3, "sft_mean": "answers"},
    "orpo with sft of answers": {"loss": "orpo", "beta": 0.5, "sft_mean": "answers"},
}
BY_MICRO_BATCH: dict[str, dict[str, Any]] = {
    "sigmoid and sft of micro-batches": {"sft_weight": 0.3, "sft_mean": "micro_batches"},
}
"""Those in which the loss depends on the micro-batches."""


def made(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[DpoStage, list[Pair]]:
    """A stage and pairs; where it has a reference, that thinks somewhat less of the answers than the policy."""
    monkeypatch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path)))
    stage = dpo_case.stage(**{**VARIANTS, **BY_MICRO_BATCH}[name])
    pairs, _ = dpo_case.pairs(stage, dpo_case.rows(6))
    stage.before_training(dpo_case.model(), pairs)
    if stage._reference.table:
        answers = [answer for pair in pairs for answer in pair.answers]
        stage._reference.table = dpo_case.MovedLogps(stage._reference.table, -0.5, answers)
    return stage, pairs
