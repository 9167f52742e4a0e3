"""What generation takes on a rank beside training, in rollouts and evaluations: a whole model for it, its cache; and a
reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llmsuite.models.anatomy import Anatomy, GroupedQuery
from llmsuite.models.targets import is_factor
from llmsuite.parallel.mesh import Mesh
from llmsuite.planning.layout import Layout, LocalParameter, element_bytes
from llmsuite.recipe.resolve import RunPlan
from llmsuite.recipe.shape import local_weights

_COPIES = 2
"""The cache is copied where completions join it or leave it."""


def decoder_bytes(layout: Layout, mesh: Mesh) -> float:
    """The weights for generation, whole on each rank that reads data, and those of a reward model; 0 for a stage
    that generates nothing, or where servers draw."""
    plan = layout.plan
    if not mesh.reads_data or not (_draws_here(plan) or _answers(plan)):
        return 0.0
    values = sum(math.prod(shape) for name, shape in layout.shapes.items() if not is_factor(name))
    values += _reward_values(plan.recipe) if _draws_here(plan) else 0
    return float(values * element_bytes(plan))


def _reward_values(recipe: Any) -> int:
    """Parameters of the reward model, which is whole on such a rank too; 0 where there is none, or it is not there."""
    from llmsuite.checkpoint.tensors import TensorFiles

    weights = recipe.reward.model.weights if "model" in recipe.reward.functions else None
    if weights is None or not (local_weights(weights) / "config.json").is_file():
        return 0
    files = TensorFiles(local_weights(weights), "model")
    return sum(math.prod(files.spec(name).shape) for name in files.names)


def _draws_here(plan: RunPlan) -> bool:
    return plan.rollout_engine is not None and not plan.rollout_engine.remote


def _answers(plan: RunPlan) -> bool:
    return plan.recipe.generation.max_new_tokens is not None


def reference_bytes(plan: RunPlan, held: Sequence[LocalParameter]) -> float:
    """The weights of the reference of a stage that keeps some, sharded as those that are trained."""
    if all(prepass.kind != "reference" for prepass in plan.profile.prepasses):
        return 0.0
    return float(sum(h.parameter_bytes for h in held))


def cache_bytes(layout: Layout, anatomy: Anatomy, mesh: Mesh) -> float:
    """The keys and values of the completions or answers that a rank draws at once, all as long as can be."""
    plan = layout.plan
    if not mesh.reads_data or not (_draws_here(plan) or _answers(plan)):
        return 0.0
    rows = plan.recipe.generation.batch_size if _answers(plan) else _drawn_at_once(plan, mesh)
    each = 0
    for layer in anatomy.layers:
        attention = layer.attention
        if isinstance(attention, GroupedQuery):
            each += 2 * attention.kv_heads * attention.head_size
        else:
            each += attention.heads * (attention.nope + attention.rope + attention.value)
    return float(_COPIES * rows * plan.recipe.data.max_length * each * element_bytes(plan))


def _drawn_at_once(plan: RunPlan, mesh: Mesh) -> int:
    recipe: Any = plan.recipe  # whose section `rollout` only such stages have
    rollout = recipe.rollout
    prompts = -(-plan.recipe.train.global_batch_size * plan.profile.updates // len(mesh.readers))
    return min(max(rollout.batch_size, rollout.num_generations), prompts * rollout.num_generations)
