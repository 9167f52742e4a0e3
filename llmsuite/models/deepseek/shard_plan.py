"""Shard plan of DeepSeek for tensor and sequence parallelism. Imports no Paddle.

As of a dense decoder, but for its attention: heads are sharded; compressed queries, keys and values are replicated.
Each rank has some of the routed experts; the shared ones are sharded along their width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from llmsuite.models.deepseek.config import DeepSeekConfig
from llmsuite.models.dense_plan import WITHOUT_MLP_BIASES as DENSE
from llmsuite.models.dense_plan import expert_dims
from llmsuite.models.shard_plan import indivisible


def _problems(config: DeepSeekConfig, tp: int) -> Iterator[str]:
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "n_routed_experts": config.n_routed_experts,
        "n_shared_experts x moe_intermediate_size": config.shared_size,
    }
    return indivisible(sizes, tp)


PLAN = dataclasses.replace(
    DENSE,
    shard_dims=(
        *(entry for entry in DENSE.shard_dims if ".self_attn." not in entry[0]),
        ("model.layers.*.self_attn.q_proj.weight", 1),
        ("model.layers.*.self_attn.q_b_proj.weight", 1),
        ("model.layers.*.self_attn.kv_b_proj.weight", 1),
        ("model.layers.*.self_attn.o_proj.weight", 0),
        *expert_dims("shared_experts"),
    ),
    problems=_problems,
    experts="model.layers.*.mlp.experts",
    num_experts="n_routed_experts",
    mtp_norms="model.layers.*.shared_head.norm",
    mtp_inputs=("model.layers.*.enorm", "model.layers.*.hnorm", "model.layers.*.eh_proj"),
    gates="model.layers.*.mlp.gate",
    gate_bias="e_score_correction_bias",
)
