"""Batches: every sequence is decoded as it would be alone, for every family, whatever else joins and leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.inference.attention import grouped_attention
from llmsuite.inference.batch import Batch, Compaction, DecodingSequence, check_context_length
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.generate import Generator, generate
from llmsuite.inference.sampling import Sampling, apply_penalties, log_softmax
from llmsuite.inference.text import TextStream
from llmsuite.inference.uncached import UncachedDecoder
from tests.support.decoding_models import PROMPTS, SAMPLINGS, family_model
from tests.support.families import FAMILIES
from tests.support.toy_decoder import ToyDecoder, ToyTokenizer, as_tokenizer


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest) -> Any:
    return family_model(request.param)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "penalised"])
def test_lines_that_come_and_go_are_what_they_are_alone(model: Any, sampling: Sampling) -> None:
    decoder = ModelDecoder(model)
    alone = [list(generate(decoder, prompt, {1}, sampling)) for prompt in PROMPTS]
    assert len({tuple(ids) for ids in alone}) >= len(alone) - 1, "answers that are alike would hide mixed-up rows"
    batch = Batch(decoder)
    sequences = [DecodingSequence(prompt, sampling, {1}) for prompt in PROMPTS]
    batch.advance(sequences[:2])
    batch.advance()
    batch.advance(sequences[2:4])  # longer than those before, and shorter
    batch.advance()
    batch.advance(sequences[4:])
    while batch.sequences:
        batch.advance()
    assert [line.ids for line in sequences] == alone


def test_without_the_cache_nothing_changes(model: Any) -> None:
    decoder = ModelDecoder(model)
    for prompt in PROMPTS[:3]:
        for sampling in SAMPLINGS[:2]:
            expected = list(generate(decoder, prompt, set(), sampling))
            assert list(generate(UncachedDecoder(decoder), prompt, set(), sampling)) == expected


def test_padding_changes_no_logits(model: Any) -> None:
    decoder = ModelDecoder(model)
    ids = np.zeros([2, 9], "int64")
    ids[0, 4:] = PROMPTS[1]
    ids[1] = PROMPTS[3]
    together, cache = decoder.forward(ids, np.asarray([4, 0]), None)
    for row, prompt in zip(together, (PROMPTS[1], PROMPTS[3])):
        alone = model(paddle.to_tensor([prompt])).numpy()[0, -1]
        assert np.abs(row - alone).max() <= 1e-5 * np.abs(alone).max()
    # and in the passes that follow
    more, _ = decoder.forward(np.asarray([[2], [6]]), np.asarray([4, 0]), cache)
    for row, prompt in zip(more, ([*PROMPTS[1], 2], [*PROMPTS[3], 6])):
        alone = model(paddle.to_tensor([prompt])).numpy()[0, -1]
        assert np.abs(row - alone).max() <= 1e-5 * np.abs(alone).max()


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_attention_by_groups_is_the_plain_one(name: str) -> None:
    from llmsuite.devices.ops import attention

    ids = paddle.to_tensor([[5, 1, 9, 2], [7, 3, 3, 8]])
    grouped, plain = (family_model(name, form)(ids).numpy() for form in (grouped_attention, attention))
    assert np.abs(grouped - plain).max() <= 1e-5 * np.abs(plain).max()


@pytest.mark.parametrize("compaction", [Compaction(), Compaction(min_ended=0.5, min_padding=0.5)])
def test_a_group_reads_its_prompt_once(model: Any, compaction: Compaction) -> None:
    """Its sequences are what they are with prompts of their own, however long ended ones stay in the batch."""
    decoder = ModelDecoder(model)
    sampling = SAMPLINGS[1]
    prompts = PROMPTS[1:4]
    alone = [[list(generate(decoder, prompt, {1}, sampling, number)) for number in range(2)] for prompt in prompts]
    groups = [[DecodingSequence(prompt, sampling, {1}, number=n) for n in range(2)] for prompt in prompts]
    batch = Batch(decoder, compaction=compaction)
    steps = batch.start(groups[:2])
    assert [sequence for sequence, _ in steps] == [*groups[0], *groups[1]]
    batch.advance()
    batch.start(groups[2:])
    while batch.sequences:
        batch.advance()
    assert [[sequence.ids for sequence in group] for group in groups] == alone


def test_ended_sequences_stay_until_they_are_worth_a_copy() -> None:
    toy = ToyDecoder(7, seed=1, max_length=6)
    lengths = [1, 3, 4, 4]
    sequences = [DecodingSequence([1], Sampling(max_new_tokens=length), set()) for length in lengths]
    batch = Batch(toy, compaction=Compaction(min_ended=0.5))
    kept = [len(batch.advance(sequences))]
    while batch.sequences:
        kept.append(len(batch.sequences))
        batch.advance()
    assert kept == [4, 4, 4, 2], "one of four stays, two of four leave"
    assert [len(sequence.ids) for sequence in sequences] == lengths
    assert all(sequence.ids == sequences[-1].ids[: len(sequence.ids)] for sequence in sequences)


def test_no_ended_sequence_stays_where_the_model_has_no_position_for_it() -> None:
    toy = ToyDecoder(7, seed=1, max_length=5)
    ends = DecodingSequence([1, 2, 3], Sampling(max_new_tokens=1), set())
    goes_on = DecodingSequence([1], Sampling(max_new_tokens=4), set())
    batch = Batch(toy, compaction=Compaction(min_ended=0.9))
    batch.advance([ends, goes_on])
    assert batch.sequences == [ends, goes_on], "there is a fourth position"
    batch.advance()
    assert batch.sequences == [goes_on], "a fifth one is the last"
    while batch.sequences:
        batch.advance()
    assert len(goes_on.ids) == 4


def test_groups_lose_single_sequences_before_their_prompt_is_read() -> None:
    toy = ToyDecoder(7, seed=1)
    sampling = Sampling(max_new_tokens=2)
    first, second = ([DecodingSequence(prompt, sampling, set()) for _ in range(2)] for prompt in ([1, 2], [3, 4]))
    batch = Batch(toy, chunk_size=2)
    batch.add_groups([first, second])
    batch.prefill()
    batch.remove([second[1], *first])
    assert batch.prefilling == [second[0]]
    while batch.prefilling or batch.sequences:
        batch.prefill() if batch.prefilling else batch.advance()
    assert second[0].ids == list(generate(TOY, [3, 4], set(), sampling))
    assert not second[1].ids


def test_a_prompt_that_cannot_be_read_fails_its_group_only() -> None:
    class Picky(ToyDecoder):
        def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Any) -> Any:
            if 5 in ids:
                raise ValueError("no fives")
            return super().forward(ids, padding, cache)

    sampling = Sampling(max_new_tokens=1)
    groups = [[DecodingSequence(prompt, sampling, set()) for _ in range(2)] for prompt in ([1, 2], [3, 5])]
    batch = Batch(Picky(7, seed=1), isolates_failures=True)
    steps = batch.start(groups)
    assert {id(sequence) for sequence, _ in steps} == {id(sequence) for group in groups for sequence in group}
    assert all(len(sequence.ids) == 1 and sequence.error is None for sequence in groups[0])
    assert all(not sequence.ids and isinstance(sequence.error, ValueError) for sequence in groups[1])


TOY = ToyDecoder(7, seed=1)
PIECES = [b"", b"a", b"b", b"ab", b"\xc3", b"\xa9", "\u65e5".encode()]
TOKENIZER = as_tokenizer(ToyTokenizer(PIECES))


def test_batches_are_filled_and_answers_keep_the_order_of_the_prompts() -> None:
    toy = ToyDecoder(7, seed=1)
    prompts = [[1 + i % 6, 1 + i % 5] for i in range(11)]
    sampling = Sampling(max_new_tokens=9, temperature=1.0, seed=4)
    together = list(Generator(toy, TOKENIZER).answers(prompts, sampling, batch_size=4))
    assert max(toy.batch_sizes) == 4
    for prompt, answers in zip(prompts, together, strict=True):
        assert [list(answer.ids) for answer in answers] == [list(generate(TOY, prompt, {0}, sampling))]
    assert {answer.finish_reason for answers in together for answer in answers} == {"stop", "length"}


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_prompts_go_on_where_a_whole_batch_ends_at_once(batch_size: int) -> None:
    prompts = [[1 + i % 6] for i in range(7)]
    sampling = Sampling(max_new_tokens=3)
    together = list(Generator(TOY, TOKENIZER, stop_ids=set()).answers(iter(prompts), sampling, batch_size=batch_size))
    assert [list(answer.ids) for (answer,) in together] == [list(generate(TOY, p, set(), sampling)) for p in prompts]


def test_several_answers_to_a_prompt_differ_and_each_is_its_own() -> None:
    sampling = Sampling(max_new_tokens=12, temperature=1.5, seed=2)
    (answers,) = Generator(TOY, TOKENIZER).answers([[1, 2]], sampling, num_return_sequences=5, batch_size=3)
    assert len({answer.ids for answer in answers}) == 5
    for number, answer in enumerate(answers):
        assert list(answer.ids) == list(generate(TOY, [1, 2], {0}, sampling, number))


def test_the_stream_says_what_the_answer_says() -> None:
    for seed in range(20):
        sampling = Sampling(max_new_tokens=12, temperature=1.0, seed=seed, stop=("ab\u65e5", "bb"))
        pieces = list(Generator(TOY, TOKENIZER).stream([1], sampling))
        ((answer,),) = Generator(TOY, TOKENIZER).answers([[1]], sampling)
        assert "".join(pieces) == answer.text


def test_no_stop_token_before_min_new_tokens() -> None:
    for seed in range(30):
        sampling = Sampling(max_new_tokens=9, min_new_tokens=6, temperature=2.0, seed=seed)
        ids = list(generate(TOY, [1], {0, 3}, sampling))
        assert len(ids) >= 6
        assert not {0, 3} & set(ids)


def test_penalties_are_those_of_their_formulas() -> None:
    logits = np.asarray([1.0, -2.0, 3.0, 0.5, -1.0], "float32")
    wanted = Sampling(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    # in the prompt 0 and 1, in the answer 2 twice and 4 once
    assert apply_penalties(logits, wanted, [0, 1], [2, 4, 2]).tolist() == [
        0.5,
        -4.0,
        1.5 - 0.5 - 0.5,
        0.5,
        -2.0 - 0.25 - 0.5,
    ]
    assert apply_penalties(logits, Sampling(frequency_penalty=1.0), [0, 1], []) is logits
    assert logits.tolist() == [1.0, -2.0, 3.0, 0.5, -1.0]


def test_a_penalty_ends_repetition() -> None:
    toy = ToyDecoder(7)
    toy.table[:] = np.asarray([-9, 5, 4.5, 1, 0, 0, 0])
    assert list(generate(toy, [3], set(), Sampling(max_new_tokens=4))) == [1, 1, 1, 1]
    assert list(generate(toy, [3], set(), Sampling(max_new_tokens=4, frequency_penalty=0.6))) == [1, 2, 1, 2]
    assert list(generate(toy, [3], set(), Sampling(max_new_tokens=4, repetition_penalty=1.5)))[:2] == [1, 2]


def test_log_probabilities_are_the_models() -> None:
    sampling = Sampling(max_new_tokens=6, temperature=3.0, top_k=4, seed=1, num_logprobs=3, repetition_penalty=1.4)
    ((answer,),) = Generator(TOY, TOKENIZER, stop_ids=set()).answers([[1, 2]], sampling)
    text = [1, 2]
    assert len(answer.logprobs) == len(answer.ids) == 6
    for token, kept in zip(answer.ids, answer.logprobs):
        values = log_softmax(TOY.logits(text))
        assert kept.token == token
        assert kept.logprob == pytest.approx(values[token], abs=1e-12)
        assert [t for t, _ in kept.top] == [int(i) for i in np.argsort(-values)[:3]]
        text.append(token)


@given(
    st.lists(st.integers(1, 6), max_size=14), st.lists(st.sampled_from(["a", "ab", "ba", "b\u65e5", "\u00e9a", "aab"]))
)
def test_a_stop_text_is_found_across_tokens(ids: list[int], stop: list[str]) -> None:
    stream = TextStream(TOKENIZER, stop)
    pieces = []
    ends = -1
    for number, token in enumerate(ids):
        pieces.append(stream.push(token))
        if stream.stopped:
            ends = number
            break
    pieces.append(stream.finish())
    full = TOKENIZER.decode(ids)
    found = [at for at in map(full.find, stop) if at >= 0]
    assert "".join(pieces) == stream.text
    if found:
        assert stream.stopped
        assert stream.text == full[: min(found)]
        # no token later than where it is complete
        assert ends == -1 or not any(text in TOKENIZER.decode(ids[:ends]) for text in stop)
    else:
        assert stream.text == full


def test_what_does_not_fit_is_refused() -> None:
    for prompt, count, message in (
        ([], 5, "has no tokens"),
        (
            [1] * 60,
            5,
            "has 60 tokens, and max_new_tokens asks for 5 more: at most 4 are left; the model's context length is 64",
        ),
        ([1, 7], 5, "has token 7; the model's vocabulary ends at 6"),
    ):
        with pytest.raises(UserError, match=message):
            check_context_length(prompt, count, TOY)
