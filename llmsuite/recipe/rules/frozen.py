"""What the rules of `reft` and `prefix` share: kinds of training that leave the model frozen."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.schema.recipe import Recipe
from llmsuite.schema.rule import Violation


def what_changes_the_model(recipe: Recipe, key: str) -> Iterator[Violation]:
    """Keys that train or round the model itself, beside `key`, which leaves it frozen."""
    for other, is_set in (
        ("qat.weight_bits", recipe.qat.weight_bits is not None),
        ("train.mtp_loss_weight", recipe.train.mtp_loss_weight > 0),
        ("train.expert_bias_rate", recipe.train.expert_bias_rate > 0),
    ):
        if is_set:
            yield other, f"changes the model, which {key} leaves frozen; set it to null or 0"
