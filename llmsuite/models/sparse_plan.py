"""Shard plan of decoders with experts for tensor and sequence parallelism: as without. Imports no Paddle.

Each rank has some of the routed experts; the shared ones are sharded along their width.
"""

from __future__ import annotations

import dataclasses

from llmsuite.models.dense_plan import PLAN as DENSE

PLAN = dataclasses.replace(
    DENSE,
    shard_dims=(
        *DENSE.shard_dims,
        ("model.layers.*.mlp.experts.*_proj.weight", 0),
        ("model.layers.*.mlp.experts.*_proj.bias", 0),
        ("model.layers.*.mlp.shared_expert*.gate_proj.weight", 1),
        ("model.layers.*.mlp.shared_expert*.up_proj.weight", 1),
        ("model.layers.*.mlp.shared_expert*.down_proj.weight", 0),
    ),
    experts="model.layers.*.mlp.experts",
    gates="model.layers.*.mlp.gate",
    gate_bias="e_score_correction_bias",
    mtp_norms="model.layers.*.shared_head.norm",
    mtp_inputs=("model.layers.*.enorm", "model.layers.*.hnorm", "model.layers.*.eh_proj"),
)
"""It has entries for all parameters that any described decoder with experts has, but not the name of `num_experts`."""
