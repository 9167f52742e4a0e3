"""Control tokens in text that users write: `<|im_end|>` in a question is text, and ends no turn."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Sequence

from llmsuite.data.chat_template import ChatTemplate, load_template, tokenizer_template
from llmsuite.data.masked import MARK, Masked
from llmsuite.data.rows import Message
from llmsuite.data.special_tokens import is_mark
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.errors import UserError

_CUT = MARK
"""Stands where no control token is to be looked for."""
_TALK = (
    (Message("system", "a"), Message("user", "b"), Message("assistant", "c"), Message("user", "d")),
    (Message("user", "b"), Message("assistant", "c"), Message("user", "d")),
    (Message("user", "b"),),
)
"""Plain conversations; the first that a template takes shows what it writes around turns."""


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
    """The control tokens of a tokenizer: those that any file of its directory flags special or names, and the added
    ones that a chat template writes by itself, flagged or not.

    Of these, a template may write some within an answer, such as `<think>` or `<tool_call>`. Where they are not flagged
    special, a turn of the assistant may say them, as the model does.
    """

    def __init__(self, tokenizer: TextTokenizer, template: Callable[[], ChatTemplate] | None = None):
        """`template` gives the chat template that is used; that of the tokenizer's directory counts in any case."""
        self._tokenizer, self._template = tokenizer, template

    @functools.cached_property
    def tokens(self) -> frozenset[str]:
        """The texts of all."""
        return self.of_turns | self._written[0]

    @functools.cached_property
    def of_turns(self) -> frozenset[str]:
        """Those that no turn may say, the assistant's neither."""
        return self._tokenizer.control_tokens | self._written[1]

    @functools.cached_property
    def _written(self) -> tuple[frozenset[str], frozenset[str]]:
        """The added tokens that the templates write, and those of them that are around turns."""
        others = self._tokenizer.added_tokens - self._tokenizer.control_tokens
        marks = {token for token in others if is_mark(token)}
        sources, around, everything = list[str](), "", ""
        for template in self._templates() if marks else ():
            sources.append(template.source)
            around += _rendered(template, add_generation_prompt=False)
            everything += _rendered(template, add_generation_prompt=True)
        written = {token for token in marks if token in everything or any(token in source for source in sources)}
        return frozenset(written), frozenset(token for token in written if token in around)

    def _templates(self) -> list[ChatTemplate]:
        """The one that is used, and that of the directory. One that is none is told where it is used."""
        found = list[ChatTemplate]()
        with contextlib.suppress(UserError):
            found += [self._template()] if self._template is not None else []
        with contextlib.suppress(UserError):
            own = tokenizer_template(self._tokenizer.directory)
            if own is not None and all(template.source != own for template in found):
                found.append(load_template("tokenizer", self._tokenizer.directory, self._tokenizer.special_tokens))
        return found

    @functools.cached_property
    def _masked(self) -> Masked | None:
        return self._tokenizer.masked(self.tokens)

    def of(self, role: str) -> frozenset[str]:
        """The tokens that a turn of a role may not say."""
        return self.of_turns if role == "assistant" else self.tokens

    def find(self, texts: Iterable[str]) -> str | None:
        """The first control token in some texts; None without any."""
        return self.find_said(("user", text) for text in texts)

    def find_said(self, turns: Iterable[tuple[str, str]]) -> str | None:
        """The first control token that some turns, each a role and a text, may not say; None without any."""
        found = (_pattern(self.of(role)).search(text) for role, text in turns)
        return next((match[0] for match in found if match), None)

    def mark(self, text: str, role: str = "user") -> str:
        """A text that `encode` makes no control token of, also in the middle of another text.

        Args:
            text: what somebody says.
            role: whose turn it is.

        Raises:
            UserError: it has one that cannot be written as text.
        """
        text, tokens = text.replace(_CUT, ""), self.of(role)
        # each occurrence, also one that begins within another, loses its first character to the part before it
        begins = [found.start() for found in re.finditer(f"(?={_words(tokens)})", text)]
        if not begins:
            return self._mark_normalized(text, tokens)
        for begin in begins:
            if text[begin] in tokens and self._masked is None:
                raise UserError(f"the text has the control token {text[begin]!r}, which cannot be written as text")
        parts = [text[a:b] for a, b in zip([0, *(i + 1 for i in begins)], [*(i + 1 for i in begins), len(text)])]
        return _CUT.join(parts)

    def _mark_normalized(self, text: str, tokens: frozenset[str]) -> str:
        """A text without the token itself, which may become it: by another form of Unicode, or in small letters."""
        if self._masked is None or not self._masked.normalizes:
            return text
        ids = {self._tokenizer.token_id(token) for token in tokens}
        if not text.strip() or ids.isdisjoint(self._tokenizer.encode(text)):
            return text
        at = len(text) - len(text.lstrip()) + 1  # templates may take space from the ends
        return text[:at] + _CUT + text[at:]

    def mark_turn(self, text: str, role: str) -> str:
        """As `mark`, for the text of a whole turn: neither does it become one together with the text beside it."""
        text, words = self.mark(text, role), self.of(role)
        head = any(text.startswith(word[i:]) for word in words for i in range(1, len(word)))
        tails = {i for word in words for i in range(1, len(word)) if text.endswith(word[:i])}
        for at in sorted(len(text) - i + 1 for i in tails)[::-1]:  # behind the first character of what may become one
            text = text[:at] + _CUT + text[at:]
        return _CUT + text if head else text

    def encode(self, text: str) -> list[int]:
        """Ids of a text; control tokens of parts that were marked are text.

        Raises:
            UserError: the vocabulary has a control token for a part that cannot be taken apart.
        """
        if _CUT not in text:
            return self._tokenizer.encode(text)
        if self._masked is None:
            return [token for part in text.split(_CUT) if part for token in self._tokenizer.encode(part)]
        found = self._masked.encode(text)
        if found is not None:
            return found
        parts = [self._masked.encode(part) for part in text.split(_CUT) if part]
        if any(part is None for part in parts):
            raise UserError("the text has a control token, which this tokenizer cannot write as text")
        return [token for part in parts for token in part or ()]


@functools.cache
def _words(tokens: frozenset[str]) -> str:
    # the longest first: of two that begin alike the whole one is named
    return "|".join(map(re.escape, sorted(tokens, key=lambda token: (-len(token), token)))) or r"(?!)"


@functools.cache
def _pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    return re.compile(_words(tokens))


def _rendered(template: ChatTemplate, add_generation_prompt: bool) -> str:
    """A plain conversation; empty where the template takes none."""
    for talk in _TALK:
        with contextlib.suppress(UserError):
            return template.render(talk, add_generation_prompt)
    return ""
