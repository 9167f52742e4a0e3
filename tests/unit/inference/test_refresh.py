"""New values of a fused model: its logits are those of a model that was built with them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.ops import Ops
from llmsuite.inference.attention import grouped_attention, rounded_grouped_attention, with_cached_attention
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.load import AS_TRAINED, load_model, open_any
from llmsuite.inference.pack_model import PackedLinear
from llmsuite.inference.refresh import RefreshableModel
from llmsuite.inference.sampling import log_softmax, sample_by_uniform
from llmsuite.models.blocks import Attention, GatedMLP
from llmsuite.models.dense import DenseAttention
from llmsuite.models.latent_attention import LatentAttention, latent_attention
from llmsuite.models.linear_ops import LinearOps, use_linear_ops
from tests.support.families import CASES, FAMILIES, load, reference
from tests.support.paths import REFERENCE


@pytest.mark.parametrize("case", CASES)
def test_every_shape_of_every_family_is_refreshed(case: str) -> None:
    ids, expected = reference(case)
    values = {name: parameter.clone() for name, parameter in load(REFERENCE / case).named_parameters()}
    model = load(REFERENCE / case)
    for parameter in model.parameters():
        parameter.set_value(paddle.full_like(parameter, 0.5))
    refreshed = RefreshableModel(model, CpuBackend().ops("fp32"))
    assert refreshed.names == values.keys()
    decoder = ModelDecoder(model)
    padding = np.zeros(len(ids), "int64")
    one_row = ids[:1]
    decoder.forward(one_row, padding[:1], None)  # what a single row caches is of the old values
    refreshed.refresh(values.items())
    logits, cache = decoder.forward(ids[:, :-1], padding, None)
    assert np.abs(logits - expected[:, -2]).max() <= 1e-5
    assert np.abs(decoder.forward(ids[:, -1:], padding, cache)[0] - expected[:, -1]).max() <= 1e-5
    assert np.abs(decoder.forward(one_row, padding[:1], None)[0] - expected[:1, -1]).max() <= 1e-5


@pytest.mark.parametrize("case", CASES)
def test_what_draws_for_a_model_in_bf16_computes_as_that_does(case: str) -> None:
    """Beside the order of sums nothing differs, so that few inputs of products are rounded to another side: together
    they move a quarter of what rounding moves at most. A model in float32 is off by all of it."""
    backend = CpuBackend()
    (ids, in_float32) = reference(case)
    trained = load_model(open_any(REFERENCE / case, FAMILIES), backend)
    values = {name: parameter.clone() for name, parameter in trained.named_parameters()}
    use_linear_ops(trained, LinearOps(ops := backend.ops("bf16")))
    for module in trained.sublayers():
        if isinstance(module, GatedMLP):  # as if it were built for training
            module.swiglu = ops.swiglu
            module.rounds_activations = ops.matmuls.rounds_outputs
        if isinstance(module, Attention) and ops.matmuls.rounds_attention:
            module.rotary = ops.rotary
            module.rounds_activations = module.q_norm is None and not isinstance(module, DenseAttention)
    if ops.matmuls.rounds_attention_inputs:
        rounded = functools.partial(rounded_grouped_attention, ops.matmuls.round_attention_input)
        for module in trained.sublayers():
            if getattr(module, "core", None) is grouped_attention:
                module.core = rounded
            elif isinstance(module, LatentAttention):
                module.core = functools.partial(latent_attention, with_cached_attention(Ops(), rounded))
    with paddle.no_grad():
        wanted = trained(paddle.to_tensor(ids)).numpy()
    rounding = np.linalg.norm((wanted - in_float32)[:, 2:])
    assert rounding > 1e-3
    model = load_model(open_any(REFERENCE / case, FAMILIES), backend, "bf16", packed=AS_TRAINED)
    refreshed = RefreshableModel(model, backend.ops("bf16"))
    is_stored = any(isinstance(layer, PackedLinear) for layer in model.sublayers())
    assert is_stored == (
        case.startswith(("llama/", "qwen/", "ernie/", "seed_oss/", "phi/window", "internlm/")) and "bias" not in case
    )
    shape_spec = FAMILIES[case.partition("/")[0]].shape_spec
    assert shape_spec is not None
    assert shape_spec(model.config).is_plain == is_stored
    assert (model.decoding.next_logits is not None) == is_stored
    assert refreshed.names == values.keys()
    found = _by_token(model, ids)
    assert np.linalg.norm(np.stack(found, 1) - wanted[:, 2:]) <= rounding / 4
    refreshed.refresh((name, paddle.zeros_like(value)) for name, value in values.items())
    assert not np.array_equal(_by_token(model, ids), found)
    refreshed.refresh(values.items())
    assert np.array_equal(_by_token(model, ids), found)


def _by_token(model: Any, ids: np.ndarray) -> list[np.ndarray]:
    """Logits of the third token of each row, and of each later one, from a pass of its own."""
    decoder = ModelDecoder(model)
    padding = np.zeros(len(ids), "int64")
    logits, cache = decoder.forward(ids[:, :3], padding, None)
    found = [logits]
    for i in range(3, ids.shape[1]):
        logits, cache = decoder.forward(ids[:, i : i + 1], padding, cache)
        found.append(logits)
    return found


def test_a_value_that_is_missing_is_a_bug() -> None:
    case = CASES[0]
    model = load(REFERENCE / case)
    values = [(name, parameter.clone()) for name, parameter in model.named_parameters()]
    with pytest.raises(AssertionError, match="no new values"):
        RefreshableModel(model).refresh(values[1:])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_sampled_with_their_probabilities(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(0, 2, 5).astype("float32")
    uniforms = (np.arange(20_000) + 0.5) / 20_000
    sampled = [sample_by_uniform(logits, temperature, uniform) for uniform in uniforms]
    tokens = np.array([token for token, _ in sampled])
    logprobs = np.array([logprob for _, logprob in sampled])
    expected = log_softmax(logits / temperature)
    shares = np.bincount(tokens, minlength=5) / len(tokens)
    assert np.abs(shares - np.exp(expected)).max() <= 1e-3
    assert np.abs(logprobs - expected[tokens]).max() <= 1e-6


@pytest.mark.parametrize(("top_k", "top_p", "kept"), [(3, 1.0, 3), (0, 0.8, 2), (4, 0.96, 3), (1, 1.0, 1), (9, 1.0, 5)])
def test_tokens_are_sampled_from_the_most_likely_ones(top_k: int, top_p: float, kept: int) -> None:
    """The log-probabilities stay those of the full distribution."""
    probabilities = np.array([0.1, 0.5, 0.03, 0.35, 0.02])
    logits = (np.log(probabilities) * 0.5).astype("float32")
    uniforms = (np.arange(20_000) + 0.5) / 20_000
    sampled = [sample_by_uniform(logits, 0.5, uniform, top_k, top_p) for uniform in uniforms]
    shares = np.bincount([token for token, _ in sampled], minlength=5) / len(sampled)
    expected = np.where(probabilities >= np.sort(probabilities)[::-1][kept - 1], probabilities, 0)
    assert np.abs(shares - expected / expected.sum()).max() <= 1e-3
    assert all(abs(logprob - np.log(probabilities[token])) <= 1e-5 for token, logprob in sampled)


def test_temperature_zero_takes_the_most_likely_token() -> None:
    for logits, expected in (([0.0, 3.0, 1.0], 1), ([2.0, 1.0, 0.0], 0)):
        token, logprob = sample_by_uniform(np.array(logits, "float32"), 0.0, 0.999)
        assert token == expected
        assert abs(logprob - log_softmax(np.array(logits))[expected]) <= 1e-6


def test_a_token_without_probability_is_never_sampled() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf], "float32")
    for uniform in (0.0, np.nextafter(1.0, 0.0)):
        assert sample_by_uniform(logits, 1.0, uniform)[0] == 1


def test_logits_that_are_no_numbers_are_named() -> None:
    with pytest.raises(UserError, match="not finite"):
        sample_by_uniform(np.array([0.0, np.nan], "float32"), 1.0, 0.5)
