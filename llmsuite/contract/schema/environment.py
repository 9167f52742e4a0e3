"""The section `environment` of online RL recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from llmsuite.contract.schema.numbers import PositiveFloat, PositiveInt
from llmsuite.contract.schema.section import Section, keys_except, subsections


@dataclasses.dataclass(kw_only=True)
class EnvironmentSection(Section):
    """The environment that replies to the model between its turns, such as a game or a tool; a completion is then an
    episode of several turns. Keys of a particular environment are below `environment.NAME`."""

    extended_by: ClassVar[str] = "environment"

    name: str | None = None
    """Name of a registered environment (`llmsuite list environments` shows them), or a class in a Python file, such as
    "games.py:Guess". null: no environment; a completion is one turn."""
    max_turns: PositiveInt = 8
    """Maximum number of the model's turns in an episode. rollout.max_completion_length limits the tokens of all turns
    together, including those of the environment."""
    max_turn_length: PositiveInt | None = None
    """Maximum length of one turn of the model in tokens; a longer turn is truncated and the environment still replies
    to it. null: limited only by the room left in the episode."""
    time_limit: PositiveFloat = 10.0
    """Seconds that the environment may take for one reply; after that the episode ends without a reward."""
    memory_limit: PositiveFloat = 8.0
    """GiB of memory that an environment process may use, including its child processes. A process that exceeds it is
    killed, and its episodes end without a reward."""
    workers: PositiveInt = 2
    """Number of processes per rank that run environments."""

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.name is None:
            for key in keys_except(self, "name"):
                yield key, "has no effect while name is null; set that too, or remove it"
        for other in subsections(self):
            if other != self.name:
                chosen = "null" if self.name is None else self.name
                yield other, f"has no effect while environment.name is {chosen}; set that to {other}, or remove it"
