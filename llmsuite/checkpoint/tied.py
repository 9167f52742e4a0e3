"""Files of a tied model that have its one matrix twice, as embedding and as head: both have to be the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmsuite.checkpoint.tensors import TensorSource, TensorSpec
from llmsuite.errors import UserError

_ROWS = 4096
"""Rows that are compared at once."""


def check_tied(path: Path, files: TensorSource, embedding: str, head: str, index: Sequence[slice] | None) -> None:
    """Compare the embedding of a tied model [V, D], or a slice of it, with the head that is stored beside it.

    Args:
        path: the directory of the model, for messages.
        files: its tensors.
        embedding: name of the embedding there.
        head: name of the head, [V, D] or [D, V].
        index: a slice for each dim; None for all.

    Raises:
        UserError: they differ.
    """
    ours, theirs = files.spec(embedding), files.spec(head)
    first, *rest = index or [slice(0, size) for size in ours.shape]
    start, stop, _ = first.indices(ours.shape[0])
    places = ([slice(low, min(low + _ROWS, stop)), *rest] for low in range(start, stop, _ROWS))
    is_turned = theirs.shape != ours.shape
    fits = theirs.shape == (ours.shape[::-1] if is_turned else ours.shape)
    if not fits or not all(_is_equal(files, ours, theirs, place, is_turned) for place in places):
        raise UserError(
            f"{path}: its config.json says tie_word_embeddings, one matrix for the embedding and the head, and "
            f"{head!r} {list(theirs.shape)} differs from {embedding!r} {list(ours.shape)}. Set tie_word_embeddings to "
            "false there to have both, or remove the one that is not meant"
        )


def _is_equal(
    files: TensorSource, embedding: TensorSpec, head: TensorSpec, place: Sequence[slice], is_turned: bool
) -> bool:
    """Whether a slice of the embedding is that of the head, in the narrower dtype of the two."""
    rows = files.read(embedding.name, place)
    others = files.read(head.name, place[::-1]).T if is_turned else files.read(head.name, place)
    narrow = min(rows.dtype, others.dtype, key=lambda dtype: dtype.itemsize)
    ours, theirs = (value.astype(narrow).astype("float32") for value in (rows, others))
    return np.array_equal(ours, theirs, equal_nan=True)
