"""Fake-quantised runs on strategies: what is run, and how far they may be from one process.

Rounding is not continuous. An input, or a weight, that lies within float32's rounding error of the middle between two
steps of the grid may go to either, and the sums of two strategies differ by such errors: then this one value differs by
a whole step, 1/127 of the largest. So there are two claims, with a limit each:

- Where all values that are rounded are equal, everything is, to what float32 explains: the first step, whose weights
  are those of one process to the bit, and whose inputs are not rounded yet; and with it the first scales.
- Afterwards a few values in a million go to another step. One that does changes the loss of its token by up to some
  hundredths, in the mean over some 300 tokens of these runs by up to 4e-4: the limits below are a few times that. That
  all is rounded as it should be is told by the first claim, and by `tests/multi/test_qat_layer.py`, where a cut layer
  gets equal inputs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, LIMIT, OPTIMIZERS, ROUNDING, STEPS, Case, compare_gradients, four_layers, once

WEIGHTS = ("--qat.weight_bits=8",)
BOTH = (*WEIGHTS, "--qat.activation_bits=8")
_RATES = {"sgd": ("--train.learning_rate=0.05",), "adamw": ()}
"""A rate that magnifies less than that of the other comparisons what a turned value has changed."""
FLIPPED = {"loss": 2e-3, "grad_norm": 2e-2}
"""Tolerance of the steps after the first."""
FLIPPED_SCALE = 3e-2
"""Tolerance of a scale: the largest input may itself be one that was rounded otherwise a layer before."""
SCALE_LIMIT = 2 * 2 * math.sqrt(64) * ROUNDING
"""Tolerance of a scale in the first step, which is one value and not a mean of many. The largest input of an MLP's
last product is a product of two sums over the 64 hidden units, each known to sqrt(64) roundings, in either run; see
`test_experts._gradient_limits` for the source."""
_ROUNDING_ALONE = "self_attn.k_proj.bias "
"""Keys without rotation, as GPT's: their bias moves all scores of a query alike, so its gradient is rounding alone."""


def case(
    name: str,
    num_ranks: int = 1,
    parallel: Mapping[str, Any] | None = None,
    words: Sequence[str] = (),
    run: Sequence[str] = BOTH,
    family: str = "llama",
    stage: str = "sft",
    optimizer: str = "sgd",
    mutation: str | None = None,
    resume: bool = False,
) -> Case:
    """A fake-quantised run.

    Args:
        name: of its directory.
        num_ranks: of the launch.
        parallel: the section of the recipe.
        words: how it is computed; several ranks take micro-batches of 1, to add up gradients.
        run: what is computed; the run in one process has it too.
        family: of the model.
        stage: whose recipe is taken.
        optimizer: which of `OPTIMIZERS`.
        mutation: an error that is put in.
        resume: see `Case`.
    """
    micro = f"--train.micro_batch_size={8 if num_ranks == 1 else 1}"
    every = [
        "--train.weight_decay=0", "--train.min_lr_ratio=0", *COMMON, *OPTIMIZERS[optimizer], *_RATES[optimizer],
        *four_layers(family), *run,
    ]  # fmt: skip
    saved = ["--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}", "--engine.recompute=none"]
    given = [*saved, micro, f"--launch.num_devices={num_ranks}", f"--parallel={json.dumps(parallel or {})}", *words]
    return Case(name, num_ranks, once([*every, *given]), mutation, f"recipes/{family}/{stage}.json", resume=resume)


def scales(runner: Runner, name: str, step: int) -> dict[str, list[float]]:
    """What a checkpoint has of the scales."""
    path = runner.directory / name / "checkpoints" / f"step-{step}" / "state.json"
    found: dict[str, list[float]] = json.loads(path.read_text())["rounded"]
    return found


def problems(runner: Runner, one: str, many: str) -> list[str]:
    """What of a run is beyond the limits."""
    ours = runner.metrics(one)
    theirs = runner.metrics(many)
    assert len(ours) == STEPS
    assert max(abs(a["loss"] / ours[0]["loss"] - 1) for a in ours) > 1e-3, "nothing was learnt, so nothing is compared"
    if len(theirs) != STEPS:
        return [f"{len(theirs)} steps were recorded"]
    found = [told for told in compare_gradients(runner, one, many).problems if _ROUNDING_ALONE not in told]
    for step, (a, b) in enumerate(zip(ours, theirs), 1):
        for key, flipped in FLIPPED.items():
            difference = abs(b[key] / a[key] - 1)
            print(f"{many} step {step} {key} {difference:.1e}")
            if not difference <= (LIMIT if step == 1 else flipped):
                found.append(f"step {step}: {key} differs by {difference:.1e}")
        first = scales(runner, one, step)
        second = scales(runner, many, step)
        assert first.keys() == second.keys()
        for name, values in first.items():
            far = max((abs(y / x - 1) for x, y in zip(values, second[name], strict=True)), default=0.0)
            if not far <= (SCALE_LIMIT if step == 1 else FLIPPED_SCALE):
                found.append(f"step {step}: the scale of {name} differs by {far:.1e}")
    return found
