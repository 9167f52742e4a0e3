"""Shard plan of decoders with experts for tensor and sequence parallelism: as without. Imports no Paddle.

Each rank has some of the routed experts; the shared ones are sharded along their width.
"""

from __future__ import annotations

import dataclasses

from llmsuite.models.dense_plan import WITHOUT_MLP_BIASES as DENSE

ROUTED = ("model.layers.*.mlp.experts.*_proj.weight", 0)
"""The entry of `ShardPlan.shard_dims` for routed experts."""


def shared_dims(module: str) -> tuple[tuple[str, int], ...]:
    """The entries of `ShardPlan.shard_dims` for the shared experts, the module of an MLP with this name."""
    return (
        (f"model.layers.*.mlp.{module}.gate_proj.weight", 1),
        (f"model.layers.*.mlp.{module}.up_proj.weight", 1),
        (f"model.layers.*.mlp.{module}.down_proj.weight", 0),
    )


PLAN = dataclasses.replace(
    DENSE,
    shard_dims=(
        *DENSE.shard_dims,
        ROUTED,
        *shared_dims("shared_experts"),
        *shared_dims("shared_expert"),
    ),
    experts="model.layers.*.mlp.experts",
    gates="model.layers.*.mlp.gate",
    gate_bias="e_score_correction_bias",
    mtp_norms="model.layers.*.shared_head.norm",
    mtp_inputs=("model.layers.*.enorm", "model.layers.*.hnorm", "model.layers.*.eh_proj"),
)
"""It has entries for all parameters that any described decoder with experts has, but not the name of `num_experts`."""
