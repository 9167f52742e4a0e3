"""Checks files of a tied model that have its one matrix as embedding and as head: both have to be equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.tensors import TensorSource, TensorSpec

_ROWS = 4096
"""Rows that are compared together: bounds the memory."""


def check_tied(path: Path, files: TensorSource, embedding: str, head: str, index: Sequence[slice] | None) -> None:
    """Compare the embedding of a tied model [V, D], or a slice of it, with the head that is stored as well.

    Args:
        path: the directory of the model, for messages.
        files: its tensors.
        embedding: name of the embedding there.
        head: name of the head, [V, D] or [D, V].
        index: a slice for each dim; None for all.

    Raises:
        UserError: they differ.
    """
    ours = files.spec(embedding)
    theirs = files.spec(head)
    first, *rest = index or [slice(0, size) for size in ours.shape]
    start, stop, _ = first.indices(ours.shape[0])
    bands = ([slice(low, min(low + _ROWS, stop)), *rest] for low in range(start, stop, _ROWS))
    is_transposed = theirs.shape != ours.shape
    fits = theirs.shape == (ours.shape[::-1] if is_transposed else ours.shape)
    if not fits or not all(_is_equal(files, ours, theirs, band, is_transposed) for band in bands):
        raise UserError(
            f"{path}: its config.json says tie_word_embeddings, one matrix for the embedding and the head, and "
            f"{head!r} {list(theirs.shape)} differs from {embedding!r} {list(ours.shape)}. Set tie_word_embeddings to "
            "false there to have both, or remove the one that is not meant"
        )


def _is_equal(
    files: TensorSource, embedding: TensorSpec, head: TensorSpec, index: Sequence[slice], is_transposed: bool
) -> bool:
    """Return True if a slice of the embedding equals that of the head."""
    rows = files.read(embedding.name, index)
    others = files.read(head.name, index[::-1]).T if is_transposed else files.read(head.name, index)
    # one of them may have been saved in fewer bits: compare both in the narrower dtype
    narrow = min(rows.dtype, others.dtype, key=lambda dtype: dtype.itemsize)
    ours, theirs = (value.astype(narrow).astype("float32") for value in (rows, others))
    return np.array_equal(ours, theirs, equal_nan=True)
