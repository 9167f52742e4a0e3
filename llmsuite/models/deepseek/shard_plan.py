"""Shard plan of DeepSeek for tensor and sequence parallelism. Imports no Paddle.

As of a dense decoder, but for its attention: heads are sharded; compressed queries, keys and values are replicated.
Each rank has some of the routed experts; the shared ones are sharded along their width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from llmsuite.models.deepseek.config import DeepSeekConfig
from llmsuite.models.dense_plan import WITHOUT_MLP_BIASES as DENSE
from llmsuite.models.shard_plan import indivisible
from llmsuite.models.sparse_plan import PLAN as SPARSE
from llmsuite.models.sparse_plan import ROUTED, shared_dims


def _problems(config: DeepSeekConfig, tp: int) -> Iterator[str]:
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "n_routed_experts": config.n_routed_experts,
        "n_shared_experts x moe_intermediate_size": config.shared_size,
    }
    return indivisible(sizes, tp)


PLAN = dataclasses.replace(
    SPARSE,
    shard_dims=(
        *(entry for entry in DENSE.shard_dims if ".self_attn." not in entry[0]),
        ("model.layers.*.self_attn.q_proj.weight", 1),
        ("model.layers.*.self_attn.q_b_proj.weight", 1),
        ("model.layers.*.self_attn.kv_b_proj.weight", 1),
        ("model.layers.*.self_attn.o_proj.weight", 0),
        ROUTED,
        *shared_dims("shared_experts"),
    ),
    problems=_problems,
    num_experts="n_routed_experts",
)
