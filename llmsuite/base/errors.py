"""The errors that users see. Any other exception is a bug of llmsuite and keeps its traceback."""

from __future__ import annotations

import dataclasses

from llmsuite.base.redaction import redacted


class UserError(Exception):
    """The user's input is wrong or something is missing; the message says how to correct it (exit code 2). Secrets in
    URLs are redacted."""

    def __str__(self) -> str:
        return redacted(super().__str__())


class AgreedError(UserError):
    """A step cannot be taken, and every rank of the run raises this error before it: the model is in the state after
    the last step, and can be saved."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe."""

    where: str
    """`file:line:col`, or the command-line override that caused it."""
    key: str
    """Dotted recipe key, empty for the entire file."""
    message: str
    """The error and its correction."""
    remedy: str = ""
    """An override that probably corrects it, such as `--data.columns={"instruction":"Question"}`; empty for none."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class RecipeError(UserError):
    """All errors of a recipe, reported together."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))


def reason_of(error: Exception) -> str:
    """Return the words of the operating system for an error, without number and path; for other errors their text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def line_of(error: Exception) -> str:
    """Return the line of an error's text that has the message; "" for an error without text. Errors of Paddle have a
    stack before it, or around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "error" in line]
    return (named or lines[:1] or [""])[-1]
