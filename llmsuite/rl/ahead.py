"""Completions that are drawn ahead of the step that learns from them, in checkpoints.

On resuming, the weights that have drawn them are gone: so a checkpoint has the completions themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmsuite.rl.drawing import Drawn
from llmsuite.rl.rollouts import Begun


def state_of(begun: Mapping[int, Begun]) -> dict[str, Any]:
    """What has begun as JSON data, by step; it waits until it is drawn."""
    return {
        str(step): {
            "version": found.version,
            "groups": [[[d.ids, d.logprobs, d.finish_reason] for d in group] for group in found.pending()],
        }
        for step, found in begun.items()
    }


def begun_from(state: Mapping[str, Any], draws: bool) -> dict[int, Begun]:
    """What had begun, of `state_of`: on the rank that draws with the completions, on others without."""
    return {int(step): _ready(found, draws) for step, found in state.items()}


def _ready(found: Any, draws: bool) -> Begun:
    groups = found["groups"] if draws else []
    drawn = [[Drawn(np.zeros(0), ids, logprobs, reason) for ids, logprobs, reason in group] for group in groups]
    return Begun(found["version"], lambda: drawn)
