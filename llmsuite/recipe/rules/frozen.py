"""A rule shared by `reft` and `prefix`, which freeze the model."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.contract.schema.recipe import Recipe
from llmsuite.contract.schema.rule import Violation


def keys_that_change_the_model(recipe: Recipe, key: str) -> Iterator[Violation]:
    """Yield a violation for each key that trains or quantises the model, which `key` freezes."""
    for other, is_set in (
        ("qat.weight_bits", recipe.qat.weight_bits is not None),
        ("train.mtp_loss_weight", recipe.train.mtp_loss_weight > 0),
        ("train.expert_bias_rate", recipe.train.expert_bias_rate > 0),
    ):
        if is_set:
            yield other, f"changes the model, which {key} freezes; set it to null or 0"
