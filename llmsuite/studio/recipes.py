"""What the page shows of recipes: which there are, their keys with help, what is wrong with them, their plans."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from llmsuite.errors import Problem, RecipeError, UserError
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.notes import endless_warm_up, few_rows, held_out, not_fetched
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.regular import exists, is_dir, is_file
from llmsuite.resources import bundled, find
from llmsuite.schema.keys import walk
from llmsuite.schema.section import as_plain
from llmsuite.stages.first_rows import check_rows

Data = dict[str, Any]
_KEY = re.compile(r"[a-zA-Z_][\w.]*")


@dataclasses.dataclass(frozen=True)
class Filled:
    """A recipe as it is filled in on the page."""

    recipe: str
    """Path of its file."""
    smoke: bool
    changes: Mapping[str, str]
    """New values of keys, as they are written on a command line."""

    @staticmethod
    def of(told: Any) -> Filled:
        """Read what a page has sent. Raises UserError if it is of another form."""
        if not isinstance(told, dict) or not isinstance(told.get("recipe"), str):
            raise UserError("the page has sent no recipe; load it again")
        changes = told.get("changes", {})
        if not isinstance(changes, dict) or not all(isinstance(value, str) for value in changes.values()):
            raise UserError("the changes of the recipe are no texts; load the page again")
        for key in changes:
            if not _KEY.fullmatch(key):
                raise UserError(f"{key!r}: is no key of a recipe")
        return Filled(told["recipe"], told.get("smoke") is True, changes)

    @property
    def overrides(self) -> list[str]:
        """The changes as words of a command line."""
        return [f"--{key}={value}" for key, value in self.changes.items()]

    @property
    def words(self) -> list[str]:
        """The arguments of `llmsuite run`."""
        return [self.recipe, *(["--smoke"] if self.smoke else []), *self.overrides]

    @property
    def command(self) -> str:
        """What does the same in a terminal."""
        return shlex.join(["llmsuite", "run", *self.words])


class Recipes:
    """Answers about recipes; several browsers may ask at once."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._lock = threading.Lock()

    def known(self) -> list[Data]:
        """The recipes that come with llmsuite."""
        return list(_known())

    def keys(self, filled: Filled) -> list[Data]:
        """Every key of a recipe with its help, in the order of the schema. Raises UserError if it cannot be read."""
        plan = self.plan_of(dataclasses.replace(filled, changes={}))
        values = as_plain(plan.recipe)
        return [_key(info, _at(values, info.key)) for info in walk(type(plan.recipe))]

    def check(self, filled: Filled) -> Data:
        """What is wrong with a recipe, by key, or the notes of `validate`; and the command that runs it."""
        try:
            plan = self.plan_of(filled)
            unchecked = _checked(plan, self._registry)
        except RecipeError as error:
            problems = list(map(_problem, error.problems))
            return {"problems": problems, "command": filled.command}
        except UserError as error:
            return {"problems": [{"key": "", "message": str(error), "where": ""}], "command": filled.command}
        made = f"{plan.stage.name}, {plan.family.name}, {plan.degrees} on {plan.device.name}"
        notes = [*unchecked, *not_fetched(plan), *few_rows(plan), *held_out(plan), *endless_warm_up(plan)]
        return {"problems": [], "command": filled.command, "made": made, "run": str(plan.output_dir), "notes": notes}

    def plan(self, filled: Filled) -> str:
        """What a run will take, as `llmsuite plan` says it. Raises UserError if it is wrong or trains nothing."""
        from llmsuite.planning.estimate import estimate
        from llmsuite.planning.show import show_plan

        plan = self.plan_of(filled)
        plan.check_trains("plan")
        return "\n".join(show_plan(estimate(plan), None, None))

    def plan_of(self, filled: Filled) -> RunPlan:
        """The resolved recipe. Raises UserError with everything that is wrong."""
        path = find(filled.recipe)
        if exists(path) and not is_file(path) and not is_dir(path):  # everybody who asks next would wait for a pipe too
            raise UserError(f"{filled.recipe}: is no file; choose a recipe")
        with self._lock:
            return plan_run(filled.recipe, filled.overrides, self._registry, filled.smoke)


def _checked(plan: RunPlan, registry: Registry) -> list[str]:
    """The notes of `check_rows`. Raises RecipeError with all that is wrong with files and with rows, as a run needs
    both."""
    problems: list[Problem] = []
    notes: list[str] = []
    try:
        plan.check_files()
    except RecipeError as error:
        problems = error.problems
    try:
        notes = check_rows(plan, registry)
    except RecipeError as error:
        problems = [*problems, *(each for each in error.problems if each not in problems)]
    if problems:
        raise RecipeError(problems)
    return notes


def _problem(problem: Problem) -> Data:
    """A problem as the page shows it, with the key that would mend it and its value."""
    key, _, value = problem.remedy.removeprefix("--").partition("=")
    mended = {"remedy": {"key": key, "value": value}} if problem.remedy else {}
    return {"key": problem.key, "message": problem.message, "where": problem.where, **mended}


def _known() -> Iterator[Data]:
    root = bundled("recipes")
    for path in sorted(root.glob("*/*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        launch, model = data.get("launch", {}), data["model"]
        yield {
            "recipe": f"recipes/{path.relative_to(root)}",
            "stage": data["stage"],
            "model": model.get("weights") or model.get("preset") or model["family"],
            "devices": launch.get("num_devices", 1) * launch.get("nnodes", 1),
            "device": data.get("device", "cpu"),
        }


def _key(info: Any, value: Any) -> Data:
    kind = info.type_text
    options = kind.removeprefix("one of: ").split(", ") if kind.startswith("one of: ") else []
    if kind == "true or false":
        options = ["true", "false"]
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    required = info.default is dataclasses.MISSING
    default = None if required else info.default if isinstance(info.default, str) else json.dumps(info.default)
    return {"key": info.dotted, "type": kind, "help": info.doc, "value": shown, "options": options, "default": default}


def _at(values: Any, key: tuple[str, ...]) -> Any:
    for part in key:
        values = values.get(part) if isinstance(values, dict) else None
    return values
