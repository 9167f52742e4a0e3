"""Names of tokens that do not depend on how a batch is cut: a token is called by all that it sees.

The activations at a token depend on the token and on those it attends to. So they can be compared between a run that
pads rows and one that packs them, between few micro-batches and many, and between orders of rows. Where the same
tokens occur twice, as a prompt with two answers does unless they share it, activations are equal and their gradients
add up.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_BEGIN = 0x243F6A8885A308D3
PADDING = 0
"""The context of padding."""


def contexts(ids: np.ndarray, starts: np.ndarray | None = None, lengths: np.ndarray | None = None) -> np.ndarray:
    """[B, L], uint64: a hash of each token and of what it sees before itself, `PADDING` where it is known to be that.

    Args:
        ids: [B, L].
        starts: [B, L], `document_starts` as in `llmsuite.devices.ops.document_spans`; None for one document a row.
        lengths: [B], tokens of each row without padding; None when that is not known.
    """
    found = np.full(ids.shape, PADDING, "uint64")
    for row in range(len(ids)):
        length = ids.shape[1] if lengths is None else int(lengths[row])
        begins = None if starts is None else starts[row].tolist()
        found[row, :length] = _of_row(ids[row, :length].tolist(), begins)
    return found


def _of_row(ids: list[int], starts: list[int] | None) -> list[int]:
    found: list[int] = []
    state, document = _BEGIN, 0
    for at, token in enumerate(ids):
        if starts is not None and starts[at] < 0:  # padding that is marked
            found.append(PADDING)
            continue
        if starts is not None and at > 0 and starts[at] != starts[at - 1]:  # a new part
            if starts[at] == at:
                state, document = _BEGIN, at
            else:  # which continues the first tokens of the document before it
                state = found[document + at - starts[at] - 1]
        state = ((state ^ (token + 1)) * _FACTOR) & _MASK
        state = state ^ (state >> 29) or 1
        found.append(state)
    return found


def chosen(names: np.ndarray, every: int) -> np.ndarray:
    """Places, in the flattened array, of about one in `every` tokens: the same tokens however a batch is cut."""
    flat = names.reshape(-1)
    return np.nonzero((flat != PADDING) & ((flat >> np.uint64(11)) % np.uint64(every) == 0))[0]
