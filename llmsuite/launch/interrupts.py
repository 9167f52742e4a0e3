"""Marks a process that belongs to llmsuite, and so may be ended at any moment, as a second Ctrl-C requests."""

from __future__ import annotations

_owned = False


def own_process() -> None:
    """Mark this process as a command of llmsuite's, or a rank; a notebook, or a program that calls it, is not one."""
    global _owned
    _owned = True


def is_owned() -> bool:
    """True where `own_process` was called, in this process or in the one that it is a fork of."""
    return _owned
