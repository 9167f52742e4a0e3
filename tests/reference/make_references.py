"""Writes tests/reference/FAMILY/CASE/: tiny models as HF transformers saves them, the logits it gets from them, and
the gradient of their embedding with the loss of the next tokens (in files made since there is such a gradient).

Needs torch, transformers, numpy and safetensors, and neither Paddle nor llmsuite; made with torch 2.15 and
transformers 5.23; llama/mistral_window, and gemma, granite, phi, smollm3, olmo, seed_oss, glm, mixtral, hunyuan,
glm_moe, cohere, starcoder, internlm, ministral, granite_moe, minimax, gpt_oss, qwen_hybrid,
qwen_hybrid_moe and deepseek/kimi_k2, with torch 2.13 and transformers 5.24. (Some of Llama: make_llama_reference.py.)
Run it from anywhere; a second run writes the same values:

    python tests/reference/make_references.py [FAMILY ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

TARGET = Path(__file__).resolve().parent

QWEN = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT = {"vocab_size": 64, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 40}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 24}
# of 48 tokens: bounds between the pairs that are kept and those that are stretched lie at 0.4 and 1.2
UNTRUNCATED = {**YARN, "original_max_position_embeddings": 48, "beta_fast": 4.0, "truncate": False}
DEEPSEEK = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 28,
    "moe_intermediate_size": 10,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 10,
}
ERNIE_EXPERTS = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 10}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
GEMMA = {**QWEN, "num_hidden_layers": 3, "head_dim": 10, "sliding_window": 5}
FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.5,
}
GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
MIXTRAL = {**QWEN, "num_hidden_layers": 3, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 10}
OSS = {
    **MIXTRAL,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
HUNYUAN = {**QWEN, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 10}
GLM_EXPERTS = {
    **QWEN,
    "moe_intermediate_size": 10,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "num_nextn_predict_layers": 0,
}
GROWN = {**YARN, "beta_fast": 4.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
HYBRID = {
    **QWEN,
    "num_hidden_layers": 3,
    "max_position_embeddings": 160,
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "rms_norm_eps": 1e-2,
    "linear_value_head_dim": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
}
HYBRID_EXPERTS = {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 14}
MSCALE = {**YARN, "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.9}

CASES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": {
        "biases": ("llama", {**QWEN, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5}),
        "attention_bias_tied": ("llama", {**QWEN, "attention_bias": True, "tie_word_embeddings": True}),
        "yarn": ("llama", {**QWEN, "num_attention_heads": 2, "rope_parameters": YARN}),
        "mistral": ("mistral", {**QWEN, "sliding_window": None, "head_dim": 10, "pad_token_id": 3}),
        "mistral_window": ("mistral", {**QWEN, "sliding_window": 5, "num_hidden_layers": 3}),
    },
    "mixtral": {
        "wide_heads": ("mixtral", {**MIXTRAL, "head_dim": 10}),
        "window_tied": ("mixtral", {**MIXTRAL, "sliding_window": 5, "tie_word_embeddings": True, "rms_norm_eps": 1e-4}),
    },
    "qwen": {
        "qwen2": ("qwen2", QWEN),
        "qwen2_tied_one_kv_head": (
            "qwen2",
            {**QWEN, "tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-5},
        ),
        "qwen2_yarn": ("qwen2", {**QWEN, "num_attention_heads": 2, "rope_parameters": YARN}),
        "qwen3": ("qwen3", {**QWEN, "head_dim": 10, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        "qwen3_tied": ("qwen3", {**QWEN, "head_dim": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    },
    "qwen_moe": {
        "qwen3": ("qwen3_moe", {**QWEN, **EXPERTS, "head_dim": 10, "norm_topk_prob": True, "mlp_only_layers": [1]}),
        "qwen3_tied_not_normed": (
            "qwen3_moe",
            {**QWEN, **EXPERTS, "head_dim": 8, "tie_word_embeddings": True, "decoder_sparse_step": 2},
        ),
        "qwen2": ("qwen2_moe", {**QWEN, **EXPERTS, "shared_expert_intermediate_size": 14, "rms_norm_eps": 1e-5}),
    },
    "qwen_hybrid": {
        "plain": ("qwen3_5_text", HYBRID),
        "chunks_tied_biases": (
            "qwen3_5_text",
            {**HYBRID, "linear_num_key_heads": 4, "attention_bias": True, "tie_word_embeddings": True},
        ),
    },
    "qwen_hybrid_moe": {
        "next": ("qwen3_next", HYBRID_EXPERTS),
        "next_chunks_dense": (
            "qwen3_next",
            {**HYBRID_EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [0], "linear_conv_kernel_dim": 3},
        ),
        "qwen3_5": ("qwen3_5_moe_text", HYBRID_EXPERTS),
    },
    "ernie": {
        "tied": ("ernie4_5", {**QWEN, "head_dim": 10}),
        "biases": ("ernie4_5", {**QWEN, "head_dim": 6, "use_bias": True, "tie_word_embeddings": False}),
    },
    "gemma": {
        "gemma2": ("gemma2", {**GEMMA, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0}),
        "gemma2_untied_without_caps": (
            "gemma2",
            {**GEMMA, "tie_word_embeddings": False, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        ),
        "gemma3": (
            "gemma3_text",
            {
                **GEMMA,
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                },
            },
        ),
    },
    "granite": {
        "tied": ("granite", {**QWEN, **FACTORS, "tie_word_embeddings": True}),
        "biases": ("granite", {**QWEN, **FACTORS, "attention_bias": True, "mlp_bias": True}),
    },
    "smollm3": {
        "tied": ("smollm3", {**QWEN, "num_hidden_layers": 4, "no_rope_layer_interval": 2, **SPECIAL}),
        "untied_biases": (
            "smollm3",
            {
                **QWEN,
                **SPECIAL,
                "num_hidden_layers": 3,
                "no_rope_layers": [0, 1, 1],
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": False,
            },
        ),
    },
    "phi": {
        "longrope_partial": (
            "phi3",
            {
                **QWEN,
                **SPECIAL,
                "hidden_size": 32,
                "original_max_position_embeddings": 16,
                "partial_rotary_factor": 0.75,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1000.0,
                    "short_factor": [1.0, 1.3, 1.7],
                    "long_factor": [1.0, 2.5, 4.0],
                },
            },
        ),
        "window_tied": (
            "phi3",
            {**QWEN, **SPECIAL, "num_hidden_layers": 3, "sliding_window": 5, "tie_word_embeddings": True},
        ),
    },
    "olmo": {
        "olmo2": ("olmo2", {**QWEN, "eos_token_id": 2}),
        "olmo2_tied": ("olmo2", {**QWEN, "eos_token_id": 2, "attention_bias": True, "tie_word_embeddings": True}),
        "olmo3": ("olmo3", {**QWEN, "eos_token_id": 2, "num_hidden_layers": 5, "sliding_window": 5}),
        "olmo3_yarn": (
            "olmo3",
            {
                **QWEN,
                "eos_token_id": 2,
                "num_attention_heads": 2,
                "num_hidden_layers": 3,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                "sliding_window": 9,
                "rope_parameters": {
                    "full_attention": YARN,
                    "sliding_attention": {"rope_type": "default", "rope_theta": YARN["rope_theta"]},
                },
            },
        ),
    },
    "hunyuan": {
        "plain": ("hunyuan_v1_dense", {**QWEN, "head_dim": 10}),
        "alpha_tied_biases": (
            "hunyuan_v1_dense",
            {
                **HUNYUAN,
                "attention_bias": True,
                "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "alpha": 50.0, "factor": 1.0},
            },
        ),
    },
    "seed_oss": {
        "biases": ("seed_oss", {**QWEN, "head_dim": 10, "attention_out_bias": True, "mlp_bias": True}),
        "plain": ("seed_oss", {**QWEN, "head_dim": 6}),
    },
    "glm": {
        "partial": ("glm4", {**QWEN, **SPECIAL, "head_dim": 12}),
        "tied": ("glm4", {**QWEN, **SPECIAL, "head_dim": 8, "attention_bias": False, "tie_word_embeddings": True}),
    },
    "cohere": {
        "tied": (
            "cohere2",
            {**QWEN, "num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": 2, "logit_scale": 0.8},
        ),
        "untied_biases": (
            "cohere2",
            {
                **QWEN,
                "num_hidden_layers": 3,
                "sliding_window": 5,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
                "attention_bias": True,
                "logit_scale": 1.5,
                "layer_norm_eps": 1e-4,
                "tie_word_embeddings": False,
                "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
            },
        ),
    },
    "starcoder": {
        "tied": ("starcoder2", QWEN),
        "window_without_biases": (
            "starcoder2",
            {
                **QWEN,
                "num_hidden_layers": 3,
                "sliding_window": 5,
                "use_bias": False,
                "norm_epsilon": 1e-4,
                "tie_word_embeddings": False,
            },
        ),
    },
    "internlm": {
        "internlm3_biases": ("internlm3", {**QWEN, "head_dim": 10, "attention_bias": True, "mlp_bias": True}),
        "internlm3_dynamic_tied": (
            "internlm3",
            {
                **QWEN,
                "head_dim": 6,
                "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 6.0},
            },
        ),
    },
    "ministral": {
        "grown": ("ministral3", {**QWEN, "head_dim": 12, "rope_parameters": {**GROWN, "mscale": 1.0}}),
        "grown_window_tied": (
            "ministral3",
            {
                **QWEN,
                "head_dim": 12,
                "num_hidden_layers": 3,
                "sliding_window": 9,
                "tie_word_embeddings": True,
                "rope_parameters": GROWN,
            },
        ),
    },
    "granite_moe": {
        "tied": ("granitemoe", {**MIXTRAL, **FACTORS, "tie_word_embeddings": True}),
        "biases": ("granitemoe", {**MIXTRAL, **FACTORS, "attention_bias": True, "num_experts_per_tok": 2}),
    },
    "minimax": {
        "partial": (
            "minimax_m2",
            {
                **MIXTRAL,
                "head_dim": 12,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            },
        ),
        "tied": ("minimax_m2", {**MIXTRAL, "head_dim": 6, "tie_word_embeddings": True, "rms_norm_eps": 1e-4}),
    },
    "gpt_oss": {
        "oss_yarn": ("gpt_oss", {**OSS, "sliding_window": 5, "rope_parameters": UNTRUNCATED}),
        "full_tied": ("gpt_oss", {**OSS, "tie_word_embeddings": True, "layer_types": ["full_attention"] * 2}),
    },
    "glm_moe": {
        "partial": (
            "glm4_moe",
            {**GLM_EXPERTS, **GROUPED, "head_dim": 12, "attention_bias": True, "use_qk_norm": True},
        ),
        "one_group": (
            "glm4_moe",
            {
                **GLM_EXPERTS,
                "head_dim": 8,
                "first_k_dense_replace": 0,
                "n_shared_experts": 2,
                "norm_topk_prob": False,
                "routed_scaling_factor": 2.5,
                "tie_word_embeddings": True,
            },
        ),
    },
    "ernie_moe": {
        "tied": ("ernie4_5_moe", {**QWEN, **ERNIE_EXPERTS, "num_hidden_layers": 3}),
        "no_shared_experts": (
            "ernie4_5_moe",
            {
                **QWEN,
                **ERNIE_EXPERTS,
                "num_hidden_layers": 5,
                "moe_num_shared_experts": 0,
                "moe_layer_start_index": 0,
                "moe_layer_end_index": 3,
                "moe_layer_interval": 2,
                "tie_word_embeddings": False,
            },
        ),
    },
    "gpt": {
        "tied": ("gpt2", GPT),
        "untied_wide": ("gpt2", {**GPT, "n_inner": None, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
    },
    "deepseek": {
        "v2_lite": ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": MSCALE}),
        "v2_grouped": (
            "deepseek_v2",
            {**DEEPSEEK, **GROUPED, "q_lora_rank": 12, "topk_method": "group_limited_greedy", "rms_norm_eps": 1e-5},
        ),
        "kimi_k2": (
            "deepseek_v3",
            {
                **DEEPSEEK,
                "q_lora_rank": 12,
                "n_group": 1,
                "topk_group": 1,
                "n_shared_experts": 1,
                "routed_scaling_factor": 2.8,
                "rope_parameters": {**MSCALE, "beta_fast": 1.0},
                "num_nextn_predict_layers": 0,
            },
        ),
        "v3": ("deepseek_v3", {**DEEPSEEK, **GROUPED, "q_lora_rank": 12, "num_nextn_predict_layers": 0}),
        "v3_yarn_not_normed": (
            "deepseek_v3",
            {
                **DEEPSEEK,
                **GROUPED,
                "q_lora_rank": None,
                "n_group": 1,
                "topk_group": 1,
                "norm_topk_prob": False,
                "n_shared_experts": 1,
                "first_k_dense_replace": 0,
                "rope_parameters": MSCALE,
                "num_nextn_predict_layers": 0,
            },
        ),
    },
}
SHAPES = {
    "yarn": (1, 56),
    "qwen2_yarn": (1, 56),
    "v2_lite": (1, 56),
    "kimi_k2": (1, 56),
    "olmo3_yarn": (1, 56),
    "oss_yarn": (1, 56),
    "alpha_tied_biases": (1, 56),
    "grown": (1, 56),
    "grown_window_tied": (1, 56),
    "chunks_tied_biases": (1, 70),
    "next_chunks_dense": (1, 70),
}
"""Rows and length of the input, where they are not (2, 12)."""
ONE_MORE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""`model_type` of cases whose gains are 1 + weight, and are to be near 1: with larger ones, logits after linear
attention would be sensitive to rounding."""
PUBLISHED_AS = {
    "kimi_k2": {"model_type": "kimi_k2"},
    "internlm3_biases": {"architectures": ["InternLM3ForCausalLM"]},
    "internlm3_dynamic_tied": {"architectures": ["InternLM3ForCausalLM"]},
}
"""Keys of config.json of cases whose published models have the network of another type by their own name."""


def fill(model: Any, rng: np.random.Generator) -> None:
    """Values large enough that logits are of order 1 and every term of the model shows in them."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or name.endswith("embed_scale"):
                continue
            noise = torch.from_numpy(rng.standard_normal(tuple(tensor.shape)).astype("float32"))
            if model.config.model_type == "gpt_oss" and name.endswith("experts.gate_up_proj"):
                noise *= 3.0  # its clamped SwiGLU cuts some of the products
            is_gain = tensor.ndim == 1 and name.endswith(".weight")
            mean = 1.0
            if model.config.model_type in ONE_MORE and not name.endswith("linear_attn.norm.weight"):
                mean = 0.0
            tensor.copy_(mean + 0.3 * noise if is_gain else 0.2 * noise)


def make(directory: Path, model_type: str, keys: dict[str, Any], seed: int) -> None:
    """One directory: config.json and model.safetensors by save_pretrained, and reference.npz."""
    rng = np.random.default_rng(seed)
    config = AutoConfig.for_model(model_type, **keys)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    fill(model, rng)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    if directory.name in PUBLISHED_AS:
        written = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        written |= PUBLISHED_AS[directory.name]
        (directory / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    input_ids = rng.integers(0, config.vocab_size, SHAPES.get(directory.name, (2, 12)))
    ids = torch.from_numpy(input_ids)
    model.get_input_embeddings().padding_idx = None  # torch leaves the gradient of its row out
    logits = model.double()(ids).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    found = {"logits": logits.detach(), "embedding_gradient": model.get_input_embeddings().weight.grad}
    arrays = {name: value.numpy().astype("float32") for name, value in found.items()}
    np.savez(directory / "reference.npz", input_ids=input_ids, **arrays)
    sizes = ", ".join(f"{path.name} {path.stat().st_size}" for path in sorted(directory.iterdir()))
    print(f"{directory.name}: {sizes}; logits within {logits.abs().max():.2f}")


if __name__ == "__main__":
    for family in sys.argv[1:] or CASES:
        for number, (case, (model_type, keys)) in enumerate(CASES[family].items()):
            make(TARGET / family / case, model_type, keys, seed=number)
