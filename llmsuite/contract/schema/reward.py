"""The section `reward` of online RL recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from llmsuite.base.python_files import python_function
from llmsuite.contract.schema.numbers import Fraction, PositiveFloat, PositiveInt
from llmsuite.contract.schema.section import Section, subsections


@dataclasses.dataclass(kw_only=True)
class RewardSection(Section):
    """Reward functions and how they run. Keys of a particular reward are below `reward.NAME`."""

    extended_by: ClassVar[str] = "reward"

    functions: dict[str, float]
    """Rewards and their weights, such as {"exact": 1.0, "format": 0.1}: registered names (`llmsuite list rewards` shows
    them), or functions in Python files, such as "rewards.py:score". The reward of a completion is the weighted sum; it
    is missing if one of the values is missing. A reward with weight 0 is only recorded."""
    time_limit: PositiveFloat = 10.0
    """Seconds that a reward may take for one completion, or for one group if it compares the completions of a prompt;
    after that the reward is missing."""
    memory_limit: PositiveFloat = 8.0
    """GiB of memory that a reward process may use, including its child processes. A process that exceeds it is killed,
    and the reward it was computing is missing. Raise it for a reward that loads a model."""
    workers: PositiveInt = 2
    """Number of processes per rank that compute rewards."""
    max_failed: Fraction = 0.1
    """Stop the run if more than this fraction of the completions of a step have no reward because a function raised an
    error, timed out, or returned null or NaN."""

    def names(self) -> dict[str, str]:
        """Return the name of each reward in metrics: its registered name, or that of the Python function."""
        found: dict[str, str] = {}
        for key in self.functions:
            function = python_function(key)
            found[key] = function[1] if function else key
        return found

    def problems(self) -> Iterator[tuple[str, str]]:
        if not self.functions:
            yield "functions", 'is empty; name a reward and its weight, such as {"exact": 1.0}'
        elif not any(self.functions.values()):
            yield "functions", "has only weights of 0, so every completion would have the same reward"
        names = list(self.names().values())
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield "functions", f"has two rewards called {name!r}; give one of the functions another name"

    def unused(self) -> Iterator[tuple[str, str]]:
        for reward in subsections(self):
            if reward not in self.functions:
                yield reward, f"has no effect without {reward} in reward.functions; add that, or remove it"
