"""State of a conversion: the arguments that are not used yet, the keys of recipes, and the report."""

from __future__ import annotations

import difflib
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.keys import walk
from llmsuite.contract.specs import ConvertedRecipe, JobSpec, ModelFamily, StageSpec
from llmsuite.plugins.suites.conversion.arguments import Arguments
from llmsuite.plugins.suites.conversion.kinds import ONE, Kind, check, is_on, is_true, number, wrong
from llmsuite.recipe.recipe_class import recipe_type


def check_stage(stage: str, registry: Registry, also: tuple[str, ...] = ()) -> None:
    """Raise UserError for a stage that is unknown, or that files of other suites cannot be converted to: one with
    rollouts that is not among `also`, or one with a teacher, which no file names."""
    if stage not in registry.stages:
        raise UserError(registry.unknown("stage", stage))
    from_rows = sorted(
        name
        for name, spec in registry.stages.items()
        if spec.trains and "rollout" not in spec.sections and not _has_teacher(spec)
    )
    if stage not in (*from_rows, *also):
        raise UserError(
            f"--stage {stage}: cannot be converted to; choose {', '.join(from_rows)}, or see: llmsuite recipe new"
        )


def _has_teacher(spec: StageSpec | JobSpec) -> bool:
    return isinstance(spec, StageSpec) and spec.profile(spec.config_cls()).teacher is not None


class Conversion:
    """One conversion. `take` returns an argument and marks it as used; unused arguments have no counterpart."""

    def __init__(
        self,
        arguments: Arguments,
        name: str,
        registry: Registry,
        stage: str,
        family: ModelFamily,
        num_devices: int | None,
    ):
        self.arguments = arguments
        self.name = name
        self.stage = stage
        self.family = family
        self.left = dict(arguments.values)
        self.section = registry.stages[stage].section_name
        self.section_cls = registry.stages[stage].config_cls
        tree = {"stage": stage, "model": {"family": family.name}}
        self.keys = {info.dotted for info in walk(recipe_type(tree, registry)[0])}
        self.requested_devices = num_devices
        self.result = ConvertedRecipe({})
        self.evaluates = self.evaluates_epochs = self.offload = False
        self.data_ranks = 1
        self.preset: str | None = None

    def written(self, key: str) -> str:
        """Return the name that users write for an argument; reports use this name."""
        return key

    def take(self, key: str, kind: Kind = ONE) -> Any:
        """Return the value of an argument and mark it as used; None if it is not given or is a word for none.

        Raises:
            UserError: the value is not of the kind.
        """
        value = self.left.pop(self.written(key), None)
        if value in ("", "None", "none", "null"):
            return None
        check(value, kind, self.location(key))
        return value

    def location(self, key: str) -> str:
        """Return the file and name of an argument, for messages."""
        return f"{self.name}: {self.written(key)}"

    def number(self, key: str, default: Any) -> Any:
        """Return a number, or the default if the argument is not given."""
        value = self.take(key)
        return default if value is None else number(value, self.location(key))

    def integer(self, key: str, default: Any) -> Any:
        """Return an integer, which may also be written as 2.0, or the default if the argument is not given."""
        value = self.number(key, default)
        if isinstance(value, float) and not value.is_integer():
            raise wrong(value, "an integer", self.location(key))
        return int(value) if isinstance(value, float) else value

    def flag(self, key: str, also: str | None = None) -> bool:
        """Return True if a flag is set. Raises UserError for a value that is not a boolean and not `also`."""
        value = self.take(key)
        if is_on(value) and not is_true(value) and value != also:
            raise wrong(value, "true or false", self.location(key))
        return is_true(value)

    def left_out(self, key: str, value: Any, why: str) -> None:
        """Report an argument that has no counterpart and does not change the training."""
        self.result.left_out.append((self.written(key), value, why))

    def refuse(self, key: str, value: Any, why: str) -> None:
        """Report an argument that changes the training and that no recipe can express."""
        self.result.refused.append((self.written(key), value, why))

    def note(self, text: str) -> None:
        """Report a decision."""
        self.result.notes.append(text)

    def unknown(self, key: str) -> str:
        """Return the reason for an unknown argument, with the nearest key."""
        near = difflib.get_close_matches(key, {k.rpartition(".")[2]: k for k in self.keys}, n=1)
        full = sorted(k for k in self.keys if near and k.rpartition(".")[2] == near[0])
        if full:
            return f"is not known; nearest key: {full[0]}"
        return "is not known"
