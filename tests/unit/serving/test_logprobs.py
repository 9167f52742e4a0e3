"""Log-probabilities in the formats of the API: token by token they are those of the whole answer, at the same cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.batch import TokenLogprob
from llmsuite.serving.logprobs import ChatLogprobs, CompletionLogprobs, chat_logprobs, completion_logprobs
from tests.support.tiny_llama import TOKENIZER

CUTS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


class CountingTokenizer(TextTokenizer):
    """A tokenizer that counts the tokens it decodes."""

    decoded = 0

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


@pytest.fixture(scope="module")
def tokenizer() -> CountingTokenizer:
    return CountingTokenizer(Path(TOKENIZER))


@st.composite
def answers(draw: st.DrawFn) -> list[list[TokenLogprob]]:
    """An answer, special tokens and parts of characters included, cut into the parts of its events."""
    tokens = draw(st.lists(st.integers(0, 500), min_size=1, max_size=20))
    kept = []
    for token in tokens:
        top = draw(st.lists(st.integers(0, 500), max_size=3, unique=True))
        kept.append(TokenLogprob(token, -1.0, tuple((other, -float(place)) for place, other in enumerate(top))))
    cuts = sorted(draw(st.lists(st.integers(0, len(kept)), max_size=6)))
    return [kept[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(kept)])]


@given(parts=answers())
@CUTS
def test_parts_are_those_of_the_whole_answer(tokenizer: CountingTokenizer, parts: list[list[TokenLogprob]]) -> None:
    whole = [t for part in parts for t in part]
    # whether a token begins the text is known once one of the answer is visible
    if not any(tokenizer.is_visible(t.token) for t in parts[0]):
        parts = [whole]
    completion = CompletionLogprobs(tokenizer)
    found = [completion.add(part) for part in parts]
    for key, values in completion_logprobs(whole, tokenizer).items():
        assert [value for part in found for value in part[key]] == values, key
    chat = ChatLogprobs(tokenizer)
    content = [entry for part in parts for entry in chat.add(part)["content"]]
    assert content == chat_logprobs(whole, tokenizer)["content"]


@pytest.mark.parametrize("kind", [ChatLogprobs, CompletionLogprobs])
def test_a_late_token_costs_as_much_as_an_early_one(
    tokenizer: CountingTokenizer, kind: type[ChatLogprobs | CompletionLogprobs]
) -> None:
    formatter = kind(tokenizer)
    costs = []
    for number in range(400):
        token = 40 + number % 7
        before = tokenizer.decoded
        formatter.add([TokenLogprob(token, -1.0, ((token, -1.0), (41, -2.0)))])
        costs.append(tokenizer.decoded - before)
    assert max(costs[200:]) <= max(costs[:200])
    assert sum(costs[200:]) < 200 * 20
