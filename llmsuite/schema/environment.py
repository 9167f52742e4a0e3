"""The section `environment` of recipes of online RL."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from llmsuite.schema.numbers import PositiveFloat, PositiveInt
from llmsuite.schema.section import Section


@dataclasses.dataclass(kw_only=True)
class EnvironmentSection(Section):
    """What answers the model between its turns, such as a game or a tool: a completion is an episode of several turns
    then. An environment has its own keys below `environment.NAME`."""

    extended_by: ClassVar[str] = "environment"

    name: str | None = None
    """A name that `llmsuite list environments` shows, or a class in a Python file, "games.py:Guess". null: a completion
    is one turn."""
    max_turns: PositiveInt = 8
    """Turns of the model in an episode. rollout.max_completion_length counts the tokens of all of them, and those of
    the environment between them."""
    max_turn_length: PositiveInt | None = None
    """Longest turn of the model in tokens: a longer one is truncated, and answered all the same. null: as long as the
    episode has room."""
    time_limit: PositiveFloat = 10.0
    """Seconds for one answer of the environment; after that the episode ends, and its reward is missing."""
    memory_limit: PositiveFloat = 8.0
    """GiB that one of these processes may take, with all that it has started; with more it is ended, and so are the
    episodes in it, whose rewards are missing."""
    workers: PositiveInt = 2
    """Processes of each rank that run environments."""
