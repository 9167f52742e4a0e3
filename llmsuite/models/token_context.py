"""A number for each token of a pass, for layers that need more of a token than its hidden state: the key of its dropout
masks, or whether an intervention edits it. It is an int32 tensor [B, L], computed where the input ids are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from llmsuite.base.typing import Tensor

_keys: list[Tensor] = []


@contextlib.contextmanager
def tokens(keys: Tensor | None) -> Iterator[None]:
    """Context in which `current` returns these keys; None where no layer needs them."""
    if keys is None:
        yield
        return
    _keys.append(keys)
    try:
        yield
    finally:
        _keys.pop()


def current() -> Tensor | None:
    """The keys of the innermost `tokens`, [B, L]; None where there are none."""
    return _keys[-1] if _keys else None
