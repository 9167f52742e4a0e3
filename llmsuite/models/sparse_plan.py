"""Shard plan of decoders with experts for tensor and sequence parallelism: as without. Imports no Paddle.

Each rank has some of the routed experts; the shared ones are sharded along their width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from llmsuite.models.decoder_config import DenseConfig
from llmsuite.models.dense_plan import WITHOUT_MLP_BIASES as DENSE
from llmsuite.models.dense_plan import delta_sizes
from llmsuite.models.shape_spec import GatedMLP, MoE
from llmsuite.models.shard_plan import indivisible

ROUTED = ("model.layers.*.mlp.experts.*_proj.weight", 0)
"""The entry of `ShardPlan.shard_dims` for routed experts."""


def shared_dims(module: str) -> tuple[tuple[str, int], ...]:
    """The entries of `ShardPlan.shard_dims` for the shared experts, the module of an MLP with this name."""
    return (
        (f"model.layers.*.mlp.{module}.gate_proj.weight", 1),
        (f"model.layers.*.mlp.{module}.up_proj.weight", 1),
        (f"model.layers.*.mlp.{module}.down_proj.weight", 0),
    )


def _problems(config: DenseConfig, tp: int) -> Iterator[str]:
    assert config.experts_key is not None
    if tp > 1 and config.uncut is not None:
        yield f"is {tp}; {config.uncut}"
        return
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        config.experts_key: config.num_routed_experts,
        **delta_sizes(config),
    }
    for layer in config.shape_spec().layers:
        if isinstance(layer.mlp, GatedMLP):
            sizes["intermediate_size"] = layer.mlp.width
        elif isinstance(layer.mlp, MoE) and layer.mlp.shared_width:
            sizes[config.shared_key] = layer.mlp.shared_width
    yield from indivisible(sizes, tp)


PLAN = dataclasses.replace(
    DENSE,
    shard_dims=(
        *DENSE.shard_dims,
        ROUTED,
        ("model.layers.*.mlp.experts.*_proj.bias", 0),
        *shared_dims("shared_experts"),
        *shared_dims("shared_expert"),
    ),
    problems=_problems,
    experts="model.layers.*.mlp.experts",
    gates="model.layers.*.mlp.gate",
    gate_bias="e_score_correction_bias",
    mtp_norms="model.layers.*.shared_head.norm",
    mtp_inputs=("model.layers.*.enorm", "model.layers.*.hnorm", "model.layers.*.eh_proj"),
)
"""It has entries for all parameters that any described decoder with experts has, but not the name of `num_experts`."""
