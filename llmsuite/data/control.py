"""Control tokens in text that users write: `<|im_end|>` in a question is text, and ends no turn."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.errors import UserError

_CUT = "\ufdd2"
"""Marks where a text is cut into parts that are encoded by themselves: a character that Unicode keeps from all text."""


def warning(found: Sequence[tuple[str, str]], count: int) -> str | None:
    """Names the first row whose turns would end early, or begin others, by what they say.

    Args:
        found: place and token of rows that have one, the first one first.
        count: number of such rows.
    """
    if not found:
        return None
    place, token = found[0]
    more = f", and so have {count - 1} more rows" if count > 1 else ""
    return (
        f"warning: {place}: what a turn says has the control token {token}{more}; it is trained as that token "
        "and not as text. If it comes from users, take it out of the data"
    )


class ControlTokens:
    """The control tokens of a tokenizer: those of its added tokens that it calls special."""

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer

    @property
    def tokens(self) -> frozenset[str]:
        """The texts of the tokens."""
        return self._tokenizer.control_tokens

    @functools.cached_property
    def _words(self) -> str:
        # the longest first: of two that begin alike the whole one is named
        words = sorted(self._tokenizer.control_tokens, key=len, reverse=True)
        return "|".join(map(re.escape, words)) or r"(?!)"

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(self._words)

    def find(self, texts: Iterable[str]) -> str | None:
        """The first control token in some texts; None without any."""
        return next((found[0] for text in texts if (found := self._pattern.search(text))), None)

    def mark(self, text: str) -> str:
        """A text that `encode` makes no control token of, also in the middle of another text.

        Raises:
            UserError: it has one of a single character, which cannot be taken apart.
        """
        text = text.replace(_CUT, "")
        if self.find([text]) is None:
            return text
        # each occurrence, also one that begins within another, loses its first character to the part before it
        begins = [found.start() for found in re.finditer(f"(?={self._words})", text)]
        for begin in begins:
            if text[begin] in self._tokenizer.control_tokens:
                raise UserError(f"the text has the control token {text[begin]!r}, which cannot be written as text")
        parts = [text[a:b] for a, b in zip([0, *(i + 1 for i in begins)], [*(i + 1 for i in begins), len(text)])]
        return _CUT.join(parts)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; control tokens of parts that were marked are text."""
        if _CUT not in text:
            return self._tokenizer.encode(text)
        return [token for part in text.split(_CUT) if part for token in self._tokenizer.encode(part)]
