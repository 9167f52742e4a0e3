"""A collator that a recipe names, `data.collator`: a function of the user's that makes the arrays of a batch."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llmsuite.errors import UserError
from llmsuite.plugins.manager import tail
from llmsuite.python_files import from_file
from llmsuite.train.objective import Batch

Collate = Callable[[Sequence[Any]], Batch]
COUNTS = ("num_tokens", "num_supervised")
"""What the engine reads of every batch."""


def with_collator(key: str, own: Collate) -> Collate:
    """What makes batches in place of a stage's `collate`.

    Args:
        key: "FILE.py:FUNCTION"; the function is called with the samples of a batch and `own`.
        own: the stage's.

    Raises:
        UserError: there is no such function. When it is called: what it returns is no batch.
    """
    with _errors_of(key):
        function = from_file(key, "collator")
    if not callable(function):
        raise UserError(f"data.collator: {key} is no function")

    def collate(samples: Sequence[Any]) -> Batch:
        with _errors_of(key):
            return function(samples, own)

    return counting(f"data.collator: {key}", collate)


def counting(what: str, collate: Collate) -> Collate:
    """The same collate, which raises UserError when its batch is none or lacks what the engine reads of it."""

    def counted(samples: Sequence[Any]) -> Batch:
        batch = collate(samples)
        if not isinstance(batch, dict):
            raise UserError(f"{what} has returned {type(batch).__name__}; a batch is a dict of arrays")
        for name in COUNTS:
            if not isinstance(batch.get(name), numbers.Integral):
                raise UserError(
                    f"{what}: the batch has {batch.get(name)!r} for {name!r}; it is an integer, the number of tokens "
                    "without padding or of those that are supervised"
                )
        return batch

    return counted


@contextlib.contextmanager
def _errors_of(key: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # it is somebody else's code
        raise UserError(f"data.collator: {key}: {tail(error)}") from error
