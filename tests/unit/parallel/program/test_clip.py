"""A program updates nothing in a bad step, and decides by exactly the numbers that it outputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.parallel.program.clip import largest_float32
from llmsuite.parallel.program.layout import MeshLayout
from llmsuite.parallel.program.optimizer import ProgramOptimizer
from llmsuite.parallel.program.programs import Options, StepPrograms
from tests.support import alone
from tests.support.step_programs import ADAMW, SGD, Product

TRAINS = {
    "sgd": SGD,
    "adamw": ADAMW,
    "sgd, not clipped": dataclasses.replace(SGD, max_grad_norm=None),
    "adamw, not clipped": dataclasses.replace(ADAMW, max_grad_norm=None),
}


class Run:
    """A model and its programs; inputs "added" are added to the loss, which no gradient sees."""

    def __init__(self, train: TrainSection, scales_loss: bool = False):
        self.model = Product()
        self.optimizer = ProgramOptimizer(alone.shards({"vector": self.model.vector}), train, 4)
        self.programs = StepPrograms(
            MeshLayout(self.model), self.optimizer, self._loss, options=Options(scales_loss=scales_loss)
        )

    @staticmethod
    def _loss(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"loss": ((model(inputs["x"]).square() + inputs["added"]) * inputs["weights"]).sum()}

    def step(self, step: int, parts: int = 2, **more: Any) -> dict[str, float]:
        batch = {**_batch(step), **{name: value for name, value in more.items() if name in ("x", "added")}}
        limits = {name: value for name, value in more.items() if name not in batch}
        return self.programs.run(step, batch, parts, **limits)

    def bits(self) -> list[bytes]:
        """Bytes of the parameter, and of all state of the optimizer."""
        values = [self.model.vector, *self.optimizer.values.values()]
        return [value.numpy().tobytes() for value in values]


def _batch(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    weights = draw.random([4, 2], "float32")
    return {
        "x": draw.normal(size=[4, 2, 3]).astype("float32"),
        "added": np.zeros([4, 2], "float32"),
        "weights": weights / weights.sum(),
    }


def _with(shape: list[int], value: float) -> np.ndarray:
    """An array with one number, in the second of two micro-batches."""
    found = np.zeros(shape, "float32")
    found[-1, 0] = value
    return found


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("train", TRAINS)
def test_a_bad_step_leaves_every_bit_as_it_was(train: str, parts: int) -> None:
    """The steps after it are the same as in a run without it."""
    run = Run(TRAINS[train])
    other = Run(TRAINS[train])
    for each in (run, other):
        assert each.step(1, parts)["updated"] == 1
    before = run.bits()
    for value in (math.nan, math.inf, -math.inf, 1e30):  # of which the last one has squares that overflow
        outputs = run.step(2, parts, x=_batch(2)["x"] + _with([4, 2, 3], value))
        assert outputs["updated"] == 0
        assert not math.isfinite(outputs["grad_norm"])
        assert run.bits() == before
    outputs = run.step(2, parts, largest_norm=1e-3)
    assert (outputs["updated"], outputs["grad_norm"] > 1e-3) == (0, True)
    assert run.bits() == before
    for each in (run, other):
        assert each.step(3, parts)["updated"] == 1
    assert run.bits() == other.bits() != before


@pytest.mark.parametrize("train", ["sgd", "adamw"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_seen_though_its_gradient_is(train: str, value: float) -> None:
    run = Run(TRAINS[train])
    run.step(1)
    before = run.bits()
    outputs = run.step(2, added=_with([4, 2], value))
    assert not math.isfinite(outputs["loss"])
    assert outputs["updated"] == 0
    assert run.bits() == before


def test_a_sum_of_finite_losses_is_finite() -> None:
    """Though that of two micro-batches is not in float32: each of them is judged by itself."""
    added = _with([4, 2], 2.0**127)
    batch = {"x": np.zeros([4, 2, 3], "float32"), "added": added + added[::-1], "weights": np.ones([4, 2], "float32")}
    outputs = Run(SGD).programs.run(1, batch, 2)
    assert (outputs["loss"], outputs["updated"]) == (2.0**128, 1)


@pytest.mark.parametrize("train", ["sgd", "adamw"])
def test_the_limit_is_exact(train: str) -> None:
    """A norm that is just the limit is accepted; limits are float64, between two float32."""
    norm = Run(TRAINS[train]).step(1)["grad_norm"]
    below = float(np.nextafter(np.float32(norm), np.float32(0)))
    for limit, expected in ((norm, 1), (math.nextafter(norm, 0), 0), ((norm + below) / 2, 0), (below, 0), (1e300, 1)):
        outputs = Run(TRAINS[train]).step(1, largest_norm=limit)
        assert (outputs["updated"], outputs["grad_norm"]) == (expected, norm), limit


# no subnormal numbers, which are 0 to a processor after a library has set that mode
@given(
    st.floats(0, allow_nan=False, allow_subnormal=False),
    st.just(math.nan) | st.floats(0, width=32, allow_subnormal=False),
)
def test_a_limit_in_float32_decides_as_that_in_float64(limit: float, norm: float) -> None:
    assert (np.float32(norm) <= np.float32(largest_float32(limit))) == (math.isfinite(norm) and norm <= limit)


@pytest.mark.parametrize("train", TRAINS)
def test_a_scaled_loss_teaches_the_same(train: str) -> None:
    run = Run(TRAINS[train])
    other = Run(TRAINS[train], scales_loss=True)
    for step, scale in ((1, 1024.0), (2, 0.5), (3, 2.0**40)):
        outputs = run.step(step)
        assert other.step(step, loss_scale=scale) == outputs  # powers of two round nothing
        assert run.bits() == other.bits()
    before = run.bits()
    outputs = other.step(4, loss_scale=1e38)
    assert (outputs["updated"], math.isfinite(outputs["grad_norm"])) == (0, False)
    assert other.bits() == before
