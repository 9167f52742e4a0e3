"""Names of DeepSeek's parameters in each file format. Imports no Paddle.

Our own names are HF's, except for routed experts: HF has a tensor for each, we stack them as [E, inputs, outputs].
"""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.models.decoder_names import (
    Shapes,
    belongs_to_model,
    decoder_shapes,
    expert_shapes,
    expert_tensors,
    is_of_untrained_mtp,
    layer_shapes,
    mlp_shapes,
    mtp_copies,
    mtp_shapes,
)
from llmsuite.models.deepseek.config import DeepSeekConfig
from llmsuite.models.deepseek.shape_spec import shape_spec
from llmsuite.models.head import SCORE
from llmsuite.models.hf_tensors import HfTensors


def parameter_names(config: DeepSeekConfig) -> Iterator[str]:
    """Every parameter of the model, in the order of the layers."""
    yield from parameter_shapes(config)


def parameter_shapes(config: DeepSeekConfig) -> Shapes:
    """Every parameter of the model, in the order of the layers, with its shape."""
    hidden = config.hidden_size
    heads = config.num_attention_heads
    latent = config.kv_lora_rank
    rope = config.qk_rope_head_dim
    width = heads * (config.qk_nope_head_dim + rope)
    rank = config.q_lora_rank
    attention: Shapes
    if rank is None:
        attention = {"q_proj": (hidden, width)}
    else:
        attention = {"q_a_proj": (hidden, rank), "q_a_layernorm": (rank,), "q_b_proj": (rank, width)}
    attention |= {
        "kv_a_proj_with_mqa": (hidden, latent + rope),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (latent, heads * (config.qk_nope_head_dim + config.v_head_dim)),
        "o_proj": (heads * config.v_head_dim, hidden),
    }
    weights: Shapes = {f"{part}.weight": shape for part, shape in attention.items()}

    def decoder_layer(number: int) -> Shapes:
        if not config.has_experts(number):
            return layer_shapes(hidden, weights, mlp_shapes(hidden, config.intermediate_size))
        gate: Shapes = {"gate.weight": (hidden, config.n_routed_experts)}
        if config.has_gate_bias:
            gate["gate.e_score_correction_bias"] = (config.n_routed_experts,)
        routed = expert_shapes(hidden, config.moe_intermediate_size, config.n_routed_experts)
        shared = mlp_shapes(hidden, config.shared_size)
        mlp = gate | routed | {f"shared_experts.{part}": shape for part, shape in shared.items()}
        return layer_shapes(hidden, weights, mlp)

    def layer(number: int) -> Shapes:
        mtp = mtp_shapes(hidden) if number >= config.num_hidden_layers else {}
        return decoder_layer(number) | mtp

    return decoder_shapes(config, shape_spec(config), layer)


def is_linear(name: str) -> bool:
    """True if HF stores this parameter transposed, as [outputs, inputs]; if it is a stack, each of its matrices."""
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight", ".mlp.gate.weight", "lm_head.weight", SCORE))


def hf_tensors(name: str, config: DeepSeekConfig) -> HfTensors:
    """The tensor of an HF model that holds a parameter, or those that are stacked in it.

    The published MTP layers have copies of the embedding and the output projection.
    """
    copies = tuple(mtp_copies(config).get(name, ()))
    return expert_tensors(name, config.n_routed_experts) or HfTensors((name,), copies=copies)


def from_hf(name: str, config: DeepSeekConfig) -> str | None:
    """The full name of a tensor in an HF file; None for one that is computed, a copy, or of a layer after the last."""
    return name if belongs_to_model(name, config) and not name.endswith("rotary_emb.inv_freq") else None


def is_carried(name: str, config: DeepSeekConfig) -> bool:
    """True if a tensor of an HF file belongs to an MTP layer of a model that does not train them."""
    return is_of_untrained_mtp(name, config)


def paddlenlp_prefix(config: DeepSeekConfig) -> str | None:
    """The prefix that PaddleNLP writes instead of `model.`; None for Kimi K2, which it does not have."""
    return None if config.model_type == "kimi_k2" else f"{config.model_type}."
