"""Shard plan of DeepSeek for tensor and sequence parallelism. Imports no Paddle.

Heads are sharded; compressed queries, keys and values are replicated. Each rank has some of the routed experts; other
MLPs are sharded along their width.
"""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.models.deepseek.config import DeepSeekConfig
from llmsuite.models.shard_plan import ShardPlan, indivisible


def _problems(config: DeepSeekConfig, tp: int) -> Iterator[str]:
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "n_routed_experts": config.n_routed_experts,
        "n_shared_experts x moe_intermediate_size": config.shared_size,
    }
    return indivisible(sizes, tp)


PLAN = ShardPlan(
    shard_dims=(
        ("model.embed_tokens.weight", 0),
        ("model.layers.*.self_attn.q_proj.weight", 1),
        ("model.layers.*.self_attn.q_b_proj.weight", 1),
        ("model.layers.*.self_attn.kv_b_proj.weight", 1),
        ("model.layers.*.self_attn.o_proj.weight", 0),
        ("model.layers.*.mlp.gate_proj.weight", 1),
        ("model.layers.*.mlp.up_proj.weight", 1),
        ("model.layers.*.mlp.down_proj.weight", 0),
        ("model.layers.*.mlp.experts.*_proj.weight", 0),
        ("model.layers.*.mlp.shared_experts.gate_proj.weight", 1),
        ("model.layers.*.mlp.shared_experts.up_proj.weight", 1),
        ("model.layers.*.mlp.shared_experts.down_proj.weight", 0),
        ("lm_head.weight", 1),
    ),
    embedding="model.embed_tokens",
    tp_regions=("model.layers.*.self_attn", "model.layers.*.mlp"),
    layers="model.layers",
    first=("model.embed_tokens",),
    last=("model.norm", "lm_head", "score"),
    last_norm="model.norm",
    problems=_problems,
    experts="model.layers.*.mlp.experts",
    num_experts="n_routed_experts",
    mtp_norms="model.layers.*.shared_head.norm",
    mtp_inputs=("model.layers.*.enorm", "model.layers.*.hnorm", "model.layers.*.eh_proj"),
    gates="model.layers.*.mlp.gate",
    gate_bias="e_score_correction_bias",
)
