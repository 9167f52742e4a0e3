"""User-defined collators, `data.collator`: a function of the user that makes the arrays of a batch."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.python_files import from_file
from llmsuite.contract.registry import traceback_tail
from llmsuite.engine.batch import Batch
from llmsuite.engine.stage import Stage

Collate = Callable[[Sequence[Any]], Batch]
REQUIRED_COUNTS = ("num_tokens", "num_supervised")
"""Entries that every batch needs."""


def collate_of(stage: Stage[Any]) -> Collate:
    """Return what makes the batches of a run: `Stage.collate`, or the function in `data.collator` in its place.

    Raises:
        UserError: there is no such function. When it is called: it returns no batch.
    """
    context = stage.context
    own = _with_checked_counts(f"stage {context.stage_name}: `collate`", stage.collate)
    if context.data.collator is None:
        return own
    return _with_custom_collate(context.data.collator, own)


def _with_custom_collate(key: str, own: Collate) -> Collate:
    """Load the user's collate function, which replaces the `collate` of a stage.

    Args:
        key: "FILE.py:FUNCTION"; the function is called with the samples of a batch and `own`.
        own: `collate` of the stage.

    Raises:
        UserError: there is no such function. When it is called: it returns no batch.
    """
    with _errors_of(key):
        function = from_file(key, "collator")
    if not callable(function):
        raise UserError(f"data.collator: {key} is no function")

    def collate(samples: Sequence[Any]) -> Batch:
        with _errors_of(key):
            return function(samples, own)

    return _with_checked_counts(f"data.collator: {key}", collate)


def _with_checked_counts(what: str, collate: Collate) -> Collate:
    """Wrap a collate function so that it raises UserError when its result is no batch or lacks a required entry."""

    def checked(samples: Sequence[Any]) -> Batch:
        batch = collate(samples)
        if not isinstance(batch, dict):
            raise UserError(f"{what} has returned {type(batch).__name__}; a batch is a dict of arrays")
        for name in REQUIRED_COUNTS:
            if not isinstance(batch.get(name), numbers.Integral):
                raise UserError(
                    f"{what}: the batch has {batch.get(name)!r} for {name!r}; it is an integer, the number of tokens "
                    "without padding or of those that are supervised"
                )
        return batch

    return checked


@contextlib.contextmanager
def _errors_of(key: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise UserError(f"data.collator: {key}: {traceback_tail(error)}") from error
