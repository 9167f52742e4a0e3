"""The rule about `target_modules`."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.rule import Rule, Violation
from llmsuite.models.protocols import HasShapes
from llmsuite.models.targets import adaptable_modules, linear_modules, pick_modules
from llmsuite.recipe.rules.context import RuleContext


def _no_such_matrix(context: RuleContext) -> Iterator[Violation]:
    lora = context.recipe.lora
    qat = context.recipe.qat
    requested = []
    if lora.rank is not None and lora.target_modules:
        requested.append(("lora.target_modules", lora.target_modules, adaptable_modules))
    if qat.weight_bits is not None and qat.target_modules:
        requested.append(("qat.target_modules", qat.target_modules, linear_modules))
    names = None
    if requested and context.config is not None:
        names = context.family.names()
    if not isinstance(names, HasShapes):
        return
    shapes = names.parameter_shapes(context.config)
    plan = context.shard_plan
    for key, patterns, modules in requested:
        try:
            # a head tied to the embedding is reported by another rule
            pick_modules([*modules(shapes, plan), plan.embedding, "lm_head"], plan, patterns, key)
        except UserError as error:
            yield key, str(error).removeprefix(f"{key}: ")


TARGET_RULES = (
    Rule(
        "`target_modules` of `lora` or `qat` that match no matrix of the model",
        "nothing would be trained or quantised",
        ("--lora.rank=8", '--lora.target_modules=["q_pro"]'),
        _no_such_matrix,
    ),
)
"""Rules about matrices."""
