"""Shard plan of GPT for tensor and sequence parallelism, as that of Llama. Imports no Paddle.

The bias of a column-parallel matrix is sharded with it; that of a row-parallel one is replicated.
"""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.models.gpt.config import GPTConfig
from llmsuite.models.shard_plan import ShardPlan, indivisible


def _problems(config: GPTConfig, tp: int) -> Iterator[str]:
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.mlp_size,
    }
    return indivisible(sizes, tp)


PLAN = ShardPlan(
    shard_dims=(
        ("model.embed_tokens.weight", 0),
        ("model.layers.*.self_attn.[qkv]_proj.weight", 1),
        ("model.layers.*.self_attn.[qkv]_proj.bias", 0),
        ("model.layers.*.self_attn.o_proj.weight", 0),
        ("model.layers.*.mlp.up_proj.weight", 1),
        ("model.layers.*.mlp.up_proj.bias", 0),
        ("model.layers.*.mlp.down_proj.weight", 0),
        ("lm_head.weight", 1),
    ),
    embedding="model.embed_tokens",
    tp_regions=("model.layers.*.self_attn", "model.layers.*.mlp"),
    layers="model.layers",
    first=("model.embed_tokens", "model.embed_positions"),
    last=("model.norm", "lm_head", "score"),
    last_norm="model.norm",
    problems=_problems,
)
