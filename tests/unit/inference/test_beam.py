"""Beam search against every possible text."""

from __future__ import annotations

import itertools

import pytest

from llmsuite.base.errors import UserError
from llmsuite.inference.beam import BeamParams, beam_search
from llmsuite.inference.generate import generate
from llmsuite.inference.sampling import Sampling, log_softmax
from tests.support.toy_decoder import ToyDecoder

EOS = 0


def every_text(toy: ToyDecoder, prompt: list[int], beams: BeamParams) -> list[tuple[float, tuple[int, ...]]]:
    """All answers and their scores, the best first."""
    found = []
    for length in range(1, beams.max_new_tokens + 1):
        for ids in itertools.product(range(1, toy.vocab_size), repeat=length - 1):
            ends = [EOS] if length > beams.min_new_tokens else []
            if length == beams.max_new_tokens:
                ends += range(1, toy.vocab_size)
            for end in ends:
                text = list(prompt)
                total = 0.0
                for number, token in enumerate((*ids, end)):
                    logits = toy.logits(text).copy()
                    if number < beams.min_new_tokens:
                        logits[EOS] = -float("inf")
                    total += float(log_softmax(logits)[token])
                    text.append(token)
                answer = ids if end == EOS else (*ids, end)
                found.append((total / length**beams.length_penalty, answer))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("penalty", [-0.5, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("min_new_tokens", [0, 2])
def test_wide_beams_find_the_best_of_all(penalty: float, min_new_tokens: int) -> None:
    beams = BeamParams(4**4, penalty, max_new_tokens=4, min_new_tokens=min_new_tokens)
    lengths = set()
    for seed in range(6):
        toy = ToyDecoder(4, seed)
        expected = every_text(toy, [1, 2], beams)[:5]
        found = beam_search(toy, [1, 2], {EOS}, beams, num_answers=5)
        assert [f.ids for f in found] == [ids for _, ids in expected]
        assert [f.score for f in found] == pytest.approx([score for score, _ in expected], abs=1e-9)
        lengths.update(len(f.ids) for f in found)
    assert len(lengths) > 1


def test_the_search_ends_early_only_when_nothing_better_can_come() -> None:
    for seed in range(8):
        beams = BeamParams(5**3, 1.0, max_new_tokens=8)
        narrow = BeamParams(5**3, 1.0, max_new_tokens=5)
        toy = ToyDecoder(5, seed, scale=4.0)
        best = beam_search(toy, [1], {EOS}, beams)[0]
        passes = len(toy.batch_sizes)
        if passes < 8:  # it ended early: no text of up to 5 tokens is better
            assert best.score >= every_text(toy, [1], narrow)[0][0] - 1e-9 or not best.stopped
    assert passes <= 8


def test_one_beam_is_greedy() -> None:
    for seed in range(10):
        toy = ToyDecoder(6, seed)
        greedy = list(generate(toy, [2], set(), Sampling(max_new_tokens=7)))
        (found,) = beam_search(toy, [2], set(), BeamParams(1, max_new_tokens=7))
        assert list(found.ids) == greedy
        assert not found.stopped


def test_more_answers_than_beams_are_refused() -> None:
    with pytest.raises(UserError, match="num_return_sequences: is 3, more than num_beams = 2"):
        beam_search(ToyDecoder(4), [1], {EOS}, BeamParams(2), num_answers=3)
