"""Shard plans of described decoders with experts for tensor and sequence parallelism: as without. Imports no Paddle.

Each rank has some of the routed experts; the shared ones are sharded along their width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from llmsuite.models.decoder_config import DenseConfig
from llmsuite.models.dense_plan import WITHOUT_MLP_BIASES as DENSE
from llmsuite.models.shape_spec import GatedMLP, MoE
from llmsuite.models.shard_plan import ShardPlan, indivisible

_IN_EVERY_LAYER = frozenset(
    (
        "model.layers.*.self_attn.[qkv]_proj.bias",
        "model.layers.*.mlp.gate_proj.weight",
        "model.layers.*.mlp.up_proj.weight",
        "model.layers.*.mlp.down_proj.weight",
    )
)
"""Patterns of parameters that a family without biases whose layers all have experts does not have."""


def _problems(config: DenseConfig, tp: int) -> Iterator[str]:
    assert config.experts_key is not None
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        config.experts_key: config.num_routed_experts,
    }
    for layer in config.shape_spec().layers:
        if isinstance(layer.mlp, GatedMLP):
            sizes["intermediate_size"] = layer.mlp.width
        elif isinstance(layer.mlp, MoE) and layer.mlp.shared_width:
            sizes["n_shared_experts x moe_intermediate_size"] = layer.mlp.shared_width
    yield from indivisible(sizes, tp)


def experts_plan(experts_key: str) -> ShardPlan:
    """The plan of a family whose layers all have experts, without shared ones and biases.

    Args:
        experts_key: the field of the config with the number of experts.
    """
    return dataclasses.replace(
        DENSE,
        shard_dims=(
            *(entry for entry in DENSE.shard_dims if entry[0] not in _IN_EVERY_LAYER),
            ("model.layers.*.mlp.experts.*_proj.weight", 0),
        ),
        problems=_problems,
        experts="model.layers.*.mlp.experts",
        num_experts=experts_key,
        gates="model.layers.*.mlp.gate",
    )


def shared_experts_plan(experts_key: str) -> ShardPlan:
    """The plan of a family with dense layers, shared experts, a bias of the choice and MTP layers; the argument is that
    of `experts_plan`."""
    return dataclasses.replace(
        experts_plan(experts_key),
        shard_dims=(
            *DENSE.shard_dims,
            ("model.layers.*.mlp.experts.*_proj.weight", 0),
            ("model.layers.*.mlp.shared_experts.gate_proj.weight", 1),
            ("model.layers.*.mlp.shared_experts.up_proj.weight", 1),
            ("model.layers.*.mlp.shared_experts.down_proj.weight", 0),
        ),
        mtp_norms="model.layers.*.shared_head.norm",
        mtp_inputs=("model.layers.*.enorm", "model.layers.*.hnorm", "model.layers.*.eh_proj"),
        gate_bias="e_score_correction_bias",
    )
