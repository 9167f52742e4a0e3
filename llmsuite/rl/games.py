"""The environment `guess`."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmsuite.rl.environment_sections import GuessSection
from llmsuite.specs import Reply, Turn


class Guess:
    """See `GuessSection`."""

    def __init__(self, section: GuessSection):
        self._range = section.lowest, section.highest
        self._secret = 0

    def begin(self, row: Mapping[str, Any], seed: int) -> Sequence[Mapping[str, str]]:
        lowest, highest = int(row.get("lowest", self._range[0])), int(row.get("highest", self._range[1]))
        self._secret = random.Random(seed).randint(lowest, highest)
        found: Sequence[Mapping[str, str]] = row["messages"]
        return found

    def step(self, turn: Turn) -> Reply:
        said = re.fullmatch(r"\s*(-?[0-9]{1,9})\s*", turn.text)
        if said is None:
            return Reply(done=True)
        guess = int(said[1])
        if guess == self._secret:
            return Reply(done=True, reward=1.0)
        return Reply(messages=[{"role": "user", "content": "higher" if guess < self._secret else "lower"}])
