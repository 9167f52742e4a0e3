"""The section `reward` of recipes of online RL."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from llmsuite.python_files import python_function
from llmsuite.schema.numbers import Fraction, PositiveFloat, PositiveInt
from llmsuite.schema.section import Section


@dataclasses.dataclass(kw_only=True)
class RewardSection(Section):
    """What completions are rewarded for. A reward has its own keys below `reward.NAME`."""

    extended_by: ClassVar[str] = "reward"

    functions: dict[str, float]
    """Rewards and their weights, such as {"exact": 1.0, "format": 0.1}: names that `llmsuite list rewards` shows, or
    functions in Python files, "rewards.py:score". A completion's reward is the sum of weight times value; it is missing
    if one value is. With weight 0 a reward is recorded only."""
    time_limit: PositiveFloat = 10.0
    """Seconds for one completion, or for one group of a reward that compares completions of a prompt; after that the
    reward is missing."""
    memory_limit: PositiveFloat = 8.0
    """GiB that one of these processes may take, with all that it has started; with more it is ended, and the reward it
    was computing is missing. A reward that loads a model needs more."""
    workers: PositiveInt = 2
    """Processes of each rank that compute rewards."""
    max_failed: Fraction = 0.1
    """Stop the run when more than this fraction of the completions of a step have no reward, because a function raised,
    took too long, or returned null or NaN."""

    def names(self) -> dict[str, str]:
        """The rewards of `functions`, and what each is called in metrics: its name, or that of the Python function."""
        return {key: found[1] if (found := python_function(key)) else key for key in self.functions}

    def problems(self) -> Iterator[tuple[str, str]]:
        if not self.functions:
            yield "functions", 'is empty; name a reward and its weight, such as {"exact": 1.0}'
        elif not any(self.functions.values()):
            yield "functions", "has weights of 0 only, so every completion would have the same reward"
        names = list(self.names().values())
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield "functions", f"has two rewards called {name!r}; give one of the functions another name"
