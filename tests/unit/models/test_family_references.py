"""Every family against HF transformers, by the models and logits in tests/reference (see make_references.py there)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
import safetensors.numpy

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.model_writer import write_hf, write_model, write_paddlenlp
from llmsuite.checkpoint.tensor_writer import WriteOptions
from llmsuite.checkpoint.tensors import TensorFiles
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.ops import Ops
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.generate import generate
from llmsuite.inference.sampling import Sampling, random_generator, sample_token
from llmsuite.models.blocks import keeps_state
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.static import compile_layers
from tests.support.families import CASES, FAMILIES, config_of, load, read_config, reference, reference_gradient
from tests.support.paths import REFERENCE

TOLERANCE = 1e-5


def difference(model: Any, case: str) -> float:
    input_ids, logits = reference(case)
    with paddle.no_grad():
        ours = model(paddle.to_tensor(input_ids)).numpy()
    assert ours.shape == logits.shape
    return float(np.abs(ours - logits).max())


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str) -> None:
    assert np.abs(reference(case)[1]).max() > 1, "such small logits would agree whatever the model does"
    assert difference(load(REFERENCE / case), case) <= TOLERANCE


GROWN = config_of("ministral/grown").rope_scaling
UNTRUNCATED = config_of("gpt_oss/oss_yarn").rope_scaling
WITH_GRADIENT = [case for case in CASES if reference_gradient(case) is not None]


@pytest.mark.parametrize("case", WITH_GRADIENT)
def test_gradients_are_those_of_transformers(case: str) -> None:
    """That of the embedding passes through every layer."""
    model = load(REFERENCE / case)
    model.train()
    input_ids = paddle.to_tensor(reference(case)[0])
    F.cross_entropy(model(input_ids[:, :-1]), input_ids[:, 1:]).backward()
    theirs = reference_gradient(case)
    assert theirs is not None
    assert np.abs(theirs).max() > 0.01
    np.testing.assert_allclose(model.model.embed_tokens.weight.grad.numpy(), theirs, rtol=0, atol=TOLERANCE)


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("llama/yarn", {"rope_scaling": None}),
    ("llama/mistral", {"rope_theta": 12000.0}),
    ("llama/mistral_window", {"sliding_window": None}),
    ("llama/mistral_window", {"sliding_window": 6}),
    ("mixtral/wide_heads", {"num_experts_per_tok": 2}),
    ("mixtral/wide_heads", {"rope_theta": 9e5}),
    ("mixtral/window_tied", {"sliding_window": None}),
    ("qwen/qwen2", {"rms_norm_eps": 1e-4}),
    ("qwen/qwen2", {"rope_theta": 12000.0}),
    ("qwen/qwen2_yarn", {"rope_scaling": None}),
    ("qwen/qwen3", {"rope_theta": 9e5}),
    ("qwen_moe/qwen3", {"norm_topk_prob": False}),
    ("qwen_moe/qwen3", {"num_experts_per_tok": 2}),
    ("qwen_moe/qwen3_tied_not_normed", {"norm_topk_prob": True}),
    ("qwen_moe/qwen2", {"norm_topk_prob": True}),
    ("qwen_hybrid/plain", {"partial_rotary_factor": 1.0}),
    ("qwen_hybrid/plain", {"rope_theta": 900.0}),
    ("qwen_hybrid/chunks_tied_biases", {"rms_norm_eps": 9e-3}),
    ("qwen_hybrid_moe/next", {"norm_topk_prob": False}),
    ("qwen_hybrid_moe/next", {"num_experts_per_tok": 2}),
    ("qwen_hybrid_moe/next_chunks_dense", {"norm_topk_prob": True}),
    ("ernie/tied", {"rope_theta": 490000.0}),
    ("gemma/gemma2", {"query_pre_attn_scalar": 19}),
    ("gemma/gemma2", {"attn_logit_softcapping": 1.9}),
    ("gemma/gemma2", {"final_logit_softcapping": 29.0}),
    ("gemma/gemma2", {"sliding_window": 6}),
    ("gemma/gemma2", {"sliding_window_pattern": 3, "layer_types": None}),
    ("gemma/gemma3", {"rope_local_base_freq": 490.0}),
    ("gemma/gemma3", {"rope_scaling": None}),
    ("phi/longrope_partial", {"rope_scaling": None}),
    ("phi/longrope_partial", {"partial_rotary_factor": 0.25, "rope_scaling": None}),
    ("phi/window_tied", {"sliding_window": 6}),
    ("granite/tied", {"embedding_multiplier": 2.9}),
    ("granite/tied", {"attention_multiplier": 0.31}),
    ("granite/tied", {"residual_multiplier": 0.69}),
    ("granite/tied", {"logits_scaling": 2.6}),
    ("smollm3/tied", {"no_rope_layers": [0, 1, 0, 1]}),
    ("olmo/olmo2", {"rms_norm_eps": 1e-4}),
    ("olmo/olmo3", {"sliding_window": 6}),
    ("olmo/olmo3", {"layer_types": ["full_attention"] * 5}),
    ("olmo/olmo3_yarn", {"rope_scaling": None}),
    ("hunyuan/plain", {"rope_theta": 9000.0}),
    ("hunyuan/alpha_tied_biases", {"rope_scaling": None}),
    ("hunyuan/alpha_tied_biases", {"rope_scaling": {"rope_type": "dynamic", "alpha": 45.0}}),
    ("seed_oss/plain", {"rope_theta": 9000.0}),
    ("glm/partial", {"rope_theta": 9000.0}),
    ("cohere/tied", {"sliding_window": 6}),
    ("cohere/tied", {"sliding_window_pattern": 3, "layer_types": None}),
    ("cohere/tied", {"rope_theta": 9000.0}),
    ("cohere/tied", {"logit_scale": 0.79}),
    ("cohere/untied_biases", {"rms_norm_eps": 1e-5}),
    ("starcoder/tied", {"rope_theta": 9000.0}),
    ("internlm/internlm3_biases", {"rope_theta": 9000.0}),
    ("internlm/internlm3_dynamic_tied", {"rope_scaling": {"rope_type": "linear", "factor": 6.0}}),
    ("ministral/grown", {"rope_scaling": {**GROWN, "llama_4_scaling_beta": 0.29}}),
    ("ministral/grown", {"rope_scaling": {**GROWN, "factor": 1.1 * GROWN["factor"]}}),
    ("ministral/grown_window_tied", {"sliding_window": 10}),
    ("granite_moe/tied", {"embedding_multiplier": 2.9}),
    ("granite_moe/tied", {"attention_multiplier": 0.31}),
    ("granite_moe/tied", {"residual_multiplier": 0.69}),
    ("granite_moe/tied", {"logits_scaling": 2.6}),
    ("granite_moe/biases", {"num_experts_per_tok": 3}),
    ("minimax/partial", {"partial_rotary_factor": 1.0}),
    ("minimax/partial", {"rope_theta": 600.0}),
    ("minimax/tied", {"num_experts_per_tok": 2}),
    ("minimax/tied", {"rms_norm_eps": 1e-6}),
    ("gpt_oss/oss_yarn", {"sliding_window": 6}),
    ("gpt_oss/oss_yarn", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("gpt_oss/oss_yarn", {"rope_scaling": {**UNTRUNCATED, "truncate": True}}),
    ("gpt_oss/oss_yarn", {"num_experts_per_tok": 2}),
    ("gpt_oss/full_tied", {"rope_theta": 900.0}),
    ("starcoder/window_without_biases", {"sliding_window": 6}),
    ("starcoder/window_without_biases", {"rms_norm_eps": 1e-5}),
    ("glm_moe/partial", {"n_group": 2, "topk_group": 1}),
    ("glm_moe/partial", {"norm_topk_prob": False}),
    ("glm_moe/partial", {"rope_theta": 9000.0}),
    ("glm_moe/one_group", {"routed_scaling_factor": 2.49}),
    ("ernie_moe/tied", {"rms_norm_eps": 1e-4}),
    ("ernie_moe/tied", {"moe_k": 2}),
    ("gpt/tied", {"layer_norm_eps": 1e-4}),
    ("deepseek/v2_lite", {"rope_scaling": None}),
    ("deepseek/v2_lite", {"num_experts_per_tok": 2}),
    ("deepseek/v2_grouped", {"rms_norm_eps": 1e-4}),
    ("deepseek/v2_grouped", {"topk_method": "greedy"}),
    ("deepseek/v2_grouped", {"topk_group": 3}),
    ("deepseek/kimi_k2", {"rope_scaling": None}),
    ("deepseek/kimi_k2", {"routed_scaling_factor": 2.79}),
    ("deepseek/v3", {"norm_topk_prob": False}),
    ("deepseek/v3", {"routed_scaling_factor": 1.51}),
    ("deepseek/v3", {"n_group": 2, "topk_group": 1}),
    ("deepseek/v3_yarn_not_normed", {"norm_topk_prob": True}),
]


@pytest.mark.parametrize(("case", "change"), CHANGES)
def test_a_slightly_different_model_has_other_logits(case: str, change: dict[str, Any]) -> None:
    model = load(REFERENCE / case)
    other = type(model)(dataclasses.replace(model.config, **change), Ops())
    other.set_state_dict(model.state_dict())
    other.eval()
    assert difference(other, case) > 10 * TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_parameters_have_the_names_the_family_promises(case: str) -> None:
    names = FAMILIES[case.split("/")[0]].names()
    model = load(REFERENCE / case)
    assert [name for name, _ in model.named_parameters()] == list(names.parameter_names(model.config))


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_transformers_wrote(case: str, tmp_path: Path) -> None:
    write_hf(open_model(REFERENCE / case, FAMILIES), tmp_path)
    theirs = TensorFiles(REFERENCE / case, "model")
    ours = TensorFiles(tmp_path, "model")
    assert sorted(ours.names) == sorted(theirs.names)
    for name in theirs.names:
        assert np.array_equal(ours.read(name), theirs.read(name)), name
    assert open_model(tmp_path, FAMILIES).config == config_of(case)
    assert difference(load(tmp_path), case) <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_each_parameter_is_read_once_and_in_order(case: str, tmp_path: Path) -> None:
    """With parameters sharded over several ranks, the other ranks send their shards in the order of the parameters."""
    source = open_model(REFERENCE / case, FAMILIES)
    asked: list[str] = []

    def read(name: str) -> np.ndarray:
        asked.append(name)
        return source.read(name)

    specs = [source.spec(name) for name in source.names]
    write_model(tmp_path, source.family, source.config, read, specs, options=WriteOptions(max_file_bytes=5000))
    assert asked == source.names
    assert len(TensorFiles(tmp_path, "model").paths) > 3
    assert difference(load(tmp_path), case) <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_the_paddlenlp_layout_holds_the_same_model(case: str, tmp_path: Path) -> None:
    source = open_model(REFERENCE / case, FAMILIES)
    if source.family.names().paddlenlp_prefix(source.config) is None:
        with pytest.raises(UserError, match="has no PaddleNLP layout"):
            write_paddlenlp(source, tmp_path)
        return
    write_paddlenlp(source, tmp_path)
    written = open_model(tmp_path, FAMILIES)
    assert written.layout == "paddlenlp"
    for name in source.names:
        assert np.array_equal(written.read(name), source.read(name)), name


@pytest.mark.parametrize("case", CASES)
def test_a_slice_is_read_as_it_lies_in_memory(case: str) -> None:
    source = open_model(REFERENCE / case, FAMILIES)
    for name in source.names:
        whole = source.read(name)
        assert source.spec(name).shape == whole.shape
        halves = [[slice(0, n // 2), slice(n // 2, n)] if n > 1 else [slice(0, 1)] for n in whole.shape]
        for index in itertools.product(*halves):
            assert np.array_equal(source.read(name, list(index)), whole[index]), (name, index)


@pytest.mark.parametrize("pieces", [[1, 1, 1], [5, 1], [2, 7, 1]])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_same_in_pieces_with_the_cache(case: str, pieces: list[int]) -> None:
    model = load(REFERENCE / case)
    input_ids, logits = reference(case)
    parts = []
    cache = None
    with paddle.no_grad():
        for piece in np.split(input_ids, np.cumsum(pieces), axis=1):
            hidden, cache = model.hidden_states(paddle.to_tensor(piece), cache)
            parts.append(model.logits(hidden).numpy())
    assert cache is not None
    caches = [keys for (keys, _), layer in zip(cache, model.model.layers) if not keeps_state(layer)]
    assert {keys.shape[-2] for keys in caches} == {input_ids.shape[1]}
    assert np.abs(np.concatenate(parts, 1) - logits).max() <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_the_cache_changes_no_generated_token(case: str) -> None:
    model = load(REFERENCE / case)
    for sampling in (Sampling(max_new_tokens=8), Sampling(temperature=1.0, seed=3, max_new_tokens=8)):
        cached = list(generate(ModelDecoder(model), [3, 1, 4], set(), sampling))
        ids = [3, 1, 4]
        random = random_generator(sampling.seed)
        with paddle.no_grad():
            for _ in range(8):
                ids.append(sample_token(model(paddle.to_tensor([ids])).numpy()[0, -1], sampling, random))
        assert cached == ids[3:]


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_learns_and_recompute_changes_no_gradient(case: str) -> None:
    input_ids = paddle.to_tensor(reference(case)[0])
    model = load(REFERENCE / case)
    model.train()
    losses = []
    gradients = []
    for model.recompute in (False, True):
        loss = F.cross_entropy(model(input_ids[:, :-1]), input_ids[:, 1:])
        loss.backward()
        losses.append(float(loss))
        gradients.append({n: p.grad.numpy() for n, p in model.named_parameters() if not p.stop_gradient})
        model.clear_gradients(set_to_zero=False)
    assert losses[0] == losses[1]
    for name, gradient in gradients[0].items():
        if not name.endswith("k_proj.bias"):  # moves every score of a query alike
            assert np.abs(gradient).max() > 1e-6, name
        np.testing.assert_array_equal(gradients[1][name], gradient, name)


@pytest.mark.parametrize("case", CASES)
def test_layers_can_be_compiled_one_by_one(case: str) -> None:
    input_ids = paddle.to_tensor(reference(case)[0])
    model = load(REFERENCE / case)
    model.train()
    results = []
    for _ in range(2):
        loss = F.cross_entropy(model(input_ids[:, :-1]), input_ids[:, 1:])
        loss.backward()
        gradients = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
        results.append((float(loss), gradients))
        model.clear_gradients(set_to_zero=False)
        compile_layers(model, FAMILIES[case.split("/")[0]].shard_plan, Mesh(Degrees(1, 1, 1, 1), 0), [])
    (loss, gradients), (compiled_loss, compiled) = results
    assert compiled_loss == pytest.approx(loss, rel=1e-6)
    assert compiled.keys() == gradients.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(compiled[name], gradient, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_config_json_comes_back(case: str) -> None:
    config = config_of(case)
    assert type(config).from_hf(config.to_hf()) == config
    assert list(config.problems()) == []
    written = config.to_hf()
    theirs = read_config(case)
    for key in ("model_type", "architectures", "vocab_size", "tie_word_embeddings"):
        assert written[key] == theirs[key], key


HARMLESS = {
    "pad_token_id": 3, "use_cache": False, "attention_dropout": 0.1, "tokenizer_class": "PreTrainedTokenizerFast",
    "task_specific_params": {"text-generation": {"do_sample": True}},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_keys_for_others_are_written_as_they_were_read(case: str, tmp_path: Path) -> None:
    """A reward model that could be batched before the training can be after it: HF looks for `pad_token_id`."""
    source = copy_with(case, tmp_path / "source", {}, **HARMLESS, auto_map={"AutoConfig": "code.Config"})
    written = tmp_path / "written"
    written.mkdir()
    model = open_model(source, FAMILIES)
    rewritten = dataclasses.replace(model, config=dataclasses.replace(model.config, head="score"))
    specs = [model.spec(name) for name in model.names if name != "lm_head.weight"]
    write_model(written, model.family, rewritten.config, model.read, specs)
    found = json.loads((written / "config.json").read_text())
    assert {key: found[key] for key in HARMLESS} == HARMLESS
    assert found["architectures"][0].endswith("ForSequenceClassification")
    assert "auto_map" not in found, "the code is not there"
    assert "kept" not in found


def test_a_mistral_without_the_key_has_the_window_of_its_default() -> None:
    data = {key: value for key, value in read_config("llama/mistral").items() if key != "sliding_window"}
    assert FAMILIES["llama"].config_cls.from_hf(data).sliding_window == 4096


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("llama/")])
def test_a_config_json_that_asks_for_more_is_refused(case: str, tmp_path: Path) -> None:
    for key, value, message in (
        ("attention_sinks", 4, r"does not know attention_sinks; they may change"),
        ("quantization_config", {"quant_method": "eetq"}, "does not know quantization_config"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**read_config(case), key: value}))
        shutil.copy(REFERENCE / case / "model.safetensors", tmp_path)
        with pytest.raises(UserError, match=message):
            open_model(tmp_path, FAMILIES)
    # what says only where the model comes from does no harm
    (tmp_path / "config.json").write_text(json.dumps({**read_config(case), "_name_or_path": "a", "use_cache": False}))
    assert open_model(tmp_path, FAMILIES).config == config_of(case)


def test_gpt_of_the_first_days_lacks_a_prefix_and_has_masks(tmp_path: Path) -> None:
    theirs = TensorFiles(REFERENCE / "gpt/tied", "model")
    tensors = {name.removeprefix("transformer."): theirs.read(name) for name in theirs.names}
    tensors["h.0.attn.bias"] = np.ones([1, 1, 4, 4], "float32")
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(REFERENCE / "gpt/tied/config.json", tmp_path)
    assert open_model(tmp_path, FAMILIES).ignored == ["h.0.attn.bias"]
    assert difference(load(tmp_path), "gpt/tied") <= TOLERANCE


def copy_with(case: str, directory: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    """The case with some tensors added and keys of config.json changed."""
    theirs = TensorFiles(REFERENCE / case, "model")
    directory.mkdir(exist_ok=True)
    all_tensors = {**{name: theirs.read(name) for name in theirs.names}, **tensors}
    safetensors.numpy.save_file(all_tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**read_config(case), **config}))
    return directory


def test_the_kind_of_a_rope_scaling_has_the_name_that_each_reader_looks_for() -> None:
    """HF's `rope_type`, and `type` as PaddleNLP has it and DeepSeek's own files."""
    config = config_of("deepseek/v2_lite")
    written = config.to_hf()["rope_scaling"]
    assert (written["rope_type"], written["type"]) == ("yarn", "yarn")
    older = {key: value for key, value in written.items() if key != "rope_type"}
    assert type(config).from_hf({**config.to_hf(), "rope_scaling": older}) == config


def test_the_first_minimax_files_have_the_size_of_the_rotated_part() -> None:
    theirs = {key: value for key, value in read_config("minimax/partial").items() if key != "rope_parameters"}
    published = {**theirs, "rope_theta": 500.0, "rotary_dim": 6, "use_mtp": True, "attn_type_list": [1, 1, 1]}
    assert FAMILIES["minimax"].config_cls.from_hf(published) == config_of("minimax/partial")


def test_a_ministral_without_a_scaling_has_that_of_its_default() -> None:
    data = {key: value for key, value in read_config("ministral/grown").items() if key != "rope_parameters"}
    config = FAMILIES["ministral"].config_cls.from_hf(data)
    assert (config.rope_theta, config.rope_scaling) == (1e6, FAMILIES["ministral"].config_cls().rope_scaling)


@pytest.mark.parametrize("case", ["deepseek/v3", "glm_moe/partial"])
def test_mtp_layers_are_copied_or_omitted_with_a_message(case: str, tmp_path: Path) -> None:
    extra = {
        name: np.ones([2, 2], "float32") for name in ("model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight")
    }
    model = open_model(copy_with(case, tmp_path, extra, num_nextn_predict_layers=1), FAMILIES)
    assert model.carried == sorted(extra)
    assert difference(load(tmp_path), case) <= TOLERANCE
    assert model.config.to_hf()["num_nextn_predict_layers"] == 1
    model = open_model(copy_with(case, tmp_path, extra, num_nextn_predict_layers=0), FAMILIES)
    assert model.carried == []
    assert model.description == "hf layout; 2 tensors are ignored, such as model.layers.3.eh_proj.weight"
    assert model.config.to_hf()["num_nextn_predict_layers"] == 0


def test_an_expert_that_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    copy_with("deepseek/v3", tmp_path, {name: np.zeros([3, 24], "float32")})
    with pytest.raises(UserError, match=f"{name} is .*, but model.layers.1.mlp.experts.0.up_proj"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"missing 24: model.layers.1.mlp.experts.8.gate_proj.weight"):
        open_model(copy_with("deepseek/v3", tmp_path, {}, n_routed_experts=12), FAMILIES)


def test_which_layers_have_experts() -> None:
    config = dataclasses.replace(config_of("deepseek/v3"), num_hidden_layers=8, first_k_dense_replace=3)
    assert [i for i in range(8) if config.has_experts(i)] == [3, 4, 5, 6, 7]
    config = dataclasses.replace(config, moe_layer_freq=2)
    assert [i for i in range(8) if config.has_experts(i)] == [4, 6]
    model = type(load(REFERENCE / "deepseek/v3"))(config, Ops())
    names = FAMILIES["deepseek"].names()
    assert [name for name, _ in model.named_parameters()] == list(names.parameter_names(config))


def test_the_bias_of_the_choice_is_kept_and_gets_no_gradient() -> None:
    model = load(REFERENCE / "deepseek/v3")
    model.train()
    bias = dict(model.named_parameters())["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.stop_gradient
    assert np.abs(bias.numpy()).max() > 0.1
    model(paddle.to_tensor(reference("deepseek/v3")[0])).square().mean().backward()
    assert bias.grad is None
    before = difference(model, "deepseek/v3")
    bias.set_value(-bias.numpy())  # it decides who is chosen
    assert difference(model, "deepseek/v3") > 100 * max(before, TOLERANCE)


REFUSED = [
    ("llama/mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is not full_attention"),
    ("llama/mistral_window", {"layer_types": ["full_attention"]}, "layer_types is not sliding_attention only, as that"),
    ("llama/biases", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; the llama family has silu"),
    ("mixtral/wide_heads", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; the mixtral family has 0.0 only"),
    ("qwen/qwen2", {"use_sliding_window": True}, "use_sliding_window is True; the qwen family has False only"),
    ("qwen/qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is not full_attention only"),
    ("qwen/qwen3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; the qwen family has 'silu' only"),
    ("qwen/qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("qwen_moe/qwen2", {"use_sliding_window": True}, "use_sliding_window is True; the qwen_moe family has False only"),
    ("qwen_moe/qwen2", {"qkv_bias": False}, "qkv_bias is not true"),
    ("ernie/tied", {"use_rmsnorm": False}, "use_rmsnorm is False; the ernie family has True only"),
    ("gemma/gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; the gemma family"),
    (
        "gemma/gemma3",
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_parameters.sliding_attention is",
    ),
    ("smollm3/tied", {"use_sliding_window": True}, "use_sliding_window is True; the smollm3 family has False only"),
    ("smollm3/tied", {"layer_types": ["sliding_attention"] * 4}, "layer_types is not full_attention only"),
    ("phi/window_tied", {"attention_bias": True}, "attention_bias is True; the phi family has False only"),
    (
        "phi/longrope_partial",
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": "x"}},
        "'x' is no length of a context; a number above 0 is needed",
    ),
    (
        "olmo/olmo3",
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_parameters.sliding_attention is .*; olmo scales full attention",
    ),
    (
        "olmo/olmo3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 10.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            }
        },
        "rope_theta is 10.0 in layers with full attention and 20.0 in the others",
    ),
    ("hunyuan/plain", {"use_cla": True}, "use_cla is True; the hunyuan family has False only"),
    ("granite/tied", {"position_embedding_type": "nope"}, "does not know position_embedding_type"),
    ("cohere/tied", {"use_qk_norm": True}, "use_qk_norm is True; the cohere family has False only"),
    ("cohere/tied", {"use_parallel_block": False}, "use_parallel_block is False; the cohere family has True only"),
    ("cohere/tied", {"rms_norm_eps": 1e-5}, "the cohere family does not know rms_norm_eps"),
    ("granite_moe/tied", {"shared_intermediate_size": 8}, "does not know shared_intermediate_size"),
    ("minimax/tied", {"attn_type_list": [1, 0, 1]}, "attn_type_list is not 1 for all layers"),
    ("minimax/tied", {"sliding_window": 9}, "sliding_window is 9; the minimax family has no window"),
    ("minimax/tied", {"use_routing_bias": False}, "use_routing_bias is False; the minimax family has True only"),
    ("minimax/tied", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; the minimax family has 0.0 only"),
    ("minimax/tied", {"rotary_dim": "x", "rope_parameters": None}, "'x' is no size of a head"),
    ("gpt_oss/full_tied", {"swiglu_limit": 8.0}, "swiglu_limit is 8.0; the gpt_oss family has 7.0 only"),
    ("gpt_oss/full_tied", {"attention_bias": False}, "attention_bias is False; the gpt_oss family has True only"),
    ("starcoder/tied", {"hidden_act": "silu"}, "hidden_act is 'silu'; the starcoder family has 'gelu_pytorch_tanh'"),
    ("starcoder/tied", {"norm_type": "rms_norm"}, "norm_type is 'rms_norm'; the starcoder family has 'layer_norm'"),
    (
        "glm_moe/partial",
        {"scoring_func": "softmax"},
        "scoring_func is 'softmax'; the glm_moe family has 'sigmoid' only",
    ),
    ("ernie_moe/tied", {"use_bias": True}, "use_bias is True; the ernie_moe family has False only"),
    ("gpt/tied", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; the gpt family"),
    ("gpt/tied", {"activation_function": "gelu"}, "activation_function is 'gelu'; the gpt family has gelu_new only"),
    ("deepseek/v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; deepseek_v3 has sigmoid"),
    ("deepseek/kimi_k2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; kimi_k2 has sigmoid"),
    ("deepseek/v2_lite", {"num_key_value_heads": 1}, "num_key_value_heads is not num_attention_heads = 2"),
    ("deepseek/v3", {"rope_interleave": False}, "rope_interleave is False"),
]


@pytest.mark.parametrize(
    ("case", "change", "field"),
    [
        ("llama/biases", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling"),
        ("llama/mistral", {"attention_bias": True}, "attention_bias"),
        ("llama/mistral", {"mlp_bias": True}, "mlp_bias"),
        ("llama/biases", {"sliding_window": 5}, "sliding_window"),
        ("mixtral/wide_heads", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("qwen/qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ("qwen/qwen2", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_scaling"),
        ("qwen/qwen2", {"hidden_size": 26}, "hidden_size"),
        ("qwen/qwen3", {"head_dim": 9}, "head_dim"),
        ("qwen/qwen3", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("qwen_moe/qwen3", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("qwen_moe/qwen3", {"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers"),
        ("qwen_moe/qwen3", {"decoder_sparse_step": 4, "mlp_only_layers": []}, "decoder_sparse_step"),
        ("ernie/tied", {"head_dim": 9}, "head_dim"),
        ("ernie/tied", {"head_dim": None, "num_attention_heads": 10}, "hidden_size"),
        ("gemma/gemma2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma/gemma2", {"sliding_window": None}, "sliding_window"),
        ("gemma/gemma2", {"rope_local_base_freq": 1e4}, "rope_local_base_freq"),
        ("gemma/gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("phi/longrope_partial", {"max_position_embeddings": 17}, "max_position_embeddings"),
        ("phi/longrope_partial", {"partial_rotary_factor": 0.5}, "rope_scaling"),
        ("phi/longrope_partial", {"partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        ("phi/window_tied", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ("smollm3/tied", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("olmo/olmo2", {"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size"),
        ("olmo/olmo2", {"sliding_window": 9}, "sliding_window"),
        ("olmo/olmo3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("olmo/olmo3", {"sliding_window": None}, "sliding_window"),
        ("hunyuan/plain", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling"),
        ("glm/partial", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ("cohere/tied", {"layer_types": ["full_attention"]}, "layer_types"),
        ("cohere/tied", {"sliding_window": None}, "sliding_window"),
        ("internlm/internlm3_biases", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        (
            "internlm/internlm3_biases",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "alpha": 2.0}},
            "rope_scaling",
        ),
        ("ministral/grown", {"rope_scaling": None}, "rope_scaling"),
        ("ministral/grown", {"rope_scaling": {**GROWN, "rope_type": "linear"}}, "rope_scaling"),
        ("granite_moe/tied", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("minimax/tied", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("minimax/partial", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ("gpt_oss/oss_yarn", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("gpt_oss/oss_yarn", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gpt_oss/oss_yarn", {"sliding_window": None}, "sliding_window"),
        ("gpt_oss/oss_yarn", {"rope_scaling": {**UNTRUNCATED, "truncate": "no"}}, "rope_scaling"),
        ("starcoder/tied", {"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size"),
        ("glm_moe/partial", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ("glm_moe/partial", {"first_k_dense_replace": 3}, "first_k_dense_replace"),
        ("glm_moe/partial", {"n_group": 3}, "n_group"),
        ("glm_moe/partial", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("ernie_moe/tied", {"moe_k": 9}, "moe_k"),
        ("ernie_moe/tied", {"moe_layer_start_index": 3}, "moe_layer_start_index"),
        ("gpt/tied", {"num_attention_heads": 5}, "hidden_size"),
        ("deepseek/v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek/v3", {"n_group": 3}, "n_group"),
        ("deepseek/v3", {"n_group": 8}, "n_group"),
        ("deepseek/v3", {"topk_group": 5}, "topk_group"),
        ("deepseek/v3", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("deepseek/v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ("deepseek/v2_grouped", {"norm_topk_prob": True}, "norm_topk_prob"),
        (
            "deepseek/v2_lite",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "tempo": 1}},
            "rope_scaling",
        ),
    ],
)
def test_shapes_that_cannot_be_are_named_by_field(case: str, change: dict[str, Any], field: str) -> None:
    assert [key for key, _ in dataclasses.replace(config_of(case), **change).problems()] == [field]


@pytest.mark.parametrize(("case", "change", "message"), REFUSED)
def test_what_a_family_does_not_have_is_refused(case: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FAMILIES[case.split("/")[0]].config_cls.from_hf({**read_config(case), **change})
