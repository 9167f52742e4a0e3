"""Refusing a conversion: all arguments at once that no recipe can follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmsuite.errors import UserError


def refuse(refused: Sequence[tuple[str, Any, str]], name: str, leave_out: Sequence[str], job: str = "this job") -> None:
    """Raise UserError for arguments, each with its value and the reason, that are not to be left out."""
    wrong = [(key, value, why) for key, value, why in refused if key not in leave_out]
    if wrong:
        lines = "".join(f"\n  {key} = {value}: {why}" for key, value, why in wrong)
        keys = ",".join(dict.fromkeys(key for key, _, _ in wrong))
        raise UserError(
            f"{name}: no recipe is {job}, because of{lines}\nWithout them it is another job; if that is what you want, "
            f"add --leave_out {keys}"
        )
