"""Batches: every line is what it would be alone, on every family, whatever comes and goes beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.errors import UserError
from llmsuite.inference.attention import grouped_attention
from llmsuite.inference.batch import Batch, Line, check_room
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.generate import Generator, generate
from llmsuite.inference.sampling import Sampling, log_softmax, penalise
from llmsuite.inference.text import TextStream
from llmsuite.inference.uncached import Uncached
from llmsuite.train.initial_values import initial_values
from tests.unit.families import FAMILIES
from tests.unit.inference.toy_decoder import ToyDecoder, ToyTokenizer, as_tokenizer

PROMPTS = [[3], [1, 7, 2, 11, 5], [9, 9], [4, 4, 8, 1, 1, 6, 2, 10, 3], [12, 5, 7]]
SAMPLINGS = [
    Sampling(max_new_tokens=9, min_new_tokens=4),
    Sampling(max_new_tokens=9, min_new_tokens=4, temperature=1.0, seed=3),
    Sampling(1.5, 0, 0.9, 0.0, 1.3, 0.2, seed=5, max_new_tokens=9, min_new_tokens=4),
]


def family_model(name: str, attention: Any = grouped_attention) -> Any:
    """The smoke shape of a family with random weights, large enough to tell tokens apart."""
    from llmsuite.devices.ops import Ops

    spec = FAMILIES[name]
    config = spec.config_cls(**{**spec.smoke, "vocab_size": 32})
    ops = dataclasses.replace(Ops(), attention=attention, heads_first=attention is grouped_attention)
    model = spec.factory()(config, ops)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.set_value(initial_values(1, parameter_name, parameter.shape, 0.25))
    model.eval()
    return model


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest) -> Any:
    return family_model(request.param)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "penalised"])
def test_lines_that_come_and_go_are_what_they_are_alone(model: Any, sampling: Sampling) -> None:
    decoder = ModelDecoder(model)
    alone = [list(generate(decoder, prompt, {1}, sampling)) for prompt in PROMPTS]
    assert len({tuple(ids) for ids in alone}) == len(alone), "answers that are alike would hide mixed-up rows"
    batch, lines = Batch(decoder), [Line(prompt, sampling, {1}) for prompt in PROMPTS]
    batch.advance(lines[:2])
    batch.advance()
    batch.advance(lines[2:4])  # longer than those before, and shorter
    batch.advance()
    batch.advance(lines[4:])
    while batch.lines:
        batch.advance()
    assert [line.ids for line in lines] == alone


def test_without_the_cache_nothing_changes(model: Any) -> None:
    decoder = ModelDecoder(model)
    for prompt in PROMPTS[:3]:
        for sampling in SAMPLINGS[:2]:
            expected = list(generate(decoder, prompt, set(), sampling))
            assert list(generate(Uncached(decoder), prompt, set(), sampling)) == expected


def test_padding_changes_no_logits(model: Any) -> None:
    decoder = ModelDecoder(model)
    ids = np.zeros([2, 9], "int64")
    ids[0, 4:], ids[1] = PROMPTS[1], PROMPTS[3]
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
    prompts, sampling = [[1 + i % 6] for i in range(7)], Sampling(max_new_tokens=3)
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
    assert penalise(logits, wanted, [0, 1], [2, 4, 2]).tolist() == [0.5, -4.0, 1.5 - 0.5 - 0.5, 0.5, -2.0 - 0.25 - 0.5]
    assert penalise(logits, Sampling(frequency_penalty=1.0), [0, 1], []) is logits
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
    stream, pieces, ends = TextStream(TOKENIZER, stop), [], -1
    for number, token in enumerate(ids):
        pieces.append(stream.push(token))
        if stream.stopped:
            ends = number
            break
    pieces.append(stream.finish())
    whole = TOKENIZER.decode(ids)
    found = [at for at in map(whole.find, stop) if at >= 0]
    assert "".join(pieces) == stream.text
    if found:
        assert stream.stopped
        assert stream.text == whole[: min(found)]
        # no token later than where it is complete
        assert ends == -1 or not any(text in TOKENIZER.decode(ids[:ends]) for text in stop)
    else:
        assert stream.text == whole


def test_what_does_not_fit_is_refused() -> None:
    for prompt, count, message in (
        ([], 5, "has no tokens"),
        (
            [1] * 60,
            5,
            "has 60 tokens, and max_new_tokens asks for 5 more: at most 4 are left; the model's context length is 64",
        ),
        ([1, 7], 5, "has token 7; the model's end at 6"),
    ):
        with pytest.raises(UserError, match=message):
            check_room(prompt, count, TOY)
