"""How a Qwen model is cut for tensor and sequence parallelism, as Llama is. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.models.qwen.config import QwenConfig
from llmsuite.models.shard_plan import ShardPlan, indivisible


def _problems(config: QwenConfig, tp: int) -> Iterator[str]:
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
    }
    return indivisible(sizes, tp)


PLAN = ShardPlan(
    cut=(
        ("model.embed_tokens.weight", 0),
        ("model.layers.*.self_attn.[qkv]_proj.weight", 1),
        ("model.layers.*.self_attn.[qkv]_proj.bias", 0),
        ("model.layers.*.self_attn.o_proj.weight", 0),
        ("model.layers.*.mlp.gate_proj.weight", 1),
        ("model.layers.*.mlp.up_proj.weight", 1),
        ("model.layers.*.mlp.down_proj.weight", 0),
        ("lm_head.weight", 1),
    ),
    embedding="model.embed_tokens",
    regions=("model.layers.*.self_attn", "model.layers.*.mlp"),
    layers="model.layers",
    first=("model.embed_tokens",),
    last=("model.norm", "lm_head", "score"),
    last_norm="model.norm",
    problems=_problems,
)
