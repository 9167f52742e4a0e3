"""Hashes that identify tokens independently of the layout of a batch: of a token and all tokens that it attends to.

The activations at a token depend only on these. So they can be compared between a run that pads rows and one that packs
them, between few micro-batches and many, and between orders of rows. Where the same tokens occur twice, as a prompt
with two answers does unless the answers share it, activations are equal and their gradients add up.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_BEGIN = 0x243F6A8885A308D3
PADDING = 0
"""The context of padding."""


def contexts(ids: np.ndarray, starts: np.ndarray | None = None, lengths: np.ndarray | None = None) -> np.ndarray:
    """Return [B, L], uint64: a hash of each token and the tokens before it, `PADDING` where padding is known.

    Args:
        ids: [B, L].
        starts: [B, L], `document_starts` as in `llmsuite.devices.masks.document_spans`; None for one document per row.
        lengths: [B], tokens of each row without padding; None where that is unknown.
    """
    found = np.full(ids.shape, PADDING, "uint64")
    for row in range(len(ids)):
        length = ids.shape[1] if lengths is None else int(lengths[row])
        begins = None
        if starts is not None:
            begins = starts[row].tolist()
        found[row, :length] = _of_row(ids[row, :length].tolist(), begins)
    return found


def _of_row(ids: list[int], starts: list[int] | None) -> list[int]:
    found: list[int] = []
    state = _BEGIN
    document = 0
    for at, token in enumerate(ids):
        if starts is not None and starts[at] < 0:  # marked as padding
            found.append(PADDING)
            continue
        if starts is not None and at > 0 and starts[at] != starts[at - 1]:  # a new part
            if starts[at] == at:
                state = _BEGIN
                document = at
            else:  # it continues the first tokens of the previous document (a shared prompt)
                state = found[document + at - starts[at] - 1]
        state = ((state ^ (token + 1)) * _FACTOR) & _MASK
        state = state ^ (state >> 29) or 1
        found.append(state)
    return found


def select_tokens(names: np.ndarray, every: int) -> np.ndarray:
    """Positions, in the flattened array, of about one in `every` tokens: the same tokens in any layout of the batch."""
    flat = names.reshape(-1)
    return np.nonzero((flat != PADDING) & ((flat >> np.uint64(11)) % np.uint64(every) == 0))[0]
