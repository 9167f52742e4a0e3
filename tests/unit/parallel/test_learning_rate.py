"""The learning rate of every step, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.parallel.optimizer import Optimizer
from tests.support import alone

COSINE_EIGHTHS = (1.0, 0.9619398, 0.8535534, 0.6913417, 0.5, 0.3086583, 0.1464466, 0.0380602)
"""(1 + cos(pi k / 8)) / 2 for k = 0 .. 7."""


def optimizer(total_steps: int, **keys: Any) -> Optimizer:
    train = TrainSection(
        **{"max_steps": total_steps, "global_batch_size": 1, "micro_batch_size": 1, "learning_rate": 1.0, **keys}
    )
    return alone.optimizer({"weight": paddle.create_parameter([1], "float32")}, train, total_steps)


def rates(total_steps: int, **keys: Any) -> list[float]:
    made = optimizer(total_steps, **keys)
    return [made.learning_rate(step) for step in range(1, total_steps + 1)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"lr_schedule": "constant"}, [1.0] * 10),
        ({"lr_schedule": "constant", "warmup_ratio": 0.4}, [0.25, 0.5, 0.75] + [1.0] * 7),
        ({"lr_schedule": "linear"}, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        (
            {"lr_schedule": "linear", "warmup_ratio": 0.2},
            [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125],
        ),
        (
            {"lr_schedule": "linear", "warmup_ratio": 0.2, "min_lr_ratio": 0.2},
            [0.5, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3],
        ),
        ({"lr_schedule": "cosine", "warmup_ratio": 0.2}, [0.5, 1.0, *COSINE_EIGHTHS]),
        (
            {"lr_schedule": "cosine", "warmup_ratio": 0.2, "min_lr_ratio": 0.1},
            [0.5, 1.0, *(0.1 + 0.9 * part for part in COSINE_EIGHTHS)],
        ),
        ({"lr_schedule": "cosine", "warmup_ratio": 1.0}, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
        ({"lr_schedule": "linear", "min_lr_ratio": 1.0}, [1.0] * 10),
        ({"lr_schedule": "constant", "learning_rate": 3e-4}, [3e-4] * 10),
        ({"lr_schedule": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75] + [1.0] * 7),
        (
            {"lr_schedule": "linear", "warmup_steps": 2, "warmup_from_zero": True},
            [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125],
        ),
        ({"lr_schedule": "wsd"}, [1.0] * 10),  # the only falling step is the first one, which has the full rate
        ({"lr_schedule": "wsd", "decay_ratio": 0.4}, [1.0] * 7 + [0.75, 0.5, 0.25]),
        (
            {"lr_schedule": "wsd", "decay_ratio": 0.4, "warmup_steps": 2, "min_lr_ratio": 0.2},
            [0.5] + [1.0] * 6 + [0.8, 0.6, 0.4],
        ),
        ({"lr_schedule": "wsd", "decay_ratio": 0.4, "decay_type": "sqrt"}, [1.0] * 7 + [0.5, 0.2928932, 0.1339746]),
        (
            {"lr_schedule": "wsd", "decay_ratio": 0.8, "decay_type": "cosine", "warmup_ratio": 0.2},
            [0.5, 1.0, *COSINE_EIGHTHS],
        ),
        (
            {"lr_schedule": "wsd", "decay_ratio": 1.0, "warmup_steps": 2},
            [0.5, 1.0, 1.0, *(k / 8 for k in range(7, 0, -1))],
        ),
        ({"lr_schedule": "wsd", "warmup_steps": 20}, [k / 20 for k in range(1, 11)]),
    ],
)
def test_ten_steps_have_the_rates_of_the_formula(keys: dict[str, Any], expected: list[float]) -> None:
    assert rates(10, **keys) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("ratio", "steps", "warmup"),
    [
        (0.0, 100, 0),
        (0.03, 100, 3),
        # 0.07 * 100 is 7.000000000000001 in floating point
        (0.07, 100, 7),
        (0.29, 100, 29),
        (0.001, 100, 1),
        (0.5, 5, 3),
    ],
)
def test_number_of_warmup_steps(ratio: float, steps: int, warmup: int) -> None:
    found = rates(steps, lr_schedule="constant", warmup_ratio=ratio)
    assert found[:warmup] == pytest.approx([(i + 1) / warmup for i in range(warmup)])
    assert found[warmup:] == [1.0] * (steps - warmup)
    # the last step of the warm-up has the full rate, the one before it has not
    assert sum(rate < 1 for rate in found) == max(0, warmup - 1)


@pytest.mark.parametrize(("ratio", "steps", "warmup"), [(0.1, 29, 2), (0.1, 30, 3), (0.1, 19, 2), (0.1, 9, 0)])
def test_warmup_steps_of_axolotl(ratio: float, steps: int, warmup: int) -> None:
    """Those of its `_configure_warmup_and_logging`: rounded down, and 2 in place of 1."""
    found = rates(steps, lr_schedule="constant", warmup_ratio=ratio, warmup_rounding="axolotl")
    assert found == pytest.approx([min(1, (i + 1) / max(warmup, 1)) for i in range(steps)])


@given(
    st.sampled_from(["linear", "cosine"]),
    st.integers(1, 300),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(1e-8, 10),
)
def test_the_rate_rises_to_its_peak_and_falls(
    schedule: str, steps: int, warmup: float, floor: float, peak: float
) -> None:
    keys = {"lr_schedule": schedule, "warmup_ratio": warmup, "min_lr_ratio": floor, "learning_rate": peak}
    made = optimizer(steps, **keys)
    found = [made.learning_rate(step) for step in range(1, steps + 1)]
    top = found.index(max(found))
    assert max(found) == pytest.approx(peak)
    assert all(rate > 0 for rate in found), "no step is wasted"
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)
    assert all(rate >= floor * peak * (1 - 1e-12) for rate in found[top:])
    if top < steps - 1:
        assert made.learning_rate(steps + 1) == pytest.approx(floor * peak, abs=1e-12 * peak)
        # spread evenly: no single step falls more than a straight line, or the middle of a half-wave, does
        steepest = peak * (1 - floor) / (steps - top - 1) * (math.pi / 2 if schedule == "cosine" else 1)
        assert all(a - b <= steepest * (1 + 1e-9) + 1e-12 * peak for a, b in zip(found[top:], found[top + 1 :]))
