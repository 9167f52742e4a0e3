"""Escapes control tokens in text that users write: `<|im_end|>` in a question is text and does not end a turn."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Sequence

from llmsuite.base.errors import UserError
from llmsuite.data.chat_template import ChatTemplate, load_template, tokenizer_template
from llmsuite.data.masked_tokenizer import MARK, MaskedTokenizer
from llmsuite.data.rows import Message
from llmsuite.data.special_tokens import looks_special
from llmsuite.data.tokenizer import TextTokenizer

_CUT = MARK
"""Marks a position at which no control token is matched."""
_PROBES = (
    (Message("system", "a"), Message("user", "b"), Message("assistant", "c"), Message("user", "d")),
    (Message("user", "b"), Message("assistant", "c"), Message("user", "d")),
    (Message("user", "b"),),
)
"""Plain conversations; the first that a template accepts shows the tokens that it writes around turns."""


def warning(found: Sequence[tuple[str, str]], count: int) -> str | None:
    """Return a warning about rows whose text has control tokens; None without any.

    Such a token would end a turn early or begin another one.

    Args:
        found: place and token of the rows that have one, in their order.
        count: number of such rows.
    """
    if not found:
        return None
    place, token = found[0]
    more = ""
    if count > 1:
        more = f", and so have {count - 1} more rows"
    return (
        f"warning: {place}: the text of a turn has the control token {token}{more}; it is trained as that token "
        "and not as text. If it comes from users, take it out of the data"
    )


def doubled_bos(tokenizer: TextTokenizer, template: ChatTemplate) -> str | None:
    """Return a warning about a chat template whose text begins with two BOS tokens; None for another template.

    The tokens that the tokenizer adds to plain text are never added to a rendered conversation, so a template writes
    both: as `bos_token` and once more as text.
    """
    bos = tokenizer.special_tokens.get("bos_token")
    text = _rendered(template, add_generation_prompt=True)
    if not bos or not text:
        return None
    number = tokenizer.token_id(bos)
    if tokenizer.encode(text)[:2] != [number, number]:
        return None
    return (
        f"warning: the chat template of {template.name} begins a conversation with two tokens {bos}; a model is "
        "trained with one: remove {{ bos_token }} or the token that is written as text from the template"
    )


class ControlTokens:
    """Control tokens of a tokenizer.

    They are the tokens that any file of its directory flags as special or names, and the added ones that a chat
    template writes, flagged or not. Some of these, such as `<think>` or `<tool_call>`, a template writes within an
    answer. Where they are not flagged as special, a turn of the assistant may have them, as the model writes them.
    """

    def __init__(self, tokenizer: TextTokenizer, template: Callable[[], ChatTemplate] | None = None):
        """
        Args:
            tokenizer: whose tokens are meant.
            template: returns the chat template in use; that of the tokenizer's directory is added in any case.
        """
        self._tokenizer = tokenizer
        self._template = template

    @functools.cached_property
    def tokens(self) -> frozenset[str]:
        """Texts of all control tokens."""
        return self.turn_tokens | self._written[0]

    @functools.cached_property
    def turn_tokens(self) -> frozenset[str]:
        """Texts of the control tokens that no turn may have, not even one of the assistant."""
        return self._tokenizer.control_tokens | self._written[1]

    @functools.cached_property
    def _written(self) -> tuple[frozenset[str], frozenset[str]]:
        """Added tokens that the templates write, and the subset of them that is around turns."""
        others = self._tokenizer.added_tokens - self._tokenizer.control_tokens
        candidates = {token for token in others if looks_special(token)}
        if not candidates:
            return frozenset(), frozenset()
        sources = list[str]()
        around = ""
        everything = ""
        for template in self._templates():
            sources.append(template.source)
            around += _rendered(template, add_generation_prompt=False)
            everything += _rendered(template, add_generation_prompt=True)
        text = "\0".join([everything, *sources])
        written = frozenset(token for token in candidates if token in text)
        return written, frozenset(token for token in written if token in around)

    def _templates(self) -> list[ChatTemplate]:
        """Templates to look at: the one in use, and that of the directory.

        A broken one is left out here: it is an error where it is used.
        """
        found = list[ChatTemplate]()
        with contextlib.suppress(UserError):
            if self._template is not None:
                found.append(self._template())
        with contextlib.suppress(UserError):
            own = tokenizer_template(self._tokenizer.directory)
            if own is not None and all(template.source != own for template in found):
                found.append(load_template("tokenizer", self._tokenizer.directory, self._tokenizer.special_tokens))
        return found

    @functools.cached_property
    def _masked(self) -> MaskedTokenizer | None:
        return self._tokenizer.masked(self.tokens)

    def forbidden_for(self, role: str) -> frozenset[str]:
        """Return the tokens that a turn of a role may not have."""
        return self.turn_tokens if role == "assistant" else self.tokens

    def find(self, texts: Iterable[str]) -> str | None:
        """Return the first control token in some texts; None without any."""
        return self.find_in_turns(("user", text) for text in texts)

    def find_in_turns(self, turns: Iterable[tuple[str, str]]) -> str | None:
        """Return the first forbidden control token in some turns, each a role and a text; None without any."""
        found = (_pattern(self.forbidden_for(role)).search(text) for role, text in turns)
        return next((match[0] for match in found if match), None)

    def escape(self, text: str, role: str = "user") -> str:
        """Mark a text so that `encode` makes no control token of it, also in the middle of another text.

        Args:
            text: content that somebody wrote.
            role: the role of its turn.

        Raises:
            UserError: it has a control token that cannot be encoded as text.
        """
        text = text.replace(_CUT, "")
        tokens = self.forbidden_for(role)
        # each occurrence, also one that begins within another, loses its first character to the part before it
        begins = [found.start() for found in re.finditer(f"(?={_alternatives(tokens)})", text)]
        if not begins:
            return self._escape_normalized(text, tokens)
        for begin in begins:
            if text[begin] in tokens and self._masked is None:
                raise UserError(f"the text has the control token {text[begin]!r}, which cannot be written as text")
        cuts = [begin + 1 for begin in begins]
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        return _CUT.join(parts)

    def _escape_normalized(self, text: str, tokens: frozenset[str]) -> str:
        """Escape a text that the normalizer may turn into a token: another form of Unicode, or lower case."""
        if self._masked is None or not self._masked.normalizes:
            return text
        ids = {self._tokenizer.token_id(token) for token in tokens}
        if not text.strip() or ids.isdisjoint(self._tokenizer.encode(text)):
            return text
        at = len(text) - len(text.lstrip()) + 1  # templates may strip white space
        return text[:at] + _CUT + text[at:]

    def escape_turn(self, text: str, role: str) -> str:
        """Escape the full text of a turn: it cannot form a control token with the text around it either."""
        text = self.escape(text, role)
        tokens = self.forbidden_for(role)
        head = any(text.startswith(token[i:]) for token in tokens for i in range(1, len(token)))
        tails = {i for token in tokens for i in range(1, len(token)) if text.endswith(token[:i])}
        for at in sorted(len(text) - i + 1 for i in tails)[::-1]:  # after the first character of a possible token
            text = text[:at] + _CUT + text[at:]
        return _CUT + text if head else text

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; escaped control tokens are encoded as text.

        Raises:
            UserError: the vocabulary has a control token for a part that cannot be split.
        """
        if _CUT not in text:
            return self._tokenizer.encode(text)
        if self._masked is None:
            return [token for part in text.split(_CUT) if part for token in self._tokenizer.encode(part)]
        ids = self._masked.encode(text)
        if ids is not None:
            return ids
        parts = [self._masked.encode(part) for part in text.split(_CUT) if part]
        if any(part is None for part in parts):
            raise UserError("the text has a control token, which this tokenizer cannot write as text")
        return [token for part in parts for token in part or ()]


@functools.cache
def _alternatives(tokens: frozenset[str]) -> str:
    # the longest first: of two tokens with the same beginning the longer one is matched
    return "|".join(map(re.escape, sorted(tokens, key=lambda token: (-len(token), token)))) or r"(?!)"


@functools.cache
def _pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    return re.compile(_alternatives(tokens))


def _rendered(template: ChatTemplate, add_generation_prompt: bool) -> str:
    """Render a plain conversation; empty where the template accepts none."""
    for messages in _PROBES:
        with contextlib.suppress(UserError):
            return template.render(messages, add_generation_prompt)
    return ""
