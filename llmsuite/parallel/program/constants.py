"""Deduplication of the constants of programs.

Each operation that takes a number or a shape gets a constant of its own, also where constants are equal: most
operations of an update make constants. When a program first runs, Paddle 3.3.1 copies the names of all its values for
each of its operations (`InstructionBase::InitInputsOutputsIds`), which takes time quadratic in their number.
"""

from __future__ import annotations

from typing import Any

from paddle.base.core import pir

_KINDS = {"pd_op.full": "shape", "pd_op.full_int_array": "value"}
"""Operations that make a constant, with the attribute that has an entry for each dim or element."""


def share_constants(run: Any) -> None:
    """Make each small constant of a program once. Call it before the program runs.

    Args:
        run: of `dist.to_static`, whose program is built.
    """
    engine = run._engine
    plan = engine._job_plan
    parts = [engine.main_program] if plan is None else [plan.ir_program(kind) for kind in plan.job_types()]
    for part in parts:
        _share(part.global_block())


def _share(block: Any) -> None:
    first: dict[Any, Any] = {}
    for operation in block.ops:
        if operation.name() not in _KINDS or not _is_small(operation):
            continue
        value = operation.result(0)
        attributes = operation.attrs()
        if all(_only_reads(user, value) for user in value.all_used_ops()):
            kept = first.setdefault(
                (operation.name(), *(str(attributes.get(name)) for name in ("shape", "value", "dtype", "place"))), value
            )
            if not kept.is_same(value):
                value.replace_all_uses_with(kept)
                operation.erase()


def _is_small(operation: Any) -> bool:
    """True where the constant is so small that it can be kept for the full run of the program."""
    return operation.name() != "pd_op.full" or all(size == 1 for size in operation.attrs()["shape"])


def _only_reads(operation: Any, value: Any) -> bool:
    """True where an operation does not change a value, and makes no other name or list of it."""
    if operation.name().startswith("builtin."):
        return False
    written = pir.get_op_inplace_info(operation).values()
    return not any(operation.operand_source(index).is_same(value) for index in written)
