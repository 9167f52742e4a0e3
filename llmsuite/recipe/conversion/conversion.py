"""What all parts of a conversion share: the arguments not yet used, the recipe's keys, and what is told."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from llmsuite.errors import UserError
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.conversion.arguments import Arguments
from llmsuite.recipe.conversion.kinds import ONE, Kind, check, is_on, is_true, number, wrong
from llmsuite.recipe.load import recipe_type
from llmsuite.schema.keys import walk
from llmsuite.specs import ModelFamily


@dataclasses.dataclass
class Converted:
    """What `convert` gives."""

    recipe: dict[str, Any]
    left_out: list[tuple[str, Any, str]] = dataclasses.field(default_factory=list)
    """Arguments without counterpart: name, value, why and what is nearest."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What was decided that the arguments do not say."""
    refused: list[tuple[str, Any, str]] = dataclasses.field(default_factory=list)
    """Arguments that make it another job than any recipe: name, value and why. `convert` raises unless its caller
    leaves them out."""


def check_stage(stage: str, registry: Registry) -> None:
    """Raise UserError for a stage that is not known, or that no file of another suite becomes."""
    if stage not in registry.stages:
        raise UserError(registry.unknown("stage", stage))
    from_rows = sorted(name for name, spec in registry.stages.items() if spec.trains and "rollout" not in spec.sections)
    if stage not in from_rows:
        raise UserError(
            f"--stage {stage}: is not what is converted; there are {', '.join(from_rows)}; see: llmsuite recipe new"
        )


class Conversion:
    """One conversion. `take` gives an argument and crosses it off; what is not crossed off has no counterpart."""

    def __init__(
        self,
        arguments: Arguments,
        name: str,
        registry: Registry,
        stage: str,
        family: ModelFamily,
        num_devices: int | None,
    ):
        self.arguments, self.name, self.stage, self.family = arguments, name, stage, family
        self.left = dict(arguments.values)
        self.section = registry.stages[stage].section_name
        self.section_cls = registry.stages[stage].config_cls
        tree = {"stage": stage, "model": {"family": family.name}}
        self.keys = {info.dotted for info in walk(recipe_type(tree, registry)[0])}
        self.told_devices = num_devices
        self.result = Converted({})
        self.evaluates = self.evaluates_epochs = self.offload = False
        self.data_ranks = 1
        self.preset: str | None = None

    def written(self, key: str) -> str:
        """The name that users give an argument: what is told of it is told by this."""
        return key

    def take(self, key: str, kind: Kind = ONE) -> Any:
        """The value of an argument; None where it is not given, or says so.

        Raises:
            UserError: it is not of its kind.
        """
        value = self.left.pop(self.written(key), None)
        if value in ("", "None", "none", "null"):
            return None
        check(value, kind, self.place(key))
        return value

    def place(self, key: str) -> str:
        """Where an argument is, for messages."""
        return f"{self.name}: {self.written(key)}"

    def number(self, key: str, default: Any) -> Any:
        value = self.take(key)
        return default if value is None else number(value, self.place(key))

    def whole(self, key: str, default: Any) -> Any:
        """A whole number, which may be written as 2.0 too."""
        value = self.number(key, default)
        if isinstance(value, float) and not value.is_integer():
            raise wrong(value, "a whole number", self.place(key))
        return int(value) if isinstance(value, float) else value

    def flag(self, key: str, also: str | None = None) -> bool:
        """Whether a flag is set. Raises UserError for what says neither yes nor no, nor is a word it knows also."""
        value = self.take(key)
        if is_on(value) and not is_true(value) and value != also:
            raise wrong(value, "true or false", self.place(key))
        return is_true(value)

    def left_out(self, key: str, value: Any, why: str) -> None:
        """An argument that changes nothing of what is trained."""
        self.result.left_out.append((self.written(key), value, why))

    def refuse(self, key: str, value: Any, why: str) -> None:
        """An argument without which it would be another job."""
        self.result.refused.append((self.written(key), value, why))

    def note(self, text: str) -> None:
        self.result.notes.append(text)

    def unknown(self, key: str) -> str:
        near = difflib.get_close_matches(key, {k.rpartition(".")[2]: k for k in self.keys}, n=1)
        full = sorted(k for k in self.keys if near and k.rpartition(".")[2] == near[0])
        return f"is not known; nearest key: {full[0]}" if full else "is not known"
