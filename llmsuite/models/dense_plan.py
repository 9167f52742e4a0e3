"""Shard plan of dense decoders for tensor and sequence parallelism. Imports no Paddle.

Column-parallel matrices [inputs, outputs] are sharded along their outputs, row-parallel ones along their inputs
(Shoeybi et al. 2019, arXiv 1909.08053), the embedding along the vocabulary. The bias of a column-parallel matrix is
sharded with it; that of a row-parallel one is replicated. Of latent attention, heads are sharded; compressed queries,
keys and values are replicated. Linear attention is cut by heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.models.decoder_config import DecoderConfig
from llmsuite.models.protocols import HasGroupedHeads
from llmsuite.models.shape_spec import GatedDelta, MoE
from llmsuite.models.shard_plan import ShardPlan, indivisible


def _problems(config: DecoderConfig, tp: int) -> Iterator[str]:
    if tp > 1 and config.uncut is not None:
        yield f"is {tp}; {config.uncut}"
        return
    sizes = {"num_attention_heads": config.num_attention_heads}
    if isinstance(config, HasGroupedHeads):
        sizes["num_key_value_heads"] = config.num_key_value_heads
    if config.experts_key is not None:
        sizes[config.experts_key] = config.num_routed_experts
    for layer in config.shape_spec().layers:
        if not isinstance(layer.mlp, MoE):
            sizes["intermediate_size"] = layer.mlp.width
        elif layer.mlp.shared_width:
            sizes[config.shared_key] = layer.mlp.shared_width
        if isinstance(layer.attention, GatedDelta):
            sizes["linear_num_key_heads"] = layer.attention.key_heads
    yield from indivisible(sizes, tp)


PLAN = ShardPlan(
    shard_dims=(
        ("model.embed_tokens.weight", 0),
        ("model.layers.*.self_attn.[qkv]_proj.weight", 1),
        ("model.layers.*.self_attn.[qkv]_proj.bias", 0),
        ("model.layers.*.self_attn.o_proj.weight", 0),
        ("model.layers.*.self_attn.q_b_proj.weight", 1),
        ("model.layers.*.self_attn.kv_b_proj.weight", 1),
        ("model.layers.*.self_attn.sinks", 0),
        ("model.layers.*.mlp.gate_proj.weight", 1),
        ("model.layers.*.mlp.gate_proj.bias", 0),
        ("model.layers.*.mlp.up_proj.weight", 1),
        ("model.layers.*.mlp.up_proj.bias", 0),
        ("model.layers.*.mlp.down_proj.weight", 0),
        ("model.layers.*.self_attn.in_*_proj.weight", 1),
        ("model.layers.*.self_attn.[qkv]_conv.weight", 2),
        ("model.layers.*.self_attn.A_log", 0),
        ("model.layers.*.self_attn.dt_bias", 0),
        ("model.layers.*.self_attn.out_proj.weight", 0),
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
"""It has entries for all parameters that any dense decoder has; a pattern that matches none has no effect."""
