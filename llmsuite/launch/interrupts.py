"""Whether this process belongs to llmsuite, so that it may be ended at any moment, as a second Ctrl-C asks for."""

from __future__ import annotations

_owned = False


def own_process() -> None:
    """Say that this process is a command of llmsuite's, or a rank; a notebook, or a program that calls it, is not."""
    global _owned
    _owned = True


def is_owned() -> bool:
    """Whether that was said, in this process or in the one that it is a fork of."""
    return _owned
