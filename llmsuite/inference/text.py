"""Decodes a stream of tokens to text: no half characters, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmsuite.data.tokenizer import TextTokenizer

_UNFINISHED = "\ufffd"
"""The character that incomplete bytes are decoded to."""
_FIRST_CODE, _LAST_CODE = "\ud800", "\udfff"
"""Stand for special tokens where stop texts are looked for: halves of pairs, which no text has."""


class TextStream:
    """The text of one answer."""

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = ()):
        """`stop`: texts that end the answer, also across several tokens, and also special tokens, which are no part of
        the text: the token ends it, and so does a text that reads like it."""
        self._tokenizer = tokenizer
        named = sorted({t for t in tokenizer.special_texts if any(t in text for text in stop)}, key=len, reverse=True)
        named = named[: ord(_LAST_CODE) - ord(_FIRST_CODE) + 1]
        codes = {token: chr(ord(_FIRST_CODE) + number) for number, token in enumerate(named)}
        self._codes = {tokenizer.token_id(token): code for token, code in codes.items()}
        coded = (_coded(text, codes) for text in stop)
        self._stop = tuple(dict.fromkeys((*stop, *coded)))
        self._ids: list[int] = []
        # text of the ids before `_read` is known; what follows is decoded with those from `_context` on, because
        # tokenizers write a token differently at the beginning of a text
        self._context = self._read = 0
        self._held = ""
        self.text = ""
        """Everything released so far."""
        self.stopped = False
        """Whether a stop text has been found."""

    def push(self, token: int) -> str:
        """Add one token; returns the text that became certain."""
        if token in self._codes:
            return self._push_special(token)
        self._ids.append(token)
        known = self._tokenizer.decode(self._ids[self._context : self._read])
        whole = self._tokenizer.decode(self._ids[self._context :])
        if whole.endswith(_UNFINISHED) or len(whole) <= len(known):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return self._take(whole[len(known) :])

    def finish(self) -> str:
        """End the stream; returns the text that was held back."""
        if self.stopped:
            return ""
        released = self._take(self._rest())
        if not self.stopped:
            held = _visible(self._held)
            released += held
            self.text += held
        self._held = ""
        return released

    def _push_special(self, token: int) -> str:
        """Add a token that a stop text has: what was not certain before it is now."""
        released = self._take(self._rest())
        self._ids.append(token)
        return released if self.stopped else released + self._take(self._codes[token])

    def _rest(self) -> str:
        """The text that was not certain, with which all is read."""
        known = self._tokenizer.decode(self._ids[self._context : self._read])
        rest = self._tokenizer.decode(self._ids[self._context :])[len(known) :]
        if rest:
            self._context, self._read = self._read, len(self._ids)
        return rest

    def _take(self, more: str) -> str:
        self._held += more
        ends = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.stopped = True
            free, self._held = self._held[: min(ends)], ""
        else:
            keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
            at = len(self._held) - keep
            free, self._held = self._held[:at], self._held[at:]
        free = _visible(free)
        self.text += free
        return free


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop text."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _coded(text: str, codes: Mapping[str, str]) -> str:
    """A stop text with the codes of its special tokens; of two that begin alike the longer one comes first."""
    for token, code in codes.items():
        text = text.replace(token, code)
    return text


def _visible(text: str) -> str:
    """A text without the codes of special tokens."""
    return "".join(char for char in text if not _FIRST_CODE <= char <= _LAST_CODE)
