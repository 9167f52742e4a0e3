"""A stage of online DPO, and pairs that it trains on."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmsuite.contract.registry import Registry
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.engine.data import make_stage
from llmsuite.recipe.resolve import plan_run
from llmsuite.stages.online_dpo import OnlineDpoStage, SampledPair
from tests.support.grpo_case import completion
from tests.support.paths import DATA, ROOT

RECIPE = ROOT / "recipes" / "llama" / "online_dpo.json"


def stage(registry: Registry, *words: str, padding_free: bool = False) -> OnlineDpoStage:
    plan = plan_run(RECIPE, ["--rollout.max_completion_length=7", *words], registry, smoke=True)
    made = make_stage(
        plan.model,
        plan.data,
        plan.parallel,
        plan.train,
        registry,
        lambda: "",
        TextTokenizer(DATA / "tokenizer"),
        padding_free,
    )
    assert isinstance(made, OnlineDpoStage)
    return made


def pairs() -> list[SampledPair]:
    rng = np.random.default_rng(0)
    found = []
    for number, (prompt, lengths) in enumerate([([3, 4, 5], (3, 5)), ([6, 7], (2, 7)), ([8, 3, 9, 2], (1, 6))]):
        both = [completion(prompt, rng.integers(2, 19, length).tolist(), number=i) for i, length in enumerate(lengths)]
        found.append(SampledPair(*both, is_trained=number != 1))
    return found


def batches(made: OnlineDpoStage, size: int) -> list[Any]:
    """With log-probabilities by a reference: -20 for each answer."""
    found = [made.collate(pairs()[i : i + size]) for i in range(0, 3, size)]
    for batch in found:
        batch["reference"] = np.full(2 * len(batch["pair_weights"]), -20.0)
    return found
