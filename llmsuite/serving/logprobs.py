"""Log-probabilities of answers in the formats of OpenAI's API, whole or token by token.

The work for a token does not depend on the tokens before it, so that a stream costs as much as a whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.batch import TokenLogprob
from llmsuite.inference.text import TextStream

_LEAST_LOGPROB = -9999.0
"""Smallest value in a chat: JSON has no infinity."""


class LogprobFormatter(Protocol):
    """Formats the tokens of one answer, in their order."""

    def add(self, new: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The `logprobs` of a choice that has these tokens."""


class _FirstToken:
    """The place of the token that begins the text of an answer: it is decoded differently from those after others."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._visible: int | None = None
        self._count = 0

    def places(self, new: Sequence[TokenLogprob]) -> list[bool]:
        """True for each of the next tokens that begins the text. As long as all tokens are left out as special, that is
        the first token."""
        if self._visible is None:
            visible = (place for place, t in enumerate(new, self._count) if self._tokenizer.is_visible(t.token))
            self._visible = next(visible, None)
        begin = self._count
        self._count += len(new)
        return [place == (self._visible or 0) for place in range(begin, self._count)]


class ChatLogprobs:
    """Formats the tokens of an answer in a chat."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._first = _FirstToken(tokenizer)
        self._known: dict[tuple[int, bool], tuple[str, list[int] | None]] = {}
        """Text and bytes of tokens: the likely ones come again and again."""

    def add(self, new: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Entries for the next tokens."""
        content = []
        for t, is_first in zip(new, self._first.places(new)):
            top = [self._entry(other, value, is_first) for other, value in t.top]
            content.append({**self._entry(t.token, t.logprob, is_first), "top_logprobs": top})
        return {"content": content}

    def _entry(self, token: int, logprob: float, is_first: bool) -> dict[str, Any]:
        key = (token, is_first)
        if key not in self._known:
            found = self._tokenizer.token_bytes(token, is_first)
            self._known[key] = (self._tokenizer.token_text(token, is_first), None if found is None else list(found))
        text, known = self._known[key]
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": known}


class CompletionLogprobs:
    """Formats the tokens of a completion. Offsets are of the text: tokens that are parts of one character begin where
    it does."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._first = _FirstToken(tokenizer)
        self._stream = TextStream(tokenizer)
        self._known: dict[tuple[int, bool], str] = {}

    def add(self, new: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Lists for the next tokens."""
        offsets = []
        texts = []
        top = []
        for t, is_first in zip(new, self._first.places(new)):
            offsets.append(len(self._stream.text))
            self._stream.push(t.token)
            texts.append(self._text(t.token, is_first))
            # in ascending order: of tokens with the same text, such as parts of characters, the most likely one stays
            top.append({self._text(other, is_first): value for other, value in reversed(t.top)})
        return {
            "tokens": texts,
            "token_logprobs": [t.logprob for t in new],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _text(self, token: int, is_first: bool) -> str:
        key = (token, is_first)
        if key not in self._known:
            self._known[key] = self._tokenizer.token_text(token, is_first)
        return self._known[key]


def chat_logprobs(kept: Sequence[TokenLogprob], tokenizer: TextTokenizer) -> dict[str, Any]:
    """Log-probabilities of a whole choice of a chat."""
    return ChatLogprobs(tokenizer).add(kept)


def completion_logprobs(kept: Sequence[TokenLogprob], tokenizer: TextTokenizer) -> dict[str, Any]:
    """Log-probabilities of a whole choice of a completion."""
    return CompletionLogprobs(tokenizer).add(kept)


def echoed_logprobs(first: int, kept: Sequence[TokenLogprob], tokenizer: TextTokenizer) -> dict[str, Any]:
    """Log-probabilities of a completion with its prompt, whose first token has none."""
    found = completion_logprobs([TokenLogprob(first, 0.0, ()), *kept], tokenizer)
    return {
        **found,
        "token_logprobs": [None, *found["token_logprobs"][1:]],
        "top_logprobs": [None, *found["top_logprobs"][1:]],
    }
