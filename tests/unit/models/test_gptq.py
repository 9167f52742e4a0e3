"""GPTQ: what is rounded by the inputs of a layer changes its outputs less, and is stored without another error."""

from __future__ import annotations

import numpy as np
import pytest

from llmsuite.models.block_quant import BlockFormat
from llmsuite.models.gptq import rounded_by_inputs


def case(num_inputs: int, num_outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """A matrix, and inputs [N, I] that belong together as those of models do."""
    random = np.random.default_rng(num_inputs)
    mixed = random.normal(size=(num_inputs, num_inputs)) * np.exp(random.normal(size=num_inputs))[:, None]
    inputs = random.normal(size=(4 * num_inputs, num_inputs)) @ mixed
    return random.normal(size=(num_inputs, num_outputs)).astype("float32"), inputs


@pytest.mark.parametrize("dtype", ["nf4", "fp4", "int4"])
@pytest.mark.parametrize(("num_inputs", "block"), [(128, 64), (48, 16)])
def test_outputs_change_less_and_blocks_are_kept(dtype: str, num_inputs: int, block: int) -> None:
    weight, inputs = case(num_inputs, 40)
    form = BlockFormat(dtype, block)
    found = rounded_by_inputs(weight, inputs.T @ inputs, form)

    def error(values: np.ndarray) -> float:
        return float(np.square(inputs @ (values.astype("float64") - weight)).sum())

    assert error(found) < 0.6 * error(form.rounded(weight))
    assert np.array_equal(form.rounded(found), found), "it is stored as it is"
    half = found.astype("float16").astype("float32")
    assert np.array_equal(form.quantise(half)[0], form.quantise(found)[0]), "the same codes from 16 bits"


def test_inputs_that_do_not_belong_together_leave_plain_rounding() -> None:
    weight, _ = case(64, 8)
    form = BlockFormat("nf4", 64)
    assert np.array_equal(rounded_by_inputs(weight, np.eye(64), form), form.rounded(weight))


def test_inputs_never_seen_and_zeros() -> None:
    weight, inputs = case(64, 8)
    inputs[:, 5] = 0
    weight[:, 3] = 0
    found = rounded_by_inputs(weight, inputs.T @ inputs, BlockFormat("nf4", 64))
    assert np.isfinite(found).all()
    assert not found[:, 3].any()
