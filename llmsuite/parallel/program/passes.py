"""Paddle's own passes over a program, by their names: the `fused_passes` of `dist.Strategy`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import paddle
from paddle.pir import PassManager

from llmsuite.base.errors import UserError

_OF_AUTO_PARALLEL = ("eliminate_transpose",)
"""Passes that are functions of `dist.to_static`; all other passes are registered."""


def check_passes(names: Sequence[str]) -> None:
    """Raise UserError for a pass that this version of Paddle does not have: no program could be built with it."""
    for name in names:
        if name in _OF_AUTO_PARALLEL:
            continue
        try:
            PassManager().add_pass(name, {})
        except ValueError as error:
            raise UserError(
                f"engine.fused_passes: Paddle {paddle.__version__} has no pass {name!r}; its passes over programs end "
                "in _pass, such as fused_gemm_epilogue_pass"
            ) from error


def use_passes(run: Any, names: Sequence[str]) -> None:
    """Apply passes to a program, in this order. Call it before the program is built.

    Args:
        run: of `dist.to_static`, whose own options name two passes only (Paddle 3.3.1).
        names: of passes, see `check_passes`.
    """
    run._engine._strategy.fused_passes.fused_passes_list = [*names]


@contextlib.contextmanager
def kernels_of(names: Sequence[str]) -> Iterator[None]:
    """Context around the run of a program that passes have changed. Raises UserError where they have added an operation
    that this device cannot compute."""
    try:
        yield
    except RuntimeError as error:
        found = re.search(r"kernel `(\w+)`.* not registered", str(error))
        if not names or found is None:
            raise
        raise UserError(
            f"engine.fused_passes: has put {found[1]} into the program, for which this device has no kernel; leave out "
            f"the pass that does, of {', '.join(names)}"
        ) from error
