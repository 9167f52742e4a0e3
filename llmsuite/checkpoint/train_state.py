"""The small part of a checkpoint, `state.json`: the step, and the position in the stream of samples."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.files import read_json_object

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of training besides model and optimizer. Its fields are the keys of `state.json`."""

    step: int
    """Optimizer steps done."""
    samples: int
    """Position in the stream of training samples."""
    seed: int
    recipe_sha256: str
    """Digest of the keys that decide the trained weights, with `begun_with`; resuming with another one is refused."""
    begun_with: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The keys of `train` that say how long the run is and how its learning rate moves, as it began; empty in
    checkpoints of versions in which they could not change."""
    schedule: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the learning rate of this step came from, see `llmsuite.parallel.learning_rate.Schedule`; empty as well."""
    loss_scale: float | None = None
    """The loss scale of an fp16 run."""
    good_steps: int = 0
    """Steps without overflow since the loss scale changed."""
    rounded: dict[str, list[float]] | None = None
    """The fake-quantised layers of quantisation-aware training by name, with the state of the moving average over
    their inputs (`train.input_scales`); the list is empty where inputs are not rounded."""
    norms: tuple[float, ...] = ()
    """Gradient norms that later ones are compared with, where spikes are looked for."""
    bad_steps: int = 0
    """Steps since `furthest` whose update was skipped."""
    furthest: int = 0
    """The last step whose update was applied, where steps may be skipped; a run that was rolled back to a checkpoint
    has been there before."""
    stage: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the stage needs to go on, as JSON data."""
    rollouts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Completions that were drawn ahead of the steps that learn from them, see `llmsuite.rl.ahead`."""


def load_state(path: Path) -> TrainState:
    """The state in a checkpoint. Raises UserError when it was written by a newer llmsuite."""
    data = read_json_object(path / "state.json")
    if data.pop("format", None) != FORMAT:
        raise UserError(f"{path}: is of another checkpoint format; this llmsuite reads format {FORMAT}")
    return TrainState(**{**data, "norms": tuple(data.get("norms", ()))})
