"""Llama against HF transformers, by the models and logits in tests/reference/llama (see the scripts there)."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.model_writer import write_hf, write_paddlenlp
from llmsuite.devices.ops import Ops
from llmsuite.models.dense import DenseLM
from llmsuite.models.dense_plan import PLAN
from llmsuite.models.families.llama import LlamaConfig
from llmsuite.parallel.recompute import recompute_attention, recompute_layers
from tests.support.llama_reference import FAMILIES, load
from tests.support.paths import REFERENCE

LLAMA = REFERENCE / "llama"
CASES = sorted(path.name for path in LLAMA.iterdir())
TOLERANCE = 1e-5


def reference(case: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(LLAMA / case / "reference.npz") as stored:
        return stored["input_ids"], stored["logits"]


def difference(model: DenseLM, case: str) -> float:
    input_ids, logits = reference(case)
    with paddle.no_grad():
        ours = model(paddle.to_tensor(input_ids)).numpy()
    assert ours.shape == logits.shape
    return float(np.abs(ours - logits).max())


def read_config(case: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((LLAMA / case / "config.json").read_text(encoding="utf-8"))
    return config


def older_spelling(data: dict[str, Any], type_key: str = "rope_type") -> dict[str, Any]:
    """The config.json in the format of transformers 4; before 4.43 the key was "type"."""
    older = {key: value for key, value in data.items() if key != "rope_parameters"}
    scaling = dict(data["rope_parameters"])
    older["rope_theta"] = scaling.pop("rope_theta")
    kind = scaling.pop("rope_type")
    older["rope_scaling"] = {type_key: kind, **scaling} if kind != "default" else None
    return older


def test_there_is_a_case_for_every_feature() -> None:
    configs = [LlamaConfig.from_hf(read_config(case)) for case in CASES]
    assert any(1 < c.num_key_value_heads < c.num_attention_heads and not c.tie_word_embeddings for c in configs)
    assert any(c.num_key_value_heads == 1 and c.tie_word_embeddings for c in configs)
    assert any(c.head_size * c.num_attention_heads != c.hidden_size for c in configs)
    assert {c.rms_norm_eps for c in configs} == {1e-5, 1e-6}


def test_the_llama3_case_has_all_three_bands() -> None:
    config = LlamaConfig.from_hf(read_config("llama3_rope"))
    plain = dataclasses.replace(config, rope_scaling=None).rope_frequencies()
    stretched = [p / s for p, s in zip(plain, config.rope_frequencies())]
    assert stretched[0] == 1
    assert any(1 < s < 8 for s in stretched)
    assert stretched[-1] == pytest.approx(8, rel=1e-12)
    assert config.rope_scaling is not None
    assert reference("llama3_rope")[0].shape[1] > config.rope_scaling["original_max_position_embeddings"]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str) -> None:
    model = load(LLAMA / case)
    assert np.abs(reference(case)[1]).max() > 1, "such small logits would agree whatever the model does"
    assert difference(model, case) <= TOLERANCE


@pytest.mark.parametrize("change", [{"rms_norm_eps": 1e-6}, {"rope_theta": 490000.0}, {"rope_scaling": None}])
def test_a_slightly_different_model_has_other_logits(change: dict[str, Any]) -> None:
    model = load(LLAMA / "llama3_rope")
    other = DenseLM(dataclasses.replace(model.config, **change), Ops())
    other.set_state_dict(model.state_dict())
    assert difference(other, "llama3_rope") > 10 * TOLERANCE


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@pytest.mark.parametrize("case", CASES)
def test_both_spellings_of_the_rotary_keys_mean_the_same(case: str, type_key: str, tmp_path: Path) -> None:
    newer = read_config(case)
    assert "rope_parameters" in newer
    assert "rope_scaling" not in newer
    older = older_spelling(newer, type_key)
    frequencies = LlamaConfig.from_hf(newer).rope_frequencies()
    assert LlamaConfig.from_hf(older).rope_frequencies() == frequencies
    # what we write ourselves is read back the same, in either spelling
    assert LlamaConfig.from_hf(LlamaConfig.from_hf(newer).to_hf()).rope_frequencies() == frequencies

    shutil.copy(LLAMA / case / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(older), encoding="utf-8")
    assert difference(load(tmp_path), case) <= TOLERANCE


@pytest.mark.parametrize("write", [write_hf, write_paddlenlp])
@pytest.mark.parametrize("case", CASES)
def test_a_rewritten_directory_holds_the_same_model(case: str, write: Any, tmp_path: Path) -> None:
    source = open_model(LLAMA / case, FAMILIES)
    if source.config.attention_bias and write is write_paddlenlp:
        with pytest.raises(UserError, match="has no PaddleNLP layout"):
            write(source, tmp_path)
        return
    write(source, tmp_path)
    before = load(LLAMA / case).state_dict()
    after = load(tmp_path).state_dict()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name].numpy(), after[name].numpy()) for name in before)
    assert difference(load(tmp_path), case) <= TOLERANCE


@pytest.mark.parametrize("pieces", [[1, 1, 1], [5, 1], [2, 7, 1]])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_same_in_pieces_with_the_cache(case: str, pieces: list[int]) -> None:
    model = load(LLAMA / case)
    input_ids, logits = reference(case)
    ends = np.cumsum(pieces)
    parts = []
    cache = None
    with paddle.no_grad():
        for piece in np.split(input_ids, ends, axis=1):
            hidden, cache = model.hidden_states(paddle.to_tensor(piece), cache)
            parts.append(model.logits(hidden).numpy())
    assert cache[0][0].shape[1] == input_ids.shape[1]
    assert np.abs(np.concatenate(parts, 1) - logits).max() <= TOLERANCE


def _every_layer(model: Any) -> None:
    recompute_layers(model, PLAN, every=1)


def _every_second_layer(model: Any) -> None:
    recompute_layers(model, PLAN, every=2)


def _attention(model: Any) -> None:
    recompute_attention(model, PLAN)


@pytest.mark.parametrize("change", [_every_layer, _every_second_layer, _attention])
@pytest.mark.parametrize("case", CASES)
def test_recompute_changes_no_gradient(case: str, change: Callable[[Any], None], monkeypatch: Any) -> None:
    called: list[Any] = []
    real = paddle.distributed.fleet.utils.recompute
    monkeypatch.setattr(paddle.distributed.fleet.utils, "recompute", lambda *a: called.append(a) or real(*a))
    input_ids = paddle.to_tensor(reference(case)[0])
    model = load(LLAMA / case)
    model.train()
    losses = []
    gradients = []
    for again in (False, True):
        if again:
            change(model)
        loss = F.cross_entropy(model(input_ids[:, :-1]), input_ids[:, 1:])
        loss.backward()
        losses.append(float(loss))
        gradients.append({name: parameter.grad.numpy() for name, parameter in model.named_parameters()})
        model.clear_gradients(set_to_zero=False)
    assert losses[0] == losses[1]
    layers = len(model.model.layers)
    assert len(called) == (-(-layers // 2) if change is _every_second_layer else layers)
    for name, gradient in gradients[0].items():
        assert np.abs(gradient).max() > 0
        if change is not _attention:
            np.testing.assert_array_equal(gradients[1][name], gradient, name)
        # a key's gradients are added up in another order
        assert np.abs(gradients[1][name] - gradient).max() <= 1e-6 * np.abs(gradient).max()
