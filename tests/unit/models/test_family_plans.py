"""Properties of every family that recipes and the engine rely on: presets of the right size, a table of cuts without
gaps."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.model_dir import read_config
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.models.decoder_config import MAX_ROTARY
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import local_slice
from tests.support.families import FAMILIES, PRESETS, tiny

# number of parameters as the model cards say
PUBLISHED = {
    "qwen2-0.5b": 0.494e9,
    "qwen2-1.5b": 1.544e9,
    "qwen2-7b": 7.616e9,
    "qwen2-72b": 72.71e9,
    "qwen2.5-0.5b": 0.494e9,
    "qwen2.5-1.5b": 1.544e9,
    "qwen2.5-3b": 3.086e9,
    "qwen2.5-7b": 7.616e9,
    "qwen2.5-14b": 14.77e9,
    "qwen2.5-32b": 32.76e9,
    "qwen2.5-72b": 72.71e9,
    "qwen3-0.6b": 0.596e9,
    "qwen3-1.7b": 1.721e9,
    "qwen3-4b": 4.022e9,
    "qwen3-8b": 8.191e9,
    "qwen3-14b": 14.77e9,
    "qwen3-32b": 32.76e9,
    "qwen3-4b-2507": 4.022e9,
    "qwen3-next-80b-a3b": 79.67e9,
    "qwen1.5-moe-a2.7b": 14.32e9,
    "qwen2-57b-a14b": 57.41e9,
    "qwen3-30b-a3b": 30.53e9,
    "qwen3-235b-a22b": 235.1e9,
    "qwen3-30b-a3b-2507": 30.53e9,
    "qwen3-235b-a22b-2507": 235.1e9,
    "ernie-4.5-0.3b": 0.3607e9,
    "ernie-4.5-21b-a3b": 21.83e9,
    "ernie-4.5-300b-a47b": 299.5e9,
    "deepseek-v2-lite": 15.71e9,
    "deepseek-v2": 235.7e9,
    "deepseek-v3": 671.0e9,
    "kimi-k2": 1026e9,
    "gpt2": 0.1244e9,
    "gpt2-medium": 0.3548e9,
    "gpt2-large": 0.7740e9,
    "gpt2-xl": 1.558e9,
    "gpt-345m": 0.3549e9,
    "gpt-1.3b": 1.316e9,
    "gpt-6.7b": 6.658e9,
    "gpt-175b": 174.6e9,
    "llama-7b": 6.738e9,
    "llama-13b": 13.02e9,
    "llama-2-7b": 6.738e9,
    "llama-2-13b": 13.02e9,
    "llama-3-8b": 8.030e9,
    "llama-3.1-8b": 8.030e9,
    "llama-3.1-405b": 405.85e9,
    "mistral-7b-v0.1": 7.242e9,
    "mistral-7b-v0.3": 7.248e9,
    "mistral-nemo-12b": 12.25e9,
    "smollm2-135m": 0.1345e9,
    "mixtral-8x7b-v0.1": 46.70e9,
    "mixtral-8x22b-v0.1": 140.6e9,
    "digits": 431e3,  # ours
    "gemma-2-2b": 2.614e9,
    "gemma-2-9b": 9.242e9,
    "gemma-2-27b": 27.23e9,
    "gemma-3-270m": 0.2681e9,
    "gemma-3-1b": 0.9999e9,
    "phi-3-mini-4k": 3.821e9,
    "phi-3-medium-4k": 13.96e9,
    "phi-4": 14.66e9,
    "granite-3.3-2b": 2.534e9,
    "granite-3.3-8b": 8.171e9,
    "smollm3-3b": 3.075e9,
    "olmo-2-1b": 1.485e9,
    "olmo-2-7b": 7.299e9,
    "olmo-2-13b": 13.72e9,
    "olmo-2-32b": 32.23e9,
    "olmo-3-7b": 7.298e9,
    "olmo-3-32b": 32.23e9,
    "seed-oss-36b": 36.15e9,
    "hunyuan-7b": 7.505e9,
    "glm-4-9b-0414": 9.400e9,
    "command-r7b": 8.028e9,
    "internlm3-8b": 8.804e9,
    "ministral-3-8b": 8.490e9,
    "granite-3.1-1b-a400m": 1.335e9,
    "granite-3.1-3b-a800m": 3.299e9,
    "minimax-m2": 228.7e9,
    "gpt-oss-20b": 20.91e9,
    "gpt-oss-120b": 116.83e9,
    "starcoder2-3b": 3.030e9,
    "starcoder2-7b": 7.174e9,
    "glm-4.5-air": 106.9e9,
    "glm-4.5": 352.8e9,
    "glm-4-32b-0414": 32.57e9,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("llama", {"model_type": "mistral"}),
    "mistral with a window": ("llama", {"model_type": "mistral", "sliding_window": 9}),
    "mixtral": ("mixtral", {}),
    "mixtral with a window, tied": ("mixtral", {"sliding_window": 9, "tie_word_embeddings": True}),
    "qwen2": ("qwen", {"model_type": "qwen2"}),
    "qwen3 tied": ("qwen", {"tie_word_embeddings": True}),
    "qwen3 moe": ("qwen_moe", {}),
    "qwen2 moe tied": ("qwen_moe", {"model_type": "qwen2_moe", "tie_word_embeddings": True}),
    "ernie": ("ernie", {}),
    "ernie biased": ("ernie", {"use_bias": True, "tie_word_embeddings": False}),
    "gemma 2": (
        "gemma",
        {
            "model_type": "gemma2",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "rope_local_base_freq": None,
        },
    ),
    "gemma 3 untied": ("gemma", {"tie_word_embeddings": False}),
    "phi": ("phi", {}),
    "phi of which a part is rotated": ("phi", {"partial_rotary_factor": 0.75, "sliding_window": 9}),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {}),
    "olmo": ("olmo", {}),
    "olmo 3": ("olmo", {"model_type": "olmo3", "sliding_window": 9}),
    "hunyuan": ("hunyuan", {}),
    "seed oss": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "glm": ("glm", {}),
    "cohere": ("cohere", {"attention_bias": True}),
    "starcoder": ("starcoder", {}),
    "internlm": ("internlm", {"qkv_bias": True, "bias": True}),
    "ministral": ("ministral", {"sliding_window": 9}),
    "granite moe": ("granite_moe", {"attention_bias": True}),
    "minimax": ("minimax", {}),
    "gpt oss": ("gpt_oss", {}),
    "glm moe": ("glm_moe", {"use_qk_norm": True}),
    "qwen hybrid": ("qwen_hybrid", {}),
    "qwen hybrid moe": ("qwen_hybrid_moe", {}),
    "qwen hybrid moe 3.5": ("qwen_hybrid_moe", {"model_type": "qwen3_5_moe_text"}),
    "ernie moe": ("ernie_moe", {}),
    "ernie moe without shared experts": (
        "ernie_moe",
        {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "tie_word_embeddings": False},
    ),
    "deepseek v3": ("deepseek", {}),
    "kimi k2": ("deepseek", {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1}),
    "deepseek v2": (
        "deepseek",
        {"model_type": "deepseek_v2", "topk_method": "greedy", "norm_topk_prob": False, "q_lora_rank": None},
    ),
    "gpt": ("gpt", {}),
    "gpt untied": ("gpt", {"tie_word_embeddings": False}),
}


@pytest.fixture(params=VARIANTS, scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    family, shape = VARIANTS[request.param]
    made = tiny(family, **shape)
    made.plan = FAMILIES[family].shard_plan
    return made


def shapes_of(model: Any) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("family", "preset"), PRESETS)
def test_presets_have_the_published_number_of_parameters(family: str, preset: str) -> None:
    shape = FAMILIES[family].presets[preset]
    config = FAMILIES[family].config_cls(**shape)
    assert list(config.problems()) == []
    # layers of one kind are all alike, or those of each four: as many more show what they weigh
    sizes = {}
    for layers in (4, 8):
        made = tiny(family, **{**dataclasses.asdict(config), "num_hidden_layers": layers})
        sizes[layers] = sum(math.prod(shape) for shape in shapes_of(made).values())
    total = sizes[4] + (config.num_hidden_layers - 4) / 4 * (sizes[8] - sizes[4])
    assert total == pytest.approx(PUBLISHED[preset], rel=1e-3)


def test_every_preset_is_checked() -> None:
    assert {preset for _, preset in PRESETS} == set(PUBLISHED)


# config.json as it lies on huggingface.co, with what says where it comes from
HUB: dict[str, dict[str, Any]] = {
    "qwen3-4b-2507": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "initializer_range": 0.02,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gpt2-medium": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 1024,
        "n_head": 16,
        "n_layer": 24,
        "n_positions": 1024,
        "n_special": 0,
        "predict_special_tokens": True,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    "deepseek-v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
        "aux_loss_alpha": 0.001,
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1536,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 128,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 60,
        "num_key_value_heads": 128,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 16.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.39.3",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
}


@pytest.mark.parametrize("preset", HUB)
def test_a_published_config_json_is_the_preset(preset: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUB[preset]))
    family, config = read_config(tmp_path, FAMILIES)
    assert config == family.config_cls(**family.presets[preset])


def test_a_published_config_json_of_quantised_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**HUB["deepseek-v2"], "quantization_config": {"fmt": "e4m3"}}))
    with pytest.raises(UserError, match="does not know quantization_config"):
        read_config(tmp_path, FAMILIES)


def test_no_parameter_is_cut_by_two_patterns(model: Any) -> None:
    for name, shape in shapes_of(model).items():
        matching = [pattern for pattern, _ in model.plan.shard_dims if fnmatch.fnmatchcase(name, pattern)]
        assert len(matching) <= 1, name
        # what is held whole by every rank is small, or feeds every head alike
        if not matching:
            assert len(shape) == 1 or fnmatch.fnmatchcase(name, "*_a_proj*") or name.endswith(WHOLE_ON_PURPOSE), name


WHOLE_ON_PURPOSE = ("embed_positions.weight", "mlp.gate.weight", "shared_expert_gate.weight", "correction_bias")


def test_every_pattern_is_of_use() -> None:
    names: dict[str, set[str]] = {}
    for family, shape in VARIANTS.values():  # described families share most of theirs
        found = shapes_of(tiny(family, **shape))
        for pattern, _ in FAMILIES[family].shard_plan.shard_dims:
            names.setdefault(pattern, set()).update(found)
    assert names.keys() == {pattern for family in FAMILIES.values() for pattern, _ in family.shard_plan.shard_dims}
    for pattern, of_families in names.items():
        assert fnmatch.filter(of_families, pattern), pattern


_LAST = ("down_proj.weight", "o_proj.weight", "out_proj.weight")


def test_regions_end_with_one_row_parallel_product(model: Any) -> None:
    modules = dict(model.named_sublayers())
    regions = [name for name in modules if model.plan.is_tp_region(name)]
    assert len(regions) == 2 * model.config.num_hidden_layers
    for name in regions:
        cuts = {key: model.plan.dim(f"{name}.{key}") for key, _ in modules[name].named_parameters()}
        assert set(cuts.values()) >= {0}
        assert any(dim in (0, 1) for key, dim in cuts.items() if key.endswith(_LAST))
    assert {model.plan.embedding, model.plan.last_norm, model.plan.layers} <= set(modules)


def test_each_parameter_has_its_place_in_a_pipeline(model: Any) -> None:
    for name in shapes_of(model):
        places = [m for m in (model.plan.layers, *model.plan.first, *model.plan.last) if name.startswith(f"{m}.")]
        assert len(places) == 1, name


@pytest.mark.parametrize("tp", [1, 2])
def test_slices_of_all_ranks_tile_a_parameter(model: Any, tp: int) -> None:
    assert bool(list(model.plan.problems(model.config, tp))) == (
        tp > 1 and getattr(model.config, "uncut", None) is not None
    )
    for name, shape in shapes_of(model).items():
        counts = np.zeros(shape, dtype=int)
        for rank in range(tp):
            counts[tuple(local_slice(name, shape, model.plan, Mesh(Degrees(1, 1, 1, tp), rank)))] += 1
        assert (counts == (tp if model.plan.dim(name) is None else 1)).all(), name


@pytest.mark.parametrize("tp", [3, 128])
def test_a_degree_that_would_cut_unevenly_is_refused(model: Any, tp: int) -> None:
    assert list(model.plan.problems(model.config, tp))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_stranger_says_how_long_names_are_made(tmp_path: Path, family: str) -> None:
    """A config.json of few bytes is refused before a name is made for each of its layers and experts."""
    spec = FAMILIES[family]
    whole = spec.config_cls(**spec.smoke).to_hf()
    layers = next(key for key in ("num_hidden_layers", "n_layer", "num_layers") if key in whole)

    def refusal(**changes: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**whole, **changes}))
        with pytest.raises(UserError, match=r"config\.json: ") as caught:
            read_config(tmp_path, FAMILIES)
        return str(caught.value)

    assert "num_hidden_layers: Input should be less than or equal to 10000" in refusal(**{layers: 100_000_000})
    if (key := spec.config_cls.experts_key) is not None:
        assert "at most 1,048,576 in all are supported" in refusal(**{layers: 9999, key: 1 << 20})
    if family == "deepseek":
        assert f"at most {MAX_ROTARY}" in refusal(qk_rope_head_dim=1 << 30)
