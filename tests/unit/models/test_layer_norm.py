"""LayerNorm: its gradient does not depend on what else is trained."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from llmsuite.models.blocks import LayerNorm
from llmsuite.models.initial_values import initial_values

SIZE = 24


def gradient_of(frozen: tuple[bool, bool]) -> tuple[np.ndarray, np.ndarray]:
    """Output of a norm, and the gradient of its input; `frozen`: gain and bias."""
    norm = LayerNorm(SIZE, 1e-5)
    for name, parameter, is_frozen in zip(("gain", "bias"), norm.parameters(), frozen):
        parameter.set_value(initial_values(0, name, [SIZE], 1.0))
        parameter.stop_gradient = is_frozen
    x = paddle.to_tensor(initial_values(0, "x", [2, 5, SIZE], 1.0), stop_gradient=False)
    y = norm(x)
    (y * paddle.to_tensor(initial_values(0, "direction", [2, 5, SIZE], 1.0))).sum().backward()
    return y.numpy(), x.grad.numpy()


@pytest.mark.parametrize("frozen", [(True, True), (True, False), (False, True)])
def test_a_frozen_norm_has_the_gradient_of_a_trained_one(frozen: tuple[bool, bool]) -> None:
    for found, wanted in zip(gradient_of(frozen), gradient_of((False, False)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
