"""Texts in which some tokens are not looked for: what reads like one is text, a mask stands for the token."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

LONG = 8192
"""Characters of a text during whose encoding other threads go on."""
MARK = "\ufdd2"
"""Encloses masks: a character that Unicode keeps from all text."""


def ids_of(fast: Any, text: str) -> list[int]:
    """Ids of a text by a tokenizer of `tokenizers`, without special tokens. A long one is encoded by the call for
    several texts: only that lets Python's other threads go on (0.21)."""
    if len(text) < LONG:
        return list(fast.encode(text, add_special_tokens=False).ids)
    (found,) = fast.encode_batch_fast([text], add_special_tokens=False)
    return list(found.ids)


class Masked:
    """A tokenizer of `tokenizers` without some of its added tokens. Everything else is encoded as with them."""

    def __init__(self, fast: Any, hidden: Collection[str], unknown: int | None = None):
        """
        Args:
            fast: the tokenizer; the new one shares its vocabulary.
            hidden: texts of the tokens that only masks stand for.
            unknown: the id that the vocabulary gives what it does not know; it is none of a hidden token's.
        """
        from tokenizers import AddedToken, Tokenizer

        self._fast = Tokenizer(fast.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(fast, part)) is not None:
                setattr(self._fast, part, value)
        ids, added = fast.get_vocab(with_added_tokens=False).values(), fast.get_added_tokens_decoder()
        num_gaps = max(ids, default=-1) + 1 - len(ids)  # new tokens get the ids behind, and not one that is taken
        self._fast.add_tokens([AddedToken(f"{MARK}gap{i}{MARK}", normalized=False) for i in range(num_gaps)])
        self._ids: dict[int, int] = {}
        """The id of a token by that which it has here."""
        self._masks: dict[str, str] = {}
        for number, token in sorted(added.items()):
            mask = token.content
            if token.content in hidden:
                mask = self._masks[token.content] = f"{MARK}{number}{MARK}"
                flags = {flag: getattr(token, flag) for flag in ("lstrip", "rstrip")}
                token = AddedToken(mask, normalized=False, **flags)
            self._fast.add_tokens([token])
            self._ids[self._fast.token_to_id(mask)] = number
        self._hidden_ids = {number for number, token in added.items() if token.content in hidden and number != unknown}
        self.normalizes = fast.normalizer is not None and any(
            token.normalized for token in added.values() if token.content in hidden
        )
        """Whether a hidden token is also found in another form than its own."""
        self._pattern = re.compile("|".join(_words(added, self._masks)) or "(?!)")

    def encode(self, text: str) -> list[int] | None:
        """Ids of a text, in which `MARK` is nothing but a place where no token is looked for.

        Returns:
            None where the vocabulary itself has a hidden token for a part of the text.
        """
        masked = "".join(self._masks.get(part, part.replace(MARK, "")) for part in self._split(text))
        found = ids_of(self._fast, masked)
        if self._hidden_ids.intersection(i for i in found if i not in self._ids):
            return None
        return [self._ids.get(i, i) for i in found]

    def _split(self, text: str) -> list[str]:
        """A text as its hidden tokens and what is between them."""
        parts, done = [], 0
        for match in self._pattern.finditer(text):
            parts += [text[done : match.start()], match[0]]
            done = match.end()
        return [*parts, text[done:]]


def _words(added: Mapping[int, Any], masks: Collection[str]) -> list[str]:
    """Patterns of the hidden tokens, as the library finds them; of two that begin alike the longer one is first."""
    tokens = sorted((token for token in added.values() if token.content in masks), key=lambda t: -len(t.content))
    return [rf"(?<!\w){re.escape(t.content)}(?!\w)" if t.single_word else re.escape(t.content) for t in tokens]
