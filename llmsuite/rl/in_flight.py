"""In-flight rollouts in checkpoints: completions that are sampled ahead of the step that trains on them.

After a resume the weights that sampled them no longer exist, so a checkpoint contains the completions themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmsuite.inference.group_sampling import SampledCompletion
from llmsuite.rl.rollouts import InFlightRollout


def in_flight_state(rollouts: Mapping[int, InFlightRollout]) -> dict[str, Any]:
    """The in-flight rollouts by step, as JSON data. Waits until they are sampled."""
    state: dict[str, Any] = {}
    for step, rollout in rollouts.items():
        groups = []
        for group in rollout.pending():
            groups.append([[completion.ids, completion.logprobs, completion.finish_reason] for completion in group])
        state[str(step)] = {"version": rollout.version, "groups": groups}
    return state


def restore_in_flight(state: Mapping[str, Any], makes_requests: bool) -> dict[int, InFlightRollout]:
    """The rollouts of `in_flight_state`, by step; without completions on ranks that make no requests."""
    return {int(step): _finished_rollout(saved, makes_requests) for step, saved in state.items()}


def _finished_rollout(saved: Any, makes_requests: bool) -> InFlightRollout:
    groups: list[list[SampledCompletion]] = []
    if makes_requests:
        for group in saved["groups"]:
            groups.append([SampledCompletion(np.zeros(0), ids, logprobs, reason) for ids, logprobs, reason in group])
    return InFlightRollout(saved["version"], lambda: groups)
