"""A tokenizer in which some tokens are matched only through a mask: their plain text stays text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

LONG = 8192
"""Characters of a text from which on encoding releases the GIL."""
MAX_GAPS = 8192
"""Most ids that a vocabulary may leave out: the library takes time by the square of the tokens that are added."""
MARK = "\ufdd2"
"""Encloses masks: a Unicode noncharacter, which no text has."""


def ids_of(fast: Any, text: str) -> list[int]:
    """Encode a text with a tokenizer of `tokenizers`, without special tokens."""
    if len(text) < LONG:
        return list(fast.encode(text, add_special_tokens=False).ids)
    # tokenizers 0.21 releases the GIL in the batch call only
    (found,) = fast.encode_batch_fast([text], add_special_tokens=False)
    return list(found.ids)


def num_gaps(fast: Any) -> int:
    """Number of the ids below the highest one that a vocabulary, without its added tokens, leaves out."""
    ids = fast.get_vocab(with_added_tokens=False).values()
    return max(ids, default=-1) + 1 - len(ids)


class MaskedTokenizer:
    """A tokenizer of `tokenizers` without some of its added tokens. Everything else is encoded as with them."""

    def __init__(self, fast: Any, hidden: Collection[str], unknown: int | None = None):
        """
        Args:
            fast: the tokenizer; the new one shares its vocabulary.
            hidden: texts of the tokens that are matched only through their masks.
            unknown: id of the unknown token, which is never counted as a hidden one.
        """
        from tokenizers import AddedToken, Tokenizer

        self._fast = Tokenizer(fast.model)
        if fast.normalizer is not None:
            self._fast.normalizer = fast.normalizer
        if fast.pre_tokenizer is not None:
            self._fast.pre_tokenizer = fast.pre_tokenizer
        added = fast.get_added_tokens_decoder()
        # new tokens get the ids from the size of the vocabulary on: fill its gaps so that none gets an id in use
        fillers = [AddedToken(f"{MARK}gap{i}{MARK}", normalized=False) for i in range(num_gaps(fast))]
        self._ids: dict[int, int] = {}
        """Id of a token in the original tokenizer, by its id in the new one."""
        self._masks: dict[str, str] = {}
        tokens: dict[int, AddedToken] = {}
        for number, token in sorted(added.items()):
            if token.content in hidden:
                mask = self._masks[token.content] = f"{MARK}{number}{MARK}"
                token = AddedToken(mask, normalized=False, lstrip=token.lstrip, rstrip=token.rstrip)
            tokens[number] = token
        self._fast.add_tokens([*fillers, *tokens.values()])  # together: each call looks at all tokens before
        for number, token in tokens.items():
            self._ids[self._fast.token_to_id(token.content)] = number
        self._hidden_ids = {number for number, token in added.items() if token.content in hidden and number != unknown}
        self.normalizes = fast.normalizer is not None and any(
            token.normalized for token in added.values() if token.content in hidden
        )
        """True if the normalizer can turn another form of a text into a hidden token."""
        self._pattern = re.compile("|".join(_patterns(added, self._masks)) or "(?!)")

    def encode(self, text: str) -> list[int] | None:
        """Encode a text, in which `MARK` only marks positions where no token is matched.

        Returns:
            The ids; None where the vocabulary itself has a hidden token for a part of the text.
        """
        masked = "".join(self._masks.get(part, part.replace(MARK, "")) for part in self._split(text))
        found = ids_of(self._fast, masked)
        if self._hidden_ids.intersection(i for i in found if i not in self._ids):
            return None
        return [self._ids.get(i, i) for i in found]

    def _split(self, text: str) -> list[str]:
        """Split a text into its hidden tokens and the parts between them."""
        parts = []
        done = 0
        for match in self._pattern.finditer(text):
            parts += [text[done : match.start()], match[0]]
            done = match.end()
        return [*parts, text[done:]]


def _patterns(added: Mapping[int, Any], masks: Collection[str]) -> list[str]:
    """Return patterns that match the hidden tokens as the library does; longer tokens come first."""
    tokens = sorted((token for token in added.values() if token.content in masks), key=lambda t: -len(t.content))
    return [rf"(?<!\w){re.escape(t.content)}(?!\w)" if t.single_word else re.escape(t.content) for t in tokens]
