"""Description of another suite for the converter: its files, stages and tables of arguments."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmsuite.contract.registry import Registry
from llmsuite.contract.specs import ModelFamily
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.plugins.suites.conversion.arguments import Arguments
from llmsuite.plugins.suites.conversion.conversion import Conversion
from llmsuite.plugins.suites.conversion.kinds import WORDS
from llmsuite.plugins.suites.conversion.refuse import Refusal


@dataclasses.dataclass(frozen=True)
class Suite:
    """A suite whose files can be converted to recipes."""

    name: str
    """Name of the suite, for `source` and messages."""
    model_key: str
    """Argument that names the model."""
    stage: Callable[[Mapping[str, Any], str, str | None], str]
    """Returns the stage for (arguments, name of the file, `--stage`). Raises UserError if nothing is trained or the
    stage is not determined."""
    recipe: Callable[[Run], dict[str, Any]]
    """Returns the recipe; takes the arguments that it uses from the run."""
    refused: Mapping[str, Refusal]
    """Arguments that no recipe can express, by `fnmatch` patterns of names; the first match counts."""
    ignored: Mapping[str, str]
    """Arguments that do not change the training, by patterns -> reason."""
    translations: Mapping[str, str]
    """Arguments that become keys, by patterns -> key or section."""
    renamed_arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Arguments of the Trainer of transformers that the suite renames: Trainer's name -> suite's name."""
    flatten: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """Returns the arguments by name for a parsed document."""
    read_shell: Callable[[Path], dict[str, Any]] | None = None
    """Returns the arguments in a shell script; None if the suite is not used by scripts."""
    rollout_stages: tuple[str, ...] = ()
    """Stages with rollouts that its files can be converted to."""
    reads_codes: bool = False
    """True if the suite trains adapters of models in codes of GPTQ or AWQ, as they are published."""
    programs: Mapping[str, Suite] = dataclasses.field(default_factory=dict)
    """Descriptions of the suite's other programs, which have other arguments, by the first word of `command`."""


class Run(Conversion):
    """A conversion of a file of a suite."""

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
        self.file_devices: int | None = None
        """Number of devices that the file names."""

    @property
    def has_experts(self) -> bool:
        """True if models of the family have routed experts."""
        return bool((self.family.shard_plan or UNSHARDED).experts)

    def written(self, key: str) -> str:
        return self.suite.renamed_arguments.get(key, key)

    def given(self, key: str) -> Any:
        """Return the value of an argument without marking it as used; None if it is not given."""
        return self.arguments.values.get(self.written(key))

    def unknown(self, key: str) -> str:
        tables = (self.suite.translations, self.suite.ignored, self.suite.refused)
        names = [name for table in tables for name in table if "*" not in name]
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
        if near:
            return f"is not known; did you mean {near[0]}?"
        return super().unknown(key)

    def words(self, key: str) -> list[str]:
        """Return the values of a list, or of a text with commas."""
        value = self.take(key, WORDS)
        if value is None:
            return []
        listed = value if isinstance(value, list) else str(value).split(",")
        return [str(word).strip() for word in listed if str(word).strip()]
