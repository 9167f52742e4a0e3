"""The environment `guess`."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmsuite.contract.specs import Reply, Turn
from llmsuite.rl.environment_sections import GuessSection


class Guess:
    """An episode of the game of guessing a number; `GuessSection` describes the rules."""

    def __init__(self, section: GuessSection):
        self._range = section.lowest, section.highest
        self._secret = 0

    def begin(self, row: Mapping[str, Any], seed: int) -> Sequence[Mapping[str, str]]:
        lowest = int(row.get("lowest", self._range[0]))
        highest = int(row.get("highest", self._range[1]))
        self._secret = random.Random(seed).randint(lowest, highest)
        found: Sequence[Mapping[str, str]] = row["messages"]
        return found

    def step(self, turn: Turn) -> Reply:
        match = re.fullmatch(r"\s*(-?[0-9]{1,9})\s*", turn.text)
        if match is None:
            return Reply(done=True)
        guess = int(match[1])
        if guess == self._secret:
            return Reply(done=True, reward=1.0)
        hint = "higher" if guess < self._secret else "lower"
        return Reply(messages=[{"role": "user", "content": hint}])
