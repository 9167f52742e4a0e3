"""Recipes for the page: the list of them, their keys with help, their errors, their plans."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from llmsuite.base.errors import Problem, RecipeError, UserError
from llmsuite.base.resources import bundled, find
from llmsuite.base.safe_files import exists, is_dir, is_file
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.keys import walk
from llmsuite.contract.schema.section import as_plain
from llmsuite.recipe.notes import all_notes
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.stages.first_rows import check_rows

Data = dict[str, Any]
_KEY = re.compile(r"[a-zA-Z_][\w.]*")


@dataclasses.dataclass(frozen=True)
class FilledRecipe:
    """A recipe with the changes made on the page."""

    recipe: str
    """Path of its file."""
    smoke: bool
    changes: Mapping[str, str]
    """New values of keys, in the form of a command line."""

    @staticmethod
    def of(body: Any) -> FilledRecipe:
        """Read the JSON that a page has sent. Raises UserError if it has another form."""
        if not isinstance(body, dict) or not isinstance(body.get("recipe"), str):
            raise UserError("the page has sent no recipe; load it again")
        changes = body.get("changes", {})
        if not isinstance(changes, dict) or not all(isinstance(value, str) for value in changes.values()):
            raise UserError("the changes of the recipe are no texts; load the page again")
        for key in changes:
            if not _KEY.fullmatch(key):
                raise UserError(f"{key!r}: is no key of a recipe")
        return FilledRecipe(body["recipe"], body.get("smoke") is True, changes)

    @property
    def overrides(self) -> list[str]:
        """The changes as words of a command line."""
        return [f"--{key}={value}" for key, value in self.changes.items()]

    @property
    def words(self) -> list[str]:
        """The arguments of `llmsuite run`."""
        if self.smoke:
            return [self.recipe, "--smoke", *self.overrides]
        return [self.recipe, *self.overrides]

    @property
    def command(self) -> str:
        """The equivalent command for a terminal."""
        return shlex.join(["llmsuite", "run", *self.words])


class Recipes:
    """Requests about recipes; several browsers may send them at the same time."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._lock = threading.Lock()

    def known(self) -> list[Data]:
        """The recipes that come with llmsuite."""
        return list(_known())

    def keys(self, form: FilledRecipe) -> list[Data]:
        """Every key of a recipe with its help, in the order of the schema; "given" is true for keys that the recipe
        sets. Raises UserError if it cannot be read."""
        plan = self.plan_of(dataclasses.replace(form, changes={}))
        values = as_plain(plan.recipe)
        given = plan.loaded.given
        return [{**_key(info, _at(values, info.key)), "given": info.key in given} for info in walk(type(plan.recipe))]

    def check(self, form: FilledRecipe) -> Data:
        """Return the errors of a recipe by key, or the notes of `validate`; and the command that runs it."""
        try:
            plan, unchecked = self._checked_plan(form)
        except RecipeError as error:
            problems = list(map(_problem, error.problems))
            return {"problems": problems, "command": form.command}
        except UserError as error:
            return {"problems": [{"key": "", "message": str(error), "where": ""}], "command": form.command}
        made = (
            f"{plan.train.stage.name}, {plan.model.family.name}, {plan.parallel.degrees} on {plan.parallel.device.name}"
        )
        notes = [*unchecked, *all_notes(plan.recipe, plan.data, plan.train, plan.parallel.device.name)]
        return {"problems": [], "command": form.command, "made": made, "run": str(plan.output_dir), "notes": notes}

    def plan(self, form: FilledRecipe) -> str:
        """Return the output of `llmsuite plan`. Raises UserError for a recipe that is wrong or does not train."""
        from llmsuite.planning.estimate import estimate
        from llmsuite.planning.report import show_plan

        plan = self.plan_of(form)
        plan.check_trains("plan")
        return "\n".join(show_plan(estimate(plan.model, plan.data, plan.parallel, plan.train), None, None))

    def _checked_plan(self, form: FilledRecipe) -> tuple[RunPlan, list[str]]:
        """Resolve the recipe, and return it with the notes of `check_rows`. Raises RecipeError with all errors of the
        files and the rows together."""
        plan = self.plan_of(form)
        problems: list[Problem] = []
        notes: list[str] = []
        try:
            plan.check_files()
        except RecipeError as error:
            problems = error.problems
        try:
            notes = check_rows(plan.loaded, plan.data, plan.train, plan.model.tokenizer, self._registry)
        except RecipeError as error:
            problems = [*problems, *(each for each in error.problems if each not in problems)]
        if problems:
            raise RecipeError(problems)
        return plan, notes

    def plan_of(self, form: FilledRecipe) -> RunPlan:
        """Resolve the recipe. Raises UserError with all errors."""
        path = find(form.recipe)
        if exists(path) and not is_file(path) and not is_dir(path):  # reading a pipe would block, with the lock held
            raise UserError(f"{form.recipe}: is no file; choose a recipe")
        with self._lock:
            return plan_run(form.recipe, form.overrides, self._registry, form.smoke)


def _problem(problem: Problem) -> Data:
    """A problem as JSON for the page, with the key and value that would correct it."""
    key, _, value = problem.remedy.removeprefix("--").partition("=")
    remedy = {"remedy": {"key": key, "value": value}} if problem.remedy else {}
    return {"key": problem.key, "message": problem.message, "where": problem.where, **remedy}


def _known() -> Iterator[Data]:
    root = bundled("recipes")
    first = root / "llama" / "sft.json"  # shown when the page opens
    for path in sorted(root.glob("*/*.json"), key=lambda path: (path != first, path)):
        data = json.loads(path.read_text(encoding="utf-8"))
        launch = data.get("launch", {})
        model = data["model"]
        yield {
            "recipe": f"recipes/{path.relative_to(root)}",
            "stage": data["stage"],
            "model": model.get("weights") or model.get("preset") or model["family"],
            "devices": launch.get("num_devices", 1) * launch.get("nnodes", 1),
            "device": data.get("device", "cpu"),
        }


def _key(info: Any, value: Any) -> Data:
    kind = info.type_text
    options = []
    if kind.startswith("one of: "):
        options = kind.removeprefix("one of: ").split(", ")
    elif kind == "true or false":
        options = ["true", "false"]
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    default = None
    if info.default is not dataclasses.MISSING:
        default = info.default if isinstance(info.default, str) else json.dumps(info.default)
    return {"key": info.dotted, "type": kind, "help": info.doc, "value": shown, "options": options, "default": default}


def _at(values: Any, key: tuple[str, ...]) -> Any:
    for part in key:
        values = values.get(part) if isinstance(values, dict) else None
    return values
