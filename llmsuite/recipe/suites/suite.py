"""What another suite is to the engine: how its files are read and told apart, and what its words mean here."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmsuite.models.shard_plan import WHOLE
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.conversion.arguments import Arguments
from llmsuite.recipe.conversion.conversion import Conversion, Converted
from llmsuite.recipe.conversion.kinds import WORDS
from llmsuite.recipe.conversion.refuse import Refusal
from llmsuite.specs import ModelFamily


@dataclasses.dataclass
class Report(Converted):
    """A recipe, and what became of each argument."""

    same: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    """Arguments with the name and the value of a key here."""
    translated: list[tuple[str, Any, str]] = dataclasses.field(default_factory=list)
    """Name, value, and the key here that says it."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """One suite."""

    name: str
    """As its users write it, for `source` and messages."""
    model_key: str
    """The argument that names the model."""
    stage: Callable[[Mapping[str, Any], str, str | None], str]
    """The stage of the arguments, the name of their file and `--stage`. Raises UserError where nothing is trained, or
    they tell no stage."""
    recipe: Callable[[Run], dict[str, Any]]
    """The recipe, section by section; takes from the run what it uses."""
    refused: Mapping[str, Refusal]
    """Patterns of `fnmatch` over names; the first that fits counts."""
    without: Mapping[str, str]
    """The same: arguments that change nothing of what is trained, and why."""
    becomes: Mapping[str, str]
    """The key, or section, that an argument is translated to."""
    own_words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Words of the Trainer of transformers that it has another word for: the Trainer's -> its own."""
    flatten: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """Arguments by name, from the document."""
    read_shell: Callable[[Path], dict[str, Any]] | None = None
    """The arguments in a shell script, where its commands are usually written in such."""


class Run(Conversion):
    """One conversion of a file of a suite."""

    def __init__(
        self,
        suite: Suite,
        arguments: Arguments,
        name: str,
        registry: Registry,
        stage: str,
        family: ModelFamily,
        num_devices: int | None,
    ):
        super().__init__(arguments, name, registry, stage, family, num_devices)
        self.suite = suite
        self.result = self.report = Report({})
        self.hinted_devices: int | None = None
        """Devices that the file itself names."""

    @property
    def has_experts(self) -> bool:
        """Whether models of the family have routed experts."""
        return bool((self.family.shard_plan or WHOLE).experts)

    def written(self, key: str) -> str:
        return self.suite.own_words.get(key, key)

    def given(self, key: str) -> Any:
        """What was written for an argument, used or not; None where nothing was."""
        return self.arguments.values.get(self.written(key))

    def unknown(self, key: str) -> str:
        tables = (self.suite.becomes, self.suite.without, self.suite.refused)
        words = [word for table in tables for word in table if "*" not in word]
        near = difflib.get_close_matches(key, words, n=1, cutoff=0.8)
        return f"is not known; did you mean {near[0]}?" if near else super().unknown(key)

    def words(self, key: str) -> list[str]:
        """Several values: a list, or a text with commas."""
        value = self.take(key, WORDS)
        if value is None:
            return []
        listed = value if isinstance(value, list) else str(value).split(",")
        return [str(word).strip() for word in listed if str(word).strip()]
