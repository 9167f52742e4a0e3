"""The form of generation: fewer products, the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.inference.fused import fuse
from llmsuite.models.qat import fake_quantize_layers, fake_quantized
from tests.unit.families import CASES, REFERENCE, load, reference


def _logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with paddle.no_grad():
        return np.asarray(model(paddle.to_tensor(ids)).numpy())


@pytest.mark.parametrize("case", CASES)
def test_every_shape_of_every_family_has_its_logits(case: str) -> None:
    ids, expected = reference(case)
    model = load(REFERENCE / case)
    fuse(model)
    assert np.abs(_logits(model, ids) - expected).max() <= 1e-5


@pytest.mark.parametrize("pattern", ["q_proj", "gate_proj"])
def test_layers_that_round_their_inputs_stay_as_they_are(pattern: str) -> None:
    case = next(case for case in CASES if case.startswith("llama/"))
    ids, plain = reference(case)
    model = load(Path(REFERENCE / case))
    names = [name for name, _ in model.named_sublayers() if name.endswith(pattern)]
    fake_quantize_layers(model, names, rounds_weight=False)
    for _, layer in fake_quantized(model):
        layer.input_scale = 0.05
    before = _logits(model, ids)
    assert np.abs(before - plain).max() > 1e-3
    fuse(model)
    assert np.abs(_logits(model, ids) - before).max() <= 1e-5
