"""A number for each token of a pass, for layers that need to know more of a token than its hidden state: the key of its
dropout masks, or whether an intervention edits it. It is an int32 tensor [B, L], made where the ids are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from llmsuite.typing import Tensor

_keys: list[Tensor] = []


@contextlib.contextmanager
def tokens(keys: Tensor | None) -> Iterator[None]:
    """While active, layers compute with the tokens that have these keys; None where no layer asks for them."""
    if keys is None:
        yield
        return
    _keys.append(keys)
    try:
        yield
    finally:
        _keys.pop()


def current() -> Tensor | None:
    """The keys of `tokens`."""
    return _keys[-1] if _keys else None
