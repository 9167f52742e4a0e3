"""Suggestions for names that do not exist: the known name that is most similar."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CUTOFF = 0.6
"""Least similarity of a name that is suggested, from 0 to 1, as in `difflib.get_close_matches`."""


def nearest(name: str, known: Iterable[str], cutoff: float = CUTOFF) -> str | None:
    """The known name that is most similar; None where none is similar enough."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def suggestion(name: str, known: Iterable[str]) -> str:
    """A sentence for the middle of a message, such as "did you mean 'sft'? "; empty without a similar name."""
    found = nearest(name, known)
    if found is None:
        return ""
    return f"did you mean {found!r}? "


def final_suggestion(name: str, known: Iterable[str], cutoff: float = CUTOFF, quotes: bool = True) -> str:
    """An end for a message, such as "; did you mean 'sft'?"; empty without a similar name.

    Args:
        name: the name that does not exist.
        known: the names that do.
        cutoff: least similarity.
        quotes: True for quotes around the name; an option of a command is shown as it is typed.
    """
    found = nearest(name, known, cutoff)
    if found is None:
        return ""
    return f"; did you mean {found!r}?" if quotes else f"; did you mean {found}?"
