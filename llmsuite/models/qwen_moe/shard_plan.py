"""Shard plan of Qwen with experts for tensor and sequence parallelism: as without. Imports no Paddle.

Each rank has some of the routed experts; the shared one is sharded along its width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from llmsuite.models.dense_plan import WITHOUT_MLP_BIASES as DENSE
from llmsuite.models.dense_plan import expert_dims
from llmsuite.models.qwen_moe.config import QwenMoeConfig
from llmsuite.models.shard_plan import indivisible


def _problems(config: QwenMoeConfig, tp: int) -> Iterator[str]:
    yield from DENSE.problems(config, tp)
    sizes = {
        "num_experts": config.num_experts,
        "shared_expert_intermediate_size": config.shared_size,
    }
    yield from indivisible(sizes, tp)


PLAN = dataclasses.replace(
    DENSE,
    shard_dims=(
        *DENSE.shard_dims,
        *expert_dims("shared_expert"),
    ),
    problems=_problems,
    experts="model.layers.*.mlp.experts",
    num_experts="num_experts",
    gates="model.layers.*.mlp.gate",
)
