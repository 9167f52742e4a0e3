"""How far numbers may be off by rounding alone, from how they change with weights that are moved a little.

Products of inner length n, computed by rounding to u, are those of weights that are off by some sqrt(n) u (Higham and
Mary 2019, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41), here of the hidden size.
With k the condition of a number, its relative change for a relative change of the weights, and as either of two runs
may be off by so much, they may differ by 2 sqrt(n) u k. The condition is measured with changes so much larger than
rounding that the processor does not matter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from tests.multi.conftest import Runner
from tests.parity.cases import ROUNDING, STEPS, Case, first_gradients, norm, plan_of
from tests.parity.mutations import NUDGE, NUDGES

BF16 = 2.0**-8
"""Largest relative error of a number that is rounded to bfloat16. Each input of a product is off by so much at most;
that sums are long does not matter, as they are float32. So a product is that of a matrix that is off by as much, and
two runs may differ by 2 k times that; typical errors are 0.4 of the largest, and those of two runs partly the same."""


def nudged(one: Case) -> list[Case]:
    """Runs of one process with weights that are moved: what the limits of all that is compared with it come from."""
    return [dataclasses.replace(one, name=f"{one.name}, {mutation}", mutation=mutation) for mutation in NUDGES]


def gradient_limits(runner: Runner, one: Case) -> dict[str, float]:
    """How far the first step's gradient of each parameter may be off, relative; not of those that are zero."""
    (exact,), moved = first_gradients(runner, one.name), [first_gradients(runner, run.name)[0] for run in nudged(one)]
    return _limits(one, exact, moved)


def change_limits(runner: Runner, one: Case, stem: str, least: float) -> dict[str, float]:
    """How far what training has changed in each parameter may be off, as a part of that change: `least` or more."""
    exact, *moved = (_changes(runner, run.name, stem) for run in (one, *nudged(one)))
    limits = _limits(one, exact, moved)
    return {name: max(least, limits.get(name, 0.0)) for name in exact}


def _changes(runner: Runner, name: str, stem: str) -> dict[str, np.ndarray]:
    first, last = (runner.weights(name, step, stem) for step in (1, STEPS))
    return {key: value.astype("float64") - first[key] for key, value in last.items()}


def _limits(one: Case, exact: Mapping[str, np.ndarray], moved: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    return {
        # of three, one may have sent a token to other experts, which is another function and not its slope
        name: _rounding(one) / NUDGE * float(np.median([norm(m[name] - value) / norm(value) for m in moved]))
        for name, value in exact.items()
        if value.any()
    }


def bf16_gradient_limits(runner: Runner, one: Case) -> dict[str, float]:
    """As `gradient_limits`, for products whose inputs are rounded to bfloat16: see `BF16`."""
    return {name: _bf16_scale(one) * limit for name, limit in gradient_limits(runner, one).items()}


def bf16_change_limits(runner: Runner, one: Case, stem: str) -> dict[str, float]:
    """As `change_limits`, for the same."""
    return {name: _bf16_scale(one) * limit for name, limit in change_limits(runner, one, stem, 0.0).items()}


def _rounding(one: Case) -> float:
    return 2 * math.sqrt(plan_of(one).model.config.hidden_size) * ROUNDING


def _bf16_scale(one: Case) -> float:
    return 2 * BF16 / _rounding(one)


def metric_limits(runner: Runner, one: Case) -> dict[str, float]:
    """How far the loss and the gradient norm of a step may be off, relative."""
    exact = runner.metrics(one.name)
    moved = [runner.metrics(run.name) for run in nudged(one)]
    return {
        key: _rounding(one)
        / NUDGE
        * max(abs(b[key] / a[key] - 1) for run in moved for a, b in zip(exact, run, strict=True))
        for key in ("loss", "grad_norm")
    }


def bf16_metric_limits(runner: Runner, one: Case) -> dict[str, float]:
    """As `metric_limits`, for products whose inputs are rounded to bfloat16."""
    return {key: _bf16_scale(one) * limit for key, limit in metric_limits(runner, one).items()}


def check_bf16_metrics(runner: Runner, one: str, many: str, limits: Mapping[str, float]) -> None:
    """That two runs have the same tokens, and metrics as close as `bf16_metric_limits` says, in every step."""
    for step, (ours, theirs) in enumerate(zip(runner.metrics(one), runner.metrics(many), strict=True), 1):
        assert ours["tokens"] == theirs["tokens"]
        for key, limit in limits.items():
            far = abs(theirs[key] / ours[key] - 1)
            print(f"{many}, step {step}: {key} {far:.1e} of at most {limit:.1e}")
            assert far <= limit, (step, key)
