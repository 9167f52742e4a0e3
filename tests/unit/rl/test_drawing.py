"""Completions are functions of weights, prompt and key, whatever else is drawn with them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.inference.sampling import draw, log_softmax
from llmsuite.rl.drawing import Drawing, Request, draw_groups, request_key, uniforms
from tests.unit.inference.toy_decoder import ToyDecoder

STOP = {0}


def _alone(decoder: ToyDecoder, request: Request, number: int, drawing: Drawing) -> tuple[list[int], list[float], str]:
    """A completion, token by token, without a batch."""
    numbers = uniforms(request.key, number, drawing.max_completion_length)
    ids: list[int] = []
    logprobs: list[float] = []
    for uniform in numbers:
        logits = decoder.logits([*request.prompt_ids, *ids])
        tokens, _ = draw(logits[None], drawing.temperature, np.array([uniform]))
        ids.append(int(tokens[0]))
        logprobs.append(float(log_softmax(logits / (drawing.temperature or 1.0))[ids[-1]]))
        if ids[-1] in STOP:
            return ids, logprobs, "stop"
    return ids, logprobs, "length"


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=6), min_size=1, max_size=7),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.7, 1.0]),
)
def test_a_completion_does_not_depend_on_the_batch(
    prompts: list[list[int]], count: int, batch_size: int, length: int, temperature: float
) -> None:
    decoder, drawing = ToyDecoder(7, seed=3), Drawing(count, length, temperature, batch_size)
    requests = [Request(tuple(ids), request_key(1, 2, ids, i)) for i, ids in enumerate(prompts)]
    groups = draw_groups(decoder, requests, drawing, STOP)
    for request, group in zip(requests, groups, strict=True):
        assert len(group) == count
        for number, drawn in enumerate(group):
            ids, logprobs, reason = _alone(decoder, request, number, drawing)
            assert (drawn.ids, drawn.finish_reason) == (ids, reason)
            assert np.abs(np.array(drawn.logprobs) - logprobs).max() <= 1e-5
    assert max(decoder.batch_sizes) <= max(batch_size, count)


def test_nothing_is_drawn_beyond_the_positions_of_the_model() -> None:
    """Completions that have ended stay in the batch for a while, but never grow beyond the model."""

    class Strict(ToyDecoder):
        def forward(self, ids: np.ndarray, padding: np.ndarray, cache: object) -> object:  # type: ignore[override]
            logits, new = super().forward(ids, padding, cache)  # type: ignore[arg-type]
            assert new[0].shape[1] - padding.min() <= self.max_length
            return logits, new

    decoder = Strict(7, seed=0, max_length=12)
    requests = [Request((1,) * n, request_key(0, 0, [1] * n)) for n in (2, 1, 1, 1, 2, 1, 2)]
    groups = draw_groups(decoder, requests, Drawing(3, 10, 1.0, 21), set())
    assert all(len(drawn.ids) == 10 for group in groups for drawn in group)


def test_prompts_are_read_once() -> None:
    decoder = ToyDecoder(7)
    draw_groups(decoder, [Request((1, 2), (0,)), Request((3,), (1,))], Drawing(5, 1, 1.0, 10), STOP)
    assert decoder.batch_sizes == [2]


def test_keys_tell_seeds_steps_prompts_and_repetitions_apart() -> None:
    keys = [
        request_key(*key)
        for key in ((0, 0, [1, 2]), (1, 0, [1, 2]), (0, 1, [1, 2]), (0, 0, [1, 3]), (0, 0, [1, 2], 1), (0, 0, [1]))
    ]
    drawn = [tuple(uniforms(key, number, 4)) for key in keys for number in range(2)]
    assert len(set(drawn)) == len(drawn)


def test_random_numbers_stay_what_they_are() -> None:
    """Runs that are resumed under another version of NumPy draw the same."""
    found = uniforms(request_key(42, 7, [5, 6, 7]), 3, 3)
    assert found.tolist() == pytest.approx(EXPECTED, abs=0)
    assert uniforms(request_key(42, 7, [5, 6, 7]), 3, 2).tolist() == found[:2].tolist()


EXPECTED = [0.7806507754143679, 0.8619356453019595, 0.5672418670977875]
