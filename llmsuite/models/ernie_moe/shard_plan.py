"""Shard plan of ERNIE-4.5 with experts for tensor and sequence parallelism: as without. Imports no Paddle.

Each rank has some of the routed experts; the shared ones are sharded along their width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from llmsuite.models.dense_plan import WITHOUT_MLP_BIASES as DENSE
from llmsuite.models.dense_plan import expert_dims
from llmsuite.models.ernie_moe.config import ErnieMoeConfig
from llmsuite.models.shard_plan import indivisible


def _problems(config: ErnieMoeConfig, tp: int) -> Iterator[str]:
    yield from DENSE.problems(config, tp)
    sizes = {
        "moe_num_experts": config.moe_num_experts,
        "moe_num_shared_experts x moe_intermediate_size": config.shared_size,
    }
    yield from indivisible(sizes, tp)


PLAN = dataclasses.replace(
    DENSE,
    shard_dims=(
        *(entry for entry in DENSE.shard_dims if not entry[0].endswith(".bias")),
        *expert_dims("shared_experts"),
    ),
    problems=_problems,
    experts="model.layers.*.mlp.experts",
    num_experts="moe_num_experts",
    gates="model.layers.*.mlp.gate",
    gate_bias="e_score_correction_bias",
)
