"""Completions are functions of weights, prompt and key, whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.inference.group_sampling import SampleRequest, SamplingParams, request_key, sample_groups, uniforms
from llmsuite.inference.sampling import log_softmax, sample_by_uniform
from tests.support.toy_decoder import ToyDecoder

STOP = {0}


def _alone(
    decoder: ToyDecoder, request: SampleRequest, number: int, sampling_params: SamplingParams
) -> tuple[list[int], list[float], str]:
    """A completion, token by token, without a batch."""
    numbers = uniforms(request.key, number, sampling_params.max_completion_length)
    ids: list[int] = []
    logprobs: list[float] = []
    for uniform in numbers:
        logits = decoder.logits([*request.prompt_ids, *ids])
        token, _ = sample_by_uniform(logits, sampling_params.temperature, uniform)
        ids.append(token)
        logprobs.append(float(log_softmax(logits / (sampling_params.temperature or 1.0))[ids[-1]]))
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
    decoder = ToyDecoder(7, seed=3)
    sampling_params = SamplingParams(count, length, temperature, batch_size)
    requests = [SampleRequest(tuple(ids), request_key(1, 2, ids, i)) for i, ids in enumerate(prompts)]
    groups = sample_groups(decoder, requests, sampling_params, STOP)
    for request, group in zip(requests, groups, strict=True):
        assert len(group) == count
        for number, sampled in enumerate(group):
            ids, logprobs, reason = _alone(decoder, request, number, sampling_params)
            assert (sampled.ids, sampled.finish_reason) == (ids, reason)
            assert np.abs(np.array(sampled.logprobs) - logprobs).max() <= 1e-5
    assert max(decoder.batch_sizes) <= max(batch_size, count)


def test_no_completion_exceeds_the_positions_of_the_model() -> None:
    """Completions that have ended stay in the batch for a while, but never grow beyond the model."""

    class Strict(ToyDecoder):
        def forward(self, ids: np.ndarray, padding: np.ndarray, cache: object) -> object:  # type: ignore[override]
            logits, new = super().forward(ids, padding, cache)  # type: ignore[arg-type]
            assert new[0].shape[1] - padding.min() <= self.max_length
            return logits, new

    decoder = Strict(7, seed=0, max_length=12)
    requests = [SampleRequest((1,) * n, request_key(0, 0, [1] * n)) for n in (2, 1, 1, 1, 2, 1, 2)]
    groups = sample_groups(decoder, requests, SamplingParams(3, 10, 1.0, 21), set())
    assert all(len(sampled.ids) == 10 for group in groups for sampled in group)


def test_prompts_are_read_once() -> None:
    decoder = ToyDecoder(7)
    sample_groups(
        decoder, [SampleRequest((1, 2), (0,)), SampleRequest((3,), (1,))], SamplingParams(5, 1, 1.0, 10), STOP
    )
    assert decoder.batch_sizes == [2]


def test_keys_differ_between_seeds_steps_prompts_and_repetitions() -> None:
    keys = [
        request_key(*key)
        for key in ((0, 0, [1, 2]), (1, 0, [1, 2]), (0, 1, [1, 2]), (0, 0, [1, 3]), (0, 0, [1, 2], 1), (0, 0, [1]))
    ]
    numbers = [tuple(uniforms(key, number, 4)) for key in keys for number in range(2)]
    assert len(set(numbers)) == len(numbers)


def test_random_numbers_do_not_change_between_versions() -> None:
    """Runs that are resumed under another version of NumPy sample the same."""
    found = uniforms(request_key(42, 7, [5, 6, 7]), 3, 3)
    assert found.tolist() == pytest.approx(EXPECTED, abs=0)
    assert uniforms(request_key(42, 7, [5, 6, 7]), 3, 2).tolist() == found[:2].tolist()


EXPECTED = [0.7806507754143679, 0.8619356453019595, 0.5672418670977875]
