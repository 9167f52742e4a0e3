"""Chunked prefill: the same answers, and others continue in between."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.batch import Batch, DecodingSequence
from llmsuite.inference.chunked_prefill import Prefill, group_prompts
from llmsuite.inference.decoder import Cache, DecoderTraits, ModelDecoder, chunk_length
from llmsuite.inference.fused import fuse
from llmsuite.inference.generate import generate
from llmsuite.inference.prefix_cache import PrefixCache
from llmsuite.inference.sampling import Sampling, log_softmax
from llmsuite.plugins.cpu_kernels import kernels
from llmsuite.plugins.cpu_kernels.decoder import DecoderOps
from tests.support.alike_prompts import PROMPTS as ALIKE
from tests.support.decoding_models import PROMPTS, family_model
from tests.support.families import FAMILIES
from tests.support.toy_decoder import ToyDecoder

LONG = [3, 9, 4, 4, 8, 1, 1, 6, 2, 10, 3, 7, 12, 5, 11, 2, 2, 9, 13, 5, 6, 1, 30]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def decoder(request: pytest.FixtureRequest) -> ModelDecoder:
    return ModelDecoder(family_model(request.param))


class Watched(ToyDecoder):
    """Keeps the rows and columns of every pass."""

    def __init__(self, max_length: int = 64) -> None:
        super().__init__(7, seed=1, max_length=max_length)
        self.passes: list[tuple[int, ...]] = []

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        self.passes.append(ids.shape)
        return super().forward(ids, padding, cache)


def run(batch: Batch, sequences: list[DecodingSequence]) -> None:
    """Alternate like the scheduler: a chunk of a prompt, then a pass over the answers."""
    batch.add(sequences)
    while batch.prefilling or batch.sequences:
        if batch.prefilling:
            batch.prefill()
        if batch.sequences:
            batch.advance()


def test_answers_are_those_of_prompts_read_at_once(decoder: ModelDecoder) -> None:
    sampling = Sampling(max_new_tokens=5, min_new_tokens=5)
    prompts = [*PROMPTS, LONG, LONG[::-1]]
    alone = [list(generate(decoder, prompt, {1}, sampling)) for prompt in prompts]
    for num_tokens in (1, 5, 8):
        sequences = [DecodingSequence(prompt, sampling, {1}) for prompt in prompts]
        run(Batch(decoder, chunk_size=num_tokens), sequences)
        assert [line.ids for line in sequences] == alone, num_tokens


def test_prompts_that_begin_alike_are_read_in_pieces_too(decoder: ModelDecoder) -> None:
    sampling = Sampling(max_new_tokens=3, min_new_tokens=3)
    alone = [list(generate(decoder, prompt, {1}, sampling)) for prompt in ALIKE]
    sequences = [DecodingSequence(prompt, sampling, {1}) for prompt in ALIKE]
    prefixes = PrefixCache(10**9, 4) if decoder.traits.supports_prefix_cache else None
    run(Batch(decoder, chunk_size=5, prefix_cache=prefixes), sequences)
    assert [line.ids for line in sequences] == alone
    assert prefixes is None or sum(line.num_cached_tokens for line in sequences) >= 4 * 8, (
        "they wait for the one that reads what they have in common"
    )


def test_logits_and_vectors_are_those_of_one_pass(decoder: ModelDecoder) -> None:
    with paddle.no_grad():
        hidden, _ = decoder._model.decode_step(paddle.to_tensor([LONG]), paddle.zeros([1], "int64"), None)
        full = log_softmax(decoder._model.logits(hidden)[0, :-1].astype("float32").numpy())
    mean = hidden[0].numpy().astype("float64").mean(0)
    for num_tokens in (1, 5, 8, None):
        blocks = list(decoder.prompt_logits(LONG, num_tokens))
        found = log_softmax(np.concatenate(blocks)[:, : full.shape[1]])
        assert len(blocks) == {1: 22, 5: 5, 8: 3, None: 1}[num_tokens]
        assert np.abs(found - full).max() <= 1e-5 * np.abs(full).max()
        *steps, vectors = decoder.embed([LONG, LONG[:4]], num_tokens)
        assert steps == [None] * {1: 22, 5: 11, 8: 5, None: 0}[num_tokens]
        assert vectors is not None
        assert np.abs(vectors[0] - mean / np.linalg.norm(mean)).max() <= 1e-6
        (alone,) = decoder.embed([LONG[:4]])
        assert alone is not None
        assert np.abs(vectors[1] - alone[0]).max() <= 1e-6


def test_a_long_prompt_stops_nobody_for_more_than_a_piece() -> None:
    toy = Watched(20_000)
    batch = Batch(toy, chunk_size=256)
    talks = DecodingSequence([3], Sampling(max_new_tokens=2000), set())
    batch.advance([talks])
    toy.passes.clear()
    long, short = (
        DecodingSequence([1 + i % 6 for i in range(n)], Sampling(max_new_tokens=1), set()) for n in (15_000, 200)
    )
    batch.add([long])
    for number in range(2000):
        if number == 3:
            batch.add([short])
        if batch.prefilling:
            batch.prefill()
            assert short.finish_reason or number < 8, "it takes turns with the long one"
        batch.advance()
        if long.finish_reason:
            break
    assert long.ids == list(generate(ToyDecoder(7, 1, 20_000), long.prompt, set(), long.sampling))
    assert short.finish_reason
    columns = [width for _, width in toy.passes]
    assert sum(columns) == 15_200 + len(talks.ids) - 1
    assert max(columns) == 256
    between = "".join("d" if width == 1 else "r" for width in columns)
    assert "rr" not in between, "an answer continues after each chunk"
    pieces = [width for width in columns if width > 1]
    assert pieces[-2] * 15_000 < 2 * 256 * 4096, "later pieces are shorter: attention takes longer"


def test_a_prompt_that_nobody_waits_for_is_left() -> None:
    toy = Watched()
    batch = Batch(toy, chunk_size=4)
    sequences = [DecodingSequence(LONG[:12], Sampling(max_new_tokens=2), set()) for _ in range(3)]
    for line in sequences:
        line.prompt = [token % 7 for token in line.prompt]
    batch.add(sequences)
    batch.prefill()
    batch.remove(sequences[:2])
    assert batch.prefilling == sequences[2:]
    run(batch, [])
    assert [len(line.ids) for line in sequences] == [0, 0, 2]


def test_what_cannot_be_read_fails_alone() -> None:
    class Refusing(ToyDecoder):
        def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Any) -> Any:
            if (ids == 6).any():
                raise ArithmeticError("a pass that fails")
            return super().forward(ids, padding, cache)

    batch = Batch(Refusing(7, seed=1), isolates_failures=True, chunk_size=64)
    prompts = [[1, 2], [6, 1], [2, 3]]
    sequences = [DecodingSequence(prompt, Sampling(max_new_tokens=1), set()) for prompt in prompts]
    run(batch, sequences)
    assert [(len(line.ids), line.error is not None) for line in sequences] == [(1, False), (0, True), (1, False)]


def test_interventions_are_read_at_once() -> None:
    toy = Watched()
    toy.traits = DecoderTraits(supports_chunked_prefill=False)
    run(Batch(toy, chunk_size=4), [DecodingSequence([1] * 20, Sampling(max_new_tokens=1), set())])
    assert toy.passes == [(1, 20)]


def test_pieces_that_are_read_faster_are_longer() -> None:
    toy = Watched()
    toy.traits = DecoderTraits(prefill_speedup=3)
    sequences = [DecodingSequence([1 + i % 6 for i in range(n)], Sampling(max_new_tokens=1), set()) for n in (20, 6, 5)]
    run(Batch(toy, chunk_size=4), sequences)
    assert toy.passes == [(1, 12), (2, 6), (1, 8)]


def test_every_piece_is_read_by_the_kernels_that_read_a_prompt_at_once() -> None:
    live = CpuBackend().ops("fp32")
    seen = list[tuple[int, int]]()

    def watched(q: Any, keys: Any, values: Any, spans: Any, num_keys: int) -> Any:
        seen.append((q.shape[1], num_keys))
        return kernels.cached_attention(q, keys, values, spans, num_keys)

    model = family_model("llama")
    num_layers = len(model.model.layers)
    decoder_for = DecoderOps(kernels.next_logits, watched).decoder_for
    fuse(model, dataclasses.replace(live, decoding=dataclasses.replace(live.decoding, decoder_for=decoder_for)))
    decoder = ModelDecoder(model)
    found = []
    for num_tokens, pieces in ((None, [(23, 23)]), (2, [(8, 8), (8, 16), (7, 23)])):
        reading = Prefill([[DecodingSequence(LONG, Sampling(), set())]], [[]])
        while not reading.is_done:
            logits = reading.advance(decoder, num_tokens)
        assert seen == [piece for piece in pieces for _ in range(num_layers)]
        seen.clear()
        found.append(logits)
    assert np.abs(found[1] - found[0]).max() <= 1e-5 * np.abs(found[0]).max()


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 99), st.integers(1, 5))
def test_groups_keep_the_order_and_the_bounds(lengths: list[int], num_tokens: int, num_rows: int) -> None:
    groups = group_prompts(lengths, num_tokens, num_rows)
    assert [number for group in groups for number in group] == list(range(len(lengths)))
    for group in groups:
        assert len(group) <= num_rows
        assert len(group) == 1 or len(group) * max(lengths[number] for number in group) <= num_tokens


@given(st.integers(1, 10_000), st.integers(1, 64), st.integers(0, 10**6))
def test_pieces_get_shorter(num_tokens: int, num_rows: int, num_before: int) -> None:
    length = chunk_length(num_tokens, num_rows, num_before)
    assert 1 <= length <= max(1, num_tokens // num_rows)
    assert length >= chunk_length(num_tokens, num_rows, num_before + 1000)
