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

from llmsuite.checkpoint.model_dir import open_model, write_hf, write_paddlenlp
from llmsuite.checkpoint.tensors import TensorFiles
from llmsuite.devices.ops import Ops
from llmsuite.errors import UserError
from llmsuite.inference.generate import Sampling, generate
from tests.unit.families import CASES, FAMILIES, REFERENCE, config_of, load, read_config, reference

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


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("qwen/qwen2", {"rms_norm_eps": 1e-4}),
    ("qwen/qwen2", {"rope_theta": 12000.0}),
    ("qwen/qwen2_yarn", {"rope_scaling": None}),
    ("qwen/qwen3", {"rope_theta": 9e5}),
]


@pytest.mark.parametrize(("case", "change"), CHANGES)
def test_a_slightly_different_model_is_told_apart(case: str, change: dict[str, Any]) -> None:
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
    theirs, ours = TensorFiles(REFERENCE / case, "model"), TensorFiles(tmp_path, "model")
    assert sorted(ours.names) == sorted(theirs.names)
    for name in theirs.names:
        assert np.array_equal(ours.read(name), theirs.read(name)), name
    assert open_model(tmp_path, FAMILIES).config == config_of(case)
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
    parts, cache = [], None
    with paddle.no_grad():
        for piece in np.split(input_ids, np.cumsum(pieces), axis=1):
            hidden, cache = model.hidden_states(paddle.to_tensor(piece), cache)
            parts.append(model.logits(hidden).numpy())
    assert cache is not None
    assert cache[0][0].shape[1] == input_ids.shape[1]
    assert np.abs(np.concatenate(parts, 1) - logits).max() <= TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_the_cache_changes_no_generated_token(case: str) -> None:
    model = load(REFERENCE / case)
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=3)):
        cached = list(generate(model, [3, 1, 4], set(), 8, sampling))
        ids, random = [3, 1, 4], np.random.Generator(np.random.Philox(sampling.seed))
        from llmsuite.inference.generate import choose

        with paddle.no_grad():
            for _ in range(8):
                ids.append(choose(model(paddle.to_tensor([ids])).numpy()[0, -1], sampling, random))
        assert cached == ids[3:]


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_learns_and_recompute_changes_no_gradient(case: str) -> None:
    input_ids = paddle.to_tensor(reference(case)[0])
    model = load(REFERENCE / case)
    model.train()
    losses, gradients = [], []
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
def test_config_json_comes_back(case: str) -> None:
    config = config_of(case)
    assert type(config).from_hf(config.to_hf()) == config
    assert list(config.problems()) == []
    written = config.to_hf()
    theirs = read_config(case)
    for key in ("model_type", "architectures", "vocab_size", "tie_word_embeddings"):
        assert written[key] == theirs[key], key


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("llama/")])
def test_a_config_json_that_asks_for_more_is_refused(case: str, tmp_path: Path) -> None:
    for key, value, message in (
        ("attention_sinks", 4, r"does not know attention_sinks; they may change"),
        ("quantization_config", {"quant_method": "fp8"}, "does not know quantization_config"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**read_config(case), key: value}))
        shutil.copy(REFERENCE / case / "model.safetensors", tmp_path)
        with pytest.raises(UserError, match=message):
            open_model(tmp_path, FAMILIES)
    # what says only where the model comes from does no harm
    (tmp_path / "config.json").write_text(json.dumps({**read_config(case), "_name_or_path": "a", "use_cache": False}))
    assert open_model(tmp_path, FAMILIES).config == config_of(case)


REFUSED = [
    ("qwen/qwen2", {"use_sliding_window": True}, "use_sliding_window is True; the qwen family has False only"),
    ("qwen/qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is not full_attention only"),
    ("qwen/qwen3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; the qwen family has 'silu' only"),
    ("qwen/qwen3", {"attention_bias": True}, "attention_bias is True"),
]


@pytest.mark.parametrize(("case", "change", "message"), REFUSED)
def test_what_a_family_does_not_have_is_refused(case: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FAMILIES[case.split("/")[0]].config_cls.from_hf({**read_config(case), **change})
