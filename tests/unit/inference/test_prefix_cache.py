"""Prompts that begin alike: what was computed of one is used for the others, and no answer is another one."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.inference.batch import Batch, DecodingSequence
from llmsuite.inference.decoder import Cache, ModelDecoder
from llmsuite.inference.generate import generate
from llmsuite.inference.prefix_cache import PrefixCache
from llmsuite.inference.sampling import Sampling
from tests.support.alike_prompts import PROMPTS
from tests.support.decoding_models import SAMPLINGS, family_model
from tests.support.families import FAMILIES, LINEAR


class Counting:
    """A decoder that counts the columns it computes."""

    def __init__(self, decoder: ModelDecoder):
        self._decoder = decoder
        self.vocab_size = decoder.vocab_size
        self.max_length = decoder.max_length
        self.traits = decoder.traits
        self.columns: list[int] = []

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        self.columns.append(ids.shape[1])
        return self._decoder.forward(ids, padding, cache)


def answers(
    decoder: Any, prefixes: PrefixCache | None, sampling: Sampling, groups: list[list[int]]
) -> list[DecodingSequence]:
    """Lines that join a batch in groups, some passes apart."""
    batch = Batch(decoder, prefix_cache=prefixes)
    sequences = [DecodingSequence(prompt, sampling, {1}) for prompt in PROMPTS]
    for group in groups:
        batch.advance([sequences[number] for number in group])
        if batch.sequences:
            batch.advance()
    while batch.sequences:
        batch.advance()
    return sequences


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {*LINEAR}))
@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "sampled"])
def test_answers_are_those_without(name: str, sampling: Sampling) -> None:
    decoder = ModelDecoder(family_model(name))
    alone = [list(generate(decoder, prompt, {1}, sampling)) for prompt in PROMPTS]
    for groups in ([[0], [1], [2, 3, 4, 5], [6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[n] for n in range(8)]):
        sequences = answers(decoder, PrefixCache(10**9, 4), sampling, groups)
        assert [line.ids for line in sequences] == alone, groups
        assert sum(line.num_cached_tokens for line in sequences) > 0
        assert max(line.num_cached_tokens for line in sequences) <= 9


@pytest.mark.parametrize("name", LINEAR)
def test_states_are_not_cached(name: str) -> None:
    assert not ModelDecoder(family_model(name)).traits.supports_prefix_cache


def test_a_fused_model_with_a_buffer() -> None:
    from llmsuite.inference.fused import fuse

    model = family_model("llama")
    fuse(model)
    decoder = ModelDecoder(model)
    alone = [list(generate(decoder, prompt, {1}, SAMPLINGS[0])) for prompt in PROMPTS]
    prefixes = PrefixCache(10**9, 4)
    for _ in range(2):  # and once more, when all of them are known
        sequences = answers(decoder, prefixes, SAMPLINGS[0], [[0], [1], [2, 3, 4, 5], [6, 7]])
        assert [line.ids for line in sequences] == alone
    assert [line.num_cached_tokens for line in sequences] == [8, 8, 15, 8, 7, 0, 8, 0]


def test_what_is_known_is_not_computed_again() -> None:
    decoder = Counting(ModelDecoder(family_model("llama")))
    prefixes = PrefixCache(10**9, 4)
    sampling = Sampling(max_new_tokens=1)
    answers(decoder, prefixes, sampling, [[0]])
    answers(decoder, prefixes, sampling, [[6]])
    answers(decoder, prefixes, sampling, [[1]])
    answers(decoder, prefixes, sampling, [[5]])
    assert decoder.columns == [12, 4, 3, 2]


def test_rows_of_one_pass_share_a_beginning() -> None:
    decoder = Counting(ModelDecoder(family_model("llama")))
    prefixes = PrefixCache(10**9, 4)
    sampling = Sampling(max_new_tokens=1)
    sequences = answers(decoder, prefixes, sampling, [[0, 1, 2, 6, 5]])
    assert decoder.columns == [12, 9], "the first prompt and the one that is like no other, then what is left of others"
    assert [line.num_cached_tokens for line in sequences[:3]] == [0, 2, 8]
    assert [line.num_stored_tokens for line in sequences] == [12, 0, 8, 0, 0, 0, 0, 0]


def test_each_adapter_has_its_own() -> None:
    prefixes = PrefixCache(10**9, 2)
    prefixes.store([1, 2, 3, 4], "a", [paddle.ones([1, 1, 4, 2])], 0, 0)
    assert len(prefixes.match([1, 2, 3, 4, 5], "a")) == 2
    assert len(prefixes.match([1, 2, 3, 4], "a")) == 1, "one token is left to read"
    for other in ("b", None):
        assert prefixes.match([1, 2, 3, 4, 5], other) == []
    prefixes.clear()
    assert (prefixes.match([1, 2, 3, 4, 5], "a"), prefixes.num_bytes) == ([], 0)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=30), st.integers(0, 10))
def test_memory_is_bounded_and_what_is_there_is_right(prompts: list[list[int]], most: int) -> None:
    size = 2 * 1 * 3 * 4  # of a block: two columns of three float32
    prefixes = PrefixCache(most * size, 2)
    for prompt in prompts:
        for number, block in enumerate(prefixes.match(prompt, None)):
            values = block.tensors[0].numpy()[0, 0, :, 0].tolist()
            assert values == _sums(prompt)[2 * number : 2 * number + 2], "of these tokens after those"
        values = np.array([0, *_sums(prompt)], "float32")  # one column of padding
        cache = [paddle.to_tensor(np.tile(values[None, None, :, None], [2, 1, 1, 3]))]
        prefixes.store(prompt, None, cache, 1, 1)
        assert prefixes.num_bytes <= most * size
        assert prefixes.num_bytes == sum(block.num_bytes for block in prefixes._blocks.values())
        fits = min(most, (len(prompt) - 1) // 2)
        assert len(prefixes.match(prompt, None)) == fits, "the newest prompt is there as far as there is room"


def _sums(prompt: list[int]) -> list[float]:
    """A value for each token that depends on all before it, too."""
    total = 0.0
    found = []
    for token in prompt:
        total = total * 3 + token + 1
        found.append(total)
    return found


def test_models_whose_prompts_are_edited_share_nothing() -> None:
    model = family_model("llama")
    assert ModelDecoder(model).traits.supports_prefix_cache
    model.__dict__["num_prefix_tokens"] = 2
    assert not ModelDecoder(model).traits.supports_prefix_cache
