"""What the tests of single losses share: values and slopes at given places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import pytest

Loss = Callable[..., Any]


def check(loss: Loss, places: Sequence[tuple[float, ...]], expected: Sequence[float]) -> None:
    """Compare a loss at several places (one number an argument) with numbers worked out by hand."""
    arguments = [paddle.to_tensor(list(column), dtype="float32") for column in zip(*places)]
    np.testing.assert_allclose(loss(*arguments).numpy(), expected, rtol=1e-6, atol=2e-6)


def slopes(loss: Loss, *place: float) -> list[float]:
    """Derivatives by each argument at one place."""
    at = [paddle.to_tensor([number], dtype="float32", stop_gradient=False) for number in place]
    loss(*at).sum().backward()
    return [float(number.grad.item()) for number in at]


def near(*numbers: float) -> Any:
    return pytest.approx(list(numbers), rel=1e-5, abs=1e-7)
