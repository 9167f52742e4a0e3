"""The errors a user sees. Anything else that escapes is a bug of ours and keeps its traceback."""

from __future__ import annotations

import dataclasses

from llmsuite.shown import redacted


class UserError(Exception):
    """The user's input is wrong or something is missing; the message says what would be right (exit code 2). Secrets in
    the URLs that it names are left out."""

    def __str__(self) -> str:
        return redacted(super().__str__())


class AgreedError(UserError):
    """A step cannot be taken, and every rank of the run raises this before it: the model is as the last step has left
    it, and can be saved."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe."""

    where: str
    """`file:line:col`, or the command-line override that caused it."""
    key: str
    """Dotted recipe key, empty for the file as a whole."""
    message: str
    """What is wrong and what would be right."""
    remedy: str = ""
    """An override that probably mends it, such as `--data.columns={"instruction":"Question"}`; empty for none."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class RecipeError(UserError):
    """Everything wrong with a recipe, reported at once."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))
