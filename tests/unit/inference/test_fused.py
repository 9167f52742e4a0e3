"""The form of generation: fewer products, the same logits."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.ops import Ops
from llmsuite.inference.attention import with_cached_attention
from llmsuite.inference.batch import Batch, DecodingSequence
from llmsuite.inference.decoder import MAX_SPARE, ModelDecoder
from llmsuite.inference.fused import fuse
from llmsuite.inference.generate import generate
from llmsuite.inference.sampling import Sampling
from llmsuite.models.qat import fake_quantize_layers, fake_quantized
from tests.support.decoding_models import family_model
from tests.support.families import CASES, FAMILIES, load, reference
from tests.support.paths import REFERENCE


def _logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with paddle.no_grad():
        return np.asarray(model(paddle.to_tensor(ids)).numpy())


PLAIN = ("llama/", "qwen/", "ernie/", "seed_oss/", "phi/window", "internlm/")
"""Beginnings of cases whose layers one fused kernel computes, but for those with biases."""


@pytest.mark.parametrize("case", CASES)
def test_every_shape_of_every_family_has_its_logits(case: str) -> None:
    ids, expected = reference(case)
    model = load(REFERENCE / case)
    fuse(model)
    assert np.abs(_logits(model, ids) - expected).max() <= 1e-5


@pytest.mark.parametrize("pattern", ["q_proj", "gate_proj"])
def test_layers_that_round_their_inputs_stay_as_they_are(pattern: str) -> None:
    case = next(case for case in CASES if case.startswith("llama/"))
    ids, plain = reference(case)
    model = load(Path(REFERENCE / case))
    names = [name for name, _ in model.named_sublayers() if name.endswith(pattern)]
    fake_quantize_layers(model, names, rounds_weight=False)
    for _, layer in fake_quantized(model):
        layer.input_scale = 0.05
    before = _logits(model, ids)
    assert np.abs(before - plain).max() > 1e-3
    fuse(model)
    assert np.abs(_logits(model, ids) - before).max() <= 1e-5


@pytest.mark.parametrize("case", CASES)
def test_every_shape_of_every_family_has_its_logits_token_by_token(case: str) -> None:
    ids, expected = reference(case)
    model = load(REFERENCE / case)
    fuse(model, CpuBackend().ops("fp32"))
    has_kernel = model.decoding.next_logits is not None
    assert has_kernel == (case.startswith(PLAIN) and "bias" not in case)
    decoder = ModelDecoder(model)
    padding = np.zeros(len(ids), "int64")
    prompt_len = 3
    logits, cache = decoder.forward(ids[:, :prompt_len], padding, None)
    for i in range(prompt_len, ids.shape[1]):
        assert np.abs(logits - expected[:, i - 1]).max() <= 1e-5
        logits, cache = decoder.forward(ids[:, i : i + 1], padding, cache)
    assert np.abs(logits - expected[:, -1]).max() <= 1e-5


def test_a_row_that_would_see_nothing_is_refused() -> None:
    """Its attention would be the mean of nothing, and its logits NaN."""
    case = next(case for case in CASES if case.startswith("llama/") and "bias" not in case)
    ids, _ = reference(case)
    model = load(REFERENCE / case)
    fuse(model, CpuBackend().ops("fp32"))
    decoder = ModelDecoder(model)
    padding = np.zeros(len(ids), "int64")
    _, cache = decoder.forward(ids[:, :3], padding, None)
    padding[-1] = 4
    assert model.decoding.next_logits is not None
    with pytest.raises(Exception, match="padding is beyond the cache"):
        decoder.forward(ids[:, 3:4], padding, cache)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(PLAIN)])
@pytest.mark.parametrize("ends", [(9,), (5, 9), (1, 2, 8, 9)], ids=str)
def test_prompts_of_unequal_length_are_read_as_layer_by_layer(case: str, ends: tuple[int, ...]) -> None:
    """In one piece or in several, of which some begin before the shorter prompts do."""
    model = load(REFERENCE / case)
    padding = np.asarray([4, 0, 1])
    fuse(model, CpuBackend().ops("fp32"))
    prefill = model.decoding.prefill
    if prefill is None:
        assert "bias" in case
        return
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, [3, 9])
    with paddle.no_grad():
        given = paddle.to_tensor(ids), paddle.to_tensor(padding)
        cache = prefill.new_cache(3, 12)
        pieces = [prefill(given[0][:, start:end], given[1], cache, start) for start, end in zip((0, *ends), ends)]
        wanted, expected = model.decode_step(*given, None)
    hidden = paddle.concat(pieces, 1)
    for found, other in zip((hidden, *cache), (wanted, *(t for pair in expected for t in pair))):
        for row, start in enumerate(padding):  # what is in columns of padding is seen by no token
            own, theirs = (tensor.numpy()[row, ..., start:9, :] for tensor in (found, other))
            assert np.abs(own - theirs).max() <= 1e-5 * np.abs(theirs).max()
    assert all(not tensor[:, :, 9:].any() for tensor in cache), "free columns stay as they are"


def test_some_of_these_have_a_window() -> None:
    assert any(load(REFERENCE / case).window for case in CASES if case.startswith("llama/"))


@pytest.mark.parametrize("case", ["llama/own_head_dim", "qwen/qwen3"])
def test_a_row_has_the_same_bits_in_any_batch(case: str) -> None:
    """And however many threads there are."""
    openmp = ctypes.CDLL(str(Path(paddle.__file__).parent / "libs" / "libiomp5.so"))
    model = load(REFERENCE / case)
    draw = np.random.default_rng(0)
    fuse(model, CpuBackend().ops("fp32"))
    decoder = ModelDecoder(model)
    rows = 21
    padding = draw.integers(0, 6, [rows])
    _, start = decoder.forward(draw.integers(0, 32, [rows, 6]), padding, None)
    new = draw.integers(0, 32, [rows, 1])
    threads = openmp.omp_get_max_threads()
    together, _ = decoder.forward(new, padding, start)
    assert len(np.unique(together, axis=0)) == rows
    for num_threads, some in ((1, slice(0, 1)), (2, slice(4, 9)), (3, slice(5, 21))):
        cache = [tensor[some].clone() for tensor in start]
        try:
            openmp.omp_set_num_threads(num_threads)
            logits, _ = decoder.forward(new[some], padding[some], cache)
        finally:
            openmp.omp_set_num_threads(threads)
        assert np.array_equal(logits, together[some])


@pytest.mark.parametrize("change", ["mask", "final_norm", "o_proj", "mlp"])
def test_a_model_that_the_kernel_cannot_do_goes_layer_by_layer(change: str) -> None:
    class Other(FAMILIES["llama"].factory()):  # type: ignore[misc]
        def layer_inputs_at(self, positions: Any, mask: Any, dtype: Any) -> Any:
            cos, sin, mask = super().layer_inputs_at(positions, mask, dtype)
            return cos, sin, mask * 1.0 if change == "mask" else mask

        if change == "final_norm":

            def final_norm(self, x: Any) -> Any:
                return super().final_norm(x) * 2.0

    config = FAMILIES["llama"].config_cls(**{**FAMILIES["llama"].smoke, "vocab_size": 32})
    model = Other(config, with_cached_attention(Ops()))
    model.eval()
    if change in ("o_proj", "mlp"):
        pattern = "o_proj" if change == "o_proj" else "gate_proj"
        names = [name for name, _ in model.named_sublayers() if name.endswith(pattern)]
        fake_quantize_layers(model, names, rounds_weight=False)
    fuse(model, CpuBackend().ops("fp32"))
    assert model.decoding.next_logits is None


@pytest.fixture(
    scope="module", params=[("llama", False), ("llama", True), ("qwen", False), ("qwen", True), ("gpt", True)], ids=str
)
def decoders(request: pytest.FixtureRequest) -> tuple[ModelDecoder, ModelDecoder]:
    """Decoders of one model, unfused and fused: layer by layer, or with the kernel for all of them."""
    family, by_kernel = request.param
    plain = family_model(family)
    fused = family_model(family)
    fuse(fused, CpuBackend().ops("fp32") if by_kernel else None)
    assert fused.decoding.accepts_buffer == (family != "gpt")
    assert (fused.decoding.next_logits is not None) == (by_kernel and family != "gpt")
    return ModelDecoder(plain), ModelDecoder(fused)


def test_lines_that_fill_the_free_columns_are_those_of_the_plain_model(
    decoders: tuple[ModelDecoder, ModelDecoder],
) -> None:
    plain, fused = decoders
    prompts = [[3], [1, 7, 2, 11, 5], [9, 9, 4]]
    sampling = Sampling(max_new_tokens=45, temperature=1.0, seed=3)
    assert sampling.max_new_tokens > MAX_SPARE
    expected = [list(generate(plain, prompt, set(), sampling)) for prompt in prompts]
    assert len({tuple(ids) for ids in expected}) == len(prompts)
    batch = Batch(fused)
    sequences = [DecodingSequence(prompt, sampling, set()) for prompt in prompts]
    batch.advance(sequences[:2])
    for _ in range(5):
        batch.advance()
    batch.advance(sequences[2:])
    while batch.sequences:
        batch.advance()
    assert [line.ids for line in sequences] == expected


def test_a_pass_changes_nothing_that_passes_before_it_gave(decoders: tuple[ModelDecoder, ModelDecoder]) -> None:
    plain, fused = decoders
    draw = np.random.default_rng(0)
    padding = np.asarray([2, 0])
    _, start = fused.forward(draw.integers(0, 32, [2, 6]), padding, None)
    new = draw.integers(0, 32, [3, 2, 1])
    first_logits, first = fused.forward(new[0], padding, start)
    values = [tensor.numpy().copy() for tensor in first]
    second_logits, second = fused.forward(new[1], padding, first)
    again, other = fused.forward(new[2], padding, first)  # continues from the same position
    assert not np.array_equal(second[0].numpy(), other[0].numpy())
    assert all(np.array_equal(value, tensor.numpy()) for value, tensor in zip(values, first))
    expected = plain.forward(new[0], padding, start)
    assert np.abs(first_logits - expected[0]).max() <= 1e-5 * np.abs(first_logits).max()
    for logits, tokens in ((second_logits, new[1]), (again, new[2])):
        wanted = plain.forward(tokens, padding, expected[1])[0]
        assert np.abs(logits - wanted).max() <= 1e-5 * np.abs(wanted).max()
