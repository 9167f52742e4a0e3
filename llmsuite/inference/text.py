"""Decodes a stream of tokens to text: no half characters, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from llmsuite.data.tokenizer import TextTokenizer

_UNFINISHED = "\ufffd"
"""The character that incomplete bytes are decoded to."""


class TextStream:
    """The text of one answer."""

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = ()):
        """`stop`: texts that end the answer, also across several tokens."""
        self._tokenizer, self._stop = tokenizer, stop
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
        known = self._tokenizer.decode(self._ids[self._context : self._read])
        rest = self._tokenizer.decode(self._ids[self._context :])[len(known) :]
        self._context = self._read = len(self._ids)
        released = self._take(rest)
        if not self.stopped:
            released += self._held
            self.text += self._held
        self._held = ""
        return released

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
        self.text += free
        return free


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop text."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
