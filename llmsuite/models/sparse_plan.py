"""Shard plan of described decoders with experts for tensor and sequence parallelism: as without. Imports no Paddle.

Each rank has some of the routed experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from llmsuite.models.decoder_config import DenseConfig
from llmsuite.models.dense_plan import WITHOUT_MLP_BIASES as DENSE
from llmsuite.models.shard_plan import ShardPlan, indivisible

_NOT_HERE = frozenset(
    (
        "model.layers.*.self_attn.[qkv]_proj.bias",
        "model.layers.*.mlp.gate_proj.weight",
        "model.layers.*.mlp.up_proj.weight",
        "model.layers.*.mlp.down_proj.weight",
    )
)
"""Patterns of parameters that no described decoder with experts has."""


def _problems(config: DenseConfig, tp: int) -> Iterator[str]:
    assert config.experts_key is not None
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        config.experts_key: config.num_routed_experts,
    }
    yield from indivisible(sizes, tp)


def sparse_plan(experts_key: str) -> ShardPlan:
    """The plan of a family whose config has the number of experts in this field."""
    return dataclasses.replace(
        DENSE,
        shard_dims=(
            *(entry for entry in DENSE.shard_dims if entry[0] not in _NOT_HERE),
            ("model.layers.*.mlp.experts.*_proj.weight", 0),
        ),
        problems=_problems,
        experts="model.layers.*.mlp.experts",
        num_experts=experts_key,
        gates="model.layers.*.mlp.gate",
    )
