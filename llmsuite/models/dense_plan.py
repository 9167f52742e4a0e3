"""Shard plan of dense decoders for tensor and sequence parallelism. Imports no Paddle.

Column-parallel matrices [inputs, outputs] are sharded along their outputs, row-parallel ones along their inputs
(Shoeybi et al. 2019, arXiv 1909.08053), the embedding along the vocabulary. The bias of a column-parallel matrix is
sharded with it; that of a row-parallel one is replicated.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from llmsuite.models.decoder_config import DenseConfig
from llmsuite.models.shape_spec import GatedDelta
from llmsuite.models.shard_plan import ShardPlan, indivisible


def _problems(config: DenseConfig, tp: int) -> Iterator[str]:
    if tp > 1 and config.uncut is not None:
        yield f"is {tp}; {config.uncut}"
        return
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
        **delta_sizes(config),
    }
    yield from indivisible(sizes, tp)


def delta_sizes(config: DenseConfig) -> dict[str, int]:
    """The numbers of heads of linear attention, by field; none for a model without it."""
    for layer in config.shape_spec().layers:
        if isinstance(layer.attention, GatedDelta):
            return {"linear_num_key_heads": layer.attention.key_heads}
    return {}


PLAN = ShardPlan(
    shard_dims=(
        ("model.embed_tokens.weight", 0),
        ("model.layers.*.self_attn.[qkv]_proj.weight", 1),
        ("model.layers.*.self_attn.[qkv]_proj.bias", 0),
        ("model.layers.*.self_attn.o_proj.weight", 0),
        ("model.layers.*.self_attn.sinks", 0),
        ("model.layers.*.mlp.gate_proj.weight", 1),
        ("model.layers.*.mlp.gate_proj.bias", 0),
        ("model.layers.*.mlp.up_proj.weight", 1),
        ("model.layers.*.mlp.up_proj.bias", 0),
        ("model.layers.*.mlp.down_proj.weight", 0),
        ("lm_head.weight", 1),
    ),
    embedding="model.embed_tokens",
    tp_regions=("model.layers.*.self_attn", "model.layers.*.mlp"),
    layers="model.layers",
    first=("model.embed_tokens",),
    last=("model.norm", "lm_head", "score"),
    last_norm="model.norm",
    problems=_problems,
)
"""It has entries for all parameters that any dense decoder has, but for linear attention; a pattern that matches none
has no effect."""
DELTA_DIMS = (
    ("model.layers.*.self_attn.in_*_proj.weight", 1),
    ("model.layers.*.self_attn.[qkv]_conv.weight", 2),
    ("model.layers.*.self_attn.A_log", 0),
    ("model.layers.*.self_attn.dt_bias", 0),
    ("model.layers.*.self_attn.out_proj.weight", 0),
)
"""Further entries of `ShardPlan.shard_dims` for families with linear attention, which is cut by heads."""
WITHOUT_MLP_BIASES = dataclasses.replace(
    PLAN, shard_dims=tuple(entry for entry in PLAN.shard_dims if not re.search(r"\.mlp\..*\.bias$", entry[0]))
)
"""`PLAN` for families with experts."""
