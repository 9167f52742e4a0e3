"""Refusing a conversion: all arguments at once that no recipe can follow."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from llmsuite.errors import UserError
from llmsuite.recipe.conversion.conversion import Converted
from llmsuite.recipe.conversion.kinds import is_on

Reason = tuple[str, Any, str]
"""An argument, its value, and why no recipe can follow it."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why an argument makes it another job than any recipe, and with which values it does."""

    why: str
    applies: Callable[[Any], bool] = is_on


def find(table: Mapping[str, Any], key: str) -> Any:
    """The entry of the first pattern that fits; None where none does."""
    return next((entry for pattern, entry in table.items() if fnmatch.fnmatchcase(key, pattern)), None)


def why_refused(table: Mapping[str, Refusal], key: str, value: Any) -> str | None:
    """Why an argument makes it another job; None where it does not."""
    found = find(table, key)
    return found.why if found is not None and found.applies(value) else None


def joined(first: Sequence[Reason], second: Sequence[Reason]) -> list[Reason]:
    """All reasons of both, in their order, each once."""
    found: list[Reason] = []
    for reason in (*first, *second):
        if reason not in found:
            found.append(reason)
    return found


def refusal(
    reasons: Sequence[Reason],
    given: Collection[str],
    name: str,
    leave_out: Sequence[str],
    job: str = "this job",
    stop: UserError | None = None,
) -> UserError | None:
    """The error of a file that becomes no recipe; None where it becomes one.

    Args:
        reasons: why arguments are refused.
        given: the arguments of the file.
        name: of the file.
        leave_out: arguments that the recipe may do without. A name that is neither of the file nor refused is told too.
        job: what no recipe is.
        stop: why the file was not read to its end; it counts where none of the reasons does.
    """
    told: list[str] = []
    if wrong := [(key, value, why) for key, value, why in reasons if key not in leave_out]:
        lines = "".join(f"\n  {key} = {value}: {why}" for key, value, why in wrong)
        keys = ",".join(dict.fromkeys(key for key, _, _ in wrong))
        told.append(
            f"{name}: no recipe is {job}, because of{lines}\nWithout them it is another job; if that is what you want, "
            f"add --leave_out {keys}"
        )
    known = {*given, *(key for key, _, _ in reasons)}
    if absent := [key for key in leave_out if key not in known]:
        told += [str(stop)] if stop is not None and not told else []
        told.append(f"--leave_out: {name} has no {', '.join(absent)}")
    return UserError("\n".join(told)) if told else stop


def left_without(found: Converted, leave_out: Sequence[str]) -> list[str]:
    """The arguments to leave out that a recipe is without; of the others, which it follows all the same, there is a
    note."""
    refused = {key for key, _, _ in found.refused}
    if followed := [key for key in leave_out if key not in refused]:
        found.notes.append(
            f"--leave_out: {', '.join(followed)} can be followed, and is; take it out of the file instead"
        )
    return [key for key in leave_out if key in refused]
