"""The file `state.json` of a checkpoint: the step, the position in the stream of samples, and other small state."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class TrainState:
    """State of training other than model and optimizer. Its fields are the keys of `state.json`."""

    step: int
    """Number of optimizer steps done."""
    samples: int
    """Position in the stream of training samples."""
    seed: int
    recipe_sha256: str
    """Digest of the keys that decide the trained weights, with `begun_with`; resuming with another one is refused."""
    begun_with: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of `train` for the length of the run and its learning rate, with their values at its start; empty in
    checkpoints of versions in which they could not change."""
    schedule: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of the learning rate, see `llmsuite.parallel.learning_rate.Schedule`; empty in the same versions."""
    loss_scale: float | None = None
    """The loss scale of an fp16 run."""
    good_steps: int = 0
    """Steps without overflow since the loss scale changed."""
    rounded: dict[str, list[float]] | None = None
    """Fake-quantised layers of quantisation-aware training by name, with the state of the moving average over their
    inputs (`train.input_scales`); the list is empty where activations are not quantised."""
    norms: tuple[float, ...] = ()
    """Recent gradient norms, with which later ones are compared to detect spikes."""
    bad_steps: int = 0
    """Steps since `furthest` whose update was skipped."""
    furthest: int = 0
    """Highest step whose update was applied, where steps may be skipped; it can be above `step` in a run that was
    rolled back to a checkpoint."""
    stage: dict[str, Any] = dataclasses.field(default_factory=dict)
    """State of the stage, as JSON data, to resume from."""
    early_stopping: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Evaluations without an improvement so far, see `llmsuite.engine.early_stopping`; empty without early stopping."""
    loss_watchdog: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Steps with a high loss so far, see `llmsuite.engine.early_stopping`; empty without a watchdog."""
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)
    """Digests of the data files and of the initial weights, by key and name for messages."""
    rollouts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Completions that were sampled ahead of the steps that train on them, see `llmsuite.rl.in_flight`."""


def load_state(path: Path) -> TrainState:
    """Read the state of a checkpoint. Raises UserError when it was written by a newer llmsuite."""
    data = read_json_object(path / "state.json")
    if data.pop("format", None) != FORMAT:
        raise UserError(f"{path}: is of another checkpoint format; this llmsuite reads format {FORMAT}")
    return TrainState(**{**data, "norms": tuple(data.get("norms", ()))})
