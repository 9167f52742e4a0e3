"""The rule about the matrices that adapters and rounding are for."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.errors import UserError
from llmsuite.models.targets import adaptable_modules, linear_modules, pick_modules
from llmsuite.recipe.rules.context import RuleContext
from llmsuite.schema.rule import Rule, Violation


def _no_such_matrix(context: RuleContext) -> Iterator[Violation]:
    lora, qat = context.recipe.lora, context.recipe.qat
    asked = []
    if lora.rank is not None and lora.target_modules:
        asked.append(("lora.target_modules", lora.target_modules, adaptable_modules))
    if qat.weight_bits is not None and qat.target_modules:
        asked.append(("qat.target_modules", qat.target_modules, linear_modules))
    names = context.family.names() if asked and context.config is not None else None
    if names is None or not hasattr(names, "parameter_shapes"):
        return
    shapes, plan = names.parameter_shapes(context.config), context.shard_plan
    for key, patterns, modules in asked:
        try:
            # a head that is the embedding is another rule's
            pick_modules([*modules(shapes, plan), plan.embedding, "lm_head"], plan, patterns, key)
        except UserError as error:
            yield key, str(error).removeprefix(f"{key}: ")


TARGET_RULES = (
    Rule(
        "`target_modules` of `lora` or `qat` that match no matrix of the model",
        "nothing would be trained or rounded there",
        ("--lora.rank=8", '--lora.target_modules=["q_pro"]'),
        _no_such_matrix,
    ),
)
"""Rules about matrices."""
