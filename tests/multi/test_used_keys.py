"""The keys that a run reads are those that its components declare as used."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.recorded_keys import CASES

EARLIER = {
    "data.prompts", "data.train", "device", "engine.deterministic", "loggers", "model.config", "model.family",
    "model.preset", "model.tokenizer", "model.weights", "output_dir", "parallel.expert_parallel_degree",
    "parallel.pipeline_parallel_degree", "parallel.pipeline_schedule", "parallel.sharding_parallel_degree",
    "parallel.tensor_parallel_degree", "parallel.virtual_pipeline_degree", "seed", "stage",
}  # fmt: skip
"""Keys that are read before a run: `resolve` makes the plans of them, or a rule refuses them. So are all keys of
section `launch`."""
INERT = {
    "data.answer_tokens", "data.holdout", "dpo.gamma", "dpo.label_smoothing", "dpo.sft_mean", "engine.program",
    "engine.recompute_every", "gkd.answer_end", "gkd.row_length", "grpo.correction_cap", "grpo.correction_level",
    "grpo.dual_clip", "grpo.epsilon", "grpo.kl", "infer.length_penalty", "lora.base_dtype", "lora.dropout",
    "lora.share_first", "online_dpo.gamma", "online_dpo.sft_mean", "parallel.sequence_parallel", "ppo.correction_cap",
    "ppo.correction_level", "prefix.projection", "qat.activation_bits", "train.decay_type",
    "train.loss_watchdog.patience", "train.max_bad_steps", "train.min_lr_ratio", "train.on_spike",
    "train.warmup_rounding", "train.weight_decay",
}  # fmt: skip
"""Keys that are read also where they have no effect, as their defaults change nothing."""
BY_CAPABILITY = {
    "data.end_of_answer": "answer_ends",
    "data.packing": "packing",
    "data.ranked_pairs": "ranked",
    "data.supervise_thoughts": "thoughts",
    "data.text_template": "plain_text",
}
"""Key -> the capability without which a rule refuses it."""
OF_EXPERTS = {"train.expert_balance_loss", "train.expert_bias_rate"}
"""Keys that a rule refuses for families without experts."""
OF_TRAINING = {"model.new_special_tokens", "model.new_tokens"}
"""Keys that a rule refuses for stages that do not train."""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.support.recorded_keys", str(tmp_path_factory.mktemp("runs"))]
    output = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_used_key_is_read(records: dict[str, Any], case: str) -> None:
    record = records[case]
    lacking = {key for key, capability in BY_CAPABILITY.items() if capability not in record["capabilities"]}
    if case != "experts":
        lacking |= OF_EXPERTS
    if case.startswith("infer"):
        lacking |= OF_TRAINING
    unread = {*record["used"]} - {*record["read"]} - EARLIER - lacking
    assert {key for key in unread if not _is_read_elsewhere(key)} == set(), "declare it in `unused`"


@pytest.mark.parametrize("case", CASES)
def test_a_read_key_is_used(records: dict[str, Any], case: str) -> None:
    record = records[case]
    assert {*record["read"]} - {*record["used"]} - INERT == set(), "it is declared in `unused`"


def test_the_exceptions_occur(records: dict[str, Any]) -> None:
    inert = {key for record in records.values() for key in {*record["read"]} - {*record["used"]}}
    assert inert == INERT
    earlier = {key for record in records.values() for key in {*record["used"]} - {*record["read"]}}
    assert earlier >= EARLIER


def _is_read_elsewhere(key: str) -> bool:
    """The launcher reads section `launch`, and a reward or an environment its keys in processes of their own."""
    first, *rest = key.split(".")
    return first == "launch" or (first in ("reward", "environment") and len(rest) > 1)
