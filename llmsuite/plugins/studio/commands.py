"""Commands whose output the page shows: a new recipe from a model and a file of rows, and how a row is read."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from pathlib import Path
from typing import Any

from llmsuite.base.commands import CommandTimeout, run_command
from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import exists
from llmsuite.plugins.studio.recipes import FilledRecipe

_SECONDS = 600
"""Time for a command."""
_NEXT = ("next: ", "then: ", "wrote ")
"""Beginnings of lines for a terminal, which the page does not show."""


@dataclasses.dataclass(frozen=True)
class NewRecipe:
    """The choices for a new recipe, as the page sends them."""

    weights: str
    """Directory of a model, a run, or a name on a hub."""
    data: str
    """File of rows, or a name on a hub."""
    stage: str
    method: str

    @staticmethod
    def of(body: Any) -> NewRecipe:
        """Read the JSON that a page has sent. Raises UserError for an empty field or another form."""
        names = [field.name for field in dataclasses.fields(NewRecipe)]
        if not isinstance(body, dict) or not all(isinstance(body.get(name), str) for name in names):
            raise UserError("the page has sent no choices; load it again")
        values = {name: body[name].strip() for name in names}
        for name, value in values.items():
            if not value or "\0" in value:
                raise UserError(f"{name}: is missing")
        return NewRecipe(**values)

    def make(self) -> dict[str, str]:
        """Run `llmsuite recipe new` for the devices of this machine, in the working directory of the studio.

        Returns:
            "recipe", the path of the new file, and "text", what the command reports about the rows and the run.

        Raises:
            UserError: with the message of the command.
        """
        recipe = self._free_path()
        words = [f"--{name}={value}" for name, value in dataclasses.asdict(self).items()]
        printed = _run("recipe", "new", *words, "--device=here", f"--output={recipe}")
        lines = [line for line in printed.splitlines() if not line.startswith(_NEXT)]
        return {"recipe": str(recipe), "text": "\n".join(lines)}

    def _free_path(self) -> Path:
        """A path that does not exist yet, named after the model."""
        model = re.sub(r"[^\w.-]+", "-", self.weights.rstrip("/").rpartition("/")[2]).strip("-.") or "model"
        path = Path(f"{model}-{self.stage}.json")
        for number in itertools.count(2):
            if not exists(path):
                break
            path = Path(f"{model}-{self.stage}-{number}.json")
        return path


def explain_row(form: FilledRecipe, row: Any) -> str:
    """The output of `llmsuite data explain`: the tokens of a row of the training data, with those that are trained.

    Args:
        form: the recipe.
        row: number of the row, from 1.

    Raises:
        UserError: with the message of the command.
    """
    if not isinstance(row, int) or row < 1:
        raise UserError("row: is no number from 1")
    return _run("data", "explain", *form.words, f"--row={row}")


def _run(*words: str) -> str:
    """Run a command of llmsuite; returns what it prints. Raises UserError with its message where it fails."""
    name = f"llmsuite {words[0]} {words[1]}"
    try:
        done = run_command([sys.executable, "-m", "llmsuite", *words], seconds=_SECONDS)
    except CommandTimeout:
        raise UserError(f"{name}: took more than {_SECONDS} seconds, or printed too much, and was ended") from None
    if done.code:
        raise UserError(done.errors.strip() or f"{name} ended with {done.code}")
    return done.output
