"""Streaming detokenization: no incomplete characters, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmsuite.data.tokenizer import TextTokenizer

_UNFINISHED = "\ufffd"
"""The replacement character, to which incomplete bytes are decoded."""
_FIRST_CODE = "\ud800"
_LAST_CODE = "\udfff"
"""Placeholders of special tokens in the search for stop texts: halves of surrogate pairs, which no text has."""


class TextStream:
    """The text of one answer."""

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = (), shown: Sequence[str] = ()):
        """
        Args:
            tokenizer: of the model.
            stop: texts that end the answer, also across several tokens. They may have special tokens, which are not
                part of the text: the token ends the answer, and so does a text that looks like it.
            shown: special tokens that are part of the text, unless `stop` has them.
        """
        self._tokenizer = tokenizer
        used: set[str] = set()
        for text in stop:
            used.update(token for token in tokenizer.special_texts if token in text)
        named = sorted(used, key=len, reverse=True)[: ord(_LAST_CODE) - ord(_FIRST_CODE) + 1]
        codes = {token: chr(ord(_FIRST_CODE) + number) for number, token in enumerate(named)}
        kept = {token: token for token in shown if token in tokenizer.special_texts}
        self._codes = {tokenizer.token_id(token): code for token, code in {**kept, **codes}.items()}
        """Text of each special token that is not left out: its own, or its placeholder."""
        coded = (_coded(text, codes) for text in stop)
        self._stop = tuple(dict.fromkeys((*stop, *coded)))
        self._ids: list[int] = []
        # the text of the ids before `_read` is certain; later ids are decoded together with those from `_context` on,
        # because tokenizers decode a token differently at the beginning of a text
        self._context = self._read = 0
        self._held = ""
        self.text = ""
        """Everything released so far."""
        self.stopped = False
        """True once a stop text has been found."""

    def push(self, token: int) -> str:
        """Add one token; returns the text that became certain."""
        if token in self._codes:
            return self._push_special(token)
        self._ids.append(token)
        known = self._tokenizer.decode(self._ids[self._context : self._read])
        text = self._tokenizer.decode(self._ids[self._context :])
        if text.endswith(_UNFINISHED) or len(text) <= len(known):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return self._release(text[len(known) :])

    def finish(self) -> str:
        """End the stream; returns the text that was held back."""
        if self.stopped:
            return ""
        released = self._release(self._rest())
        if not self.stopped:
            held = _visible(self._held)
            released += held
            self.text += held
        self._held = ""
        return released

    def _push_special(self, token: int) -> str:
        """Add a token that is shown or occurs in a stop text; it makes all text before it certain."""
        released = self._release(self._rest())
        self._ids.append(token)
        return released if self.stopped else released + self._release(self._codes[token])

    def _rest(self) -> str:
        """The text that was not certain yet; afterwards all ids are read."""
        known = self._tokenizer.decode(self._ids[self._context : self._read])
        rest = self._tokenizer.decode(self._ids[self._context :])[len(known) :]
        if rest:
            self._context, self._read = self._read, len(self._ids)
        return rest

    def _release(self, more: str) -> str:
        """Add certain text, and release all but what may be the beginning of a stop text."""
        self._held += more
        found = [self._held.find(stop) for stop in self._stop]
        ends = [at for at in found if at >= 0]
        if ends:
            self.stopped = True
            free = self._held[: min(ends)]
            self._held = ""
        else:
            keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
            at = len(self._held) - keep
            free = self._held[:at]
            self._held = self._held[at:]
        free = _visible(free)
        self.text += free
        return free


def _overlap(text: str, stop: str) -> int:
    """Number of characters at the end of a text that may be the beginning of a stop text."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _coded(text: str, codes: Mapping[str, str]) -> str:
    """A stop text with codes instead of its special tokens; the longest tokens are replaced first."""
    for token, code in codes.items():
        text = text.replace(token, code)
    return text


def _visible(text: str) -> str:
    """A text without the codes of special tokens."""
    return "".join(char for char in text if not _FIRST_CODE <= char <= _LAST_CODE)
