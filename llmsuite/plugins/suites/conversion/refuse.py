"""Refusal of a conversion, with all arguments that no recipe can express in one message."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.contract.specs import ConvertedRecipe
from llmsuite.plugins.suites.conversion.kinds import is_on

Reason = tuple[str, Any, str]
"""(argument, value, reason why no recipe can express it)."""


class NotTheSameJob(UserError):
    """No recipe is the same job; with all reasons, by the arguments of the file."""

    def __init__(self, message: str, reasons: Sequence[Reason], stop: UserError | None = None):
        super().__init__(message)
        self.reasons = list(reasons)
        self.stop = stop
        """Error that ended the conversion before all arguments were read; None if all were."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Reason why no recipe can express an argument, and the values to which it applies."""

    why: str
    applies: Callable[[Any], bool] = is_on


def find(table: Mapping[str, Any], key: str) -> Any:
    """Return the entry of the first pattern that matches; None if none does."""
    return next((entry for pattern, entry in table.items() if fnmatch.fnmatchcase(key, pattern)), None)


def why_refused(table: Mapping[str, Refusal], key: str, value: Any) -> str | None:
    """Return the reason why no recipe can express an argument; None if one can."""
    found = find(table, key)
    if found is not None and found.applies(value):
        return found.why
    return None


def joined(first: Sequence[Reason], second: Sequence[Reason]) -> list[Reason]:
    """Return all reasons of both in order, without duplicates."""
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
    """Return the error for a file that no recipe can express; None if one can.

    Args:
        reasons: reasons for refused arguments.
        given: arguments of the file.
        name: name of the file.
        leave_out: arguments to ignore. A name that is neither in the file nor refused is an error.
        job: description of the job, for the message.
        stop: error that stopped the conversion; returned if there is no other reason.
    """
    messages: list[str] = []
    refused = [(key, value, why) for key, value, why in reasons if key not in leave_out]
    if refused:
        lines = "".join(f"\n  {key} = {value}: {why}" for key, value, why in refused)
        keys = ",".join(dict.fromkeys(key for key, _, _ in refused))
        messages.append(
            f"{name}: no recipe is {job}, because of{lines}\nWithout them it is another job; if that is what you want, "
            f"add --leave_out {keys}"
        )
    known = {*given, *(key for key, _, _ in reasons)}
    absent = [key for key in leave_out if key not in known]
    if absent:
        if stop is not None and not messages:
            messages.append(str(stop))
        messages.append(f"--leave_out: {name} has no {', '.join(absent)}")
    return NotTheSameJob("\n".join(messages), refused, stop) if messages else stop


def honoured_leave_out(found: ConvertedRecipe, leave_out: Sequence[str]) -> list[str]:
    """Return the arguments of `leave_out` that the recipe ignores; add a note on those that it can express and uses."""
    refused = {key for key, _, _ in found.refused}
    used = [key for key in leave_out if key not in refused]
    if used:
        found.notes.append(f"--leave_out: the recipe can express {', '.join(used)}; remove it from the file instead")
    return [key for key in leave_out if key in refused]
