"""Dropout of adapters and PiSSA against HF PEFT's layers: outputs, gradients, and outputs after a step."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.adapters.layers.lora import LoraLinear
from llmsuite.adapters.layers.pissa import PissaLinear
from llmsuite.adapters.methods import adapter_config
from llmsuite.adapters.pissa import principal_factors
from llmsuite.models.dropout import TokenDropout
from tests.support.paths import REFERENCE

FOUND = json.loads((REFERENCE / "peft" / "adapters.json").read_text())
SIZES = FOUND["sizes"]
CASES = {
    name: {key: value if key == "rslora" else np.array(value, "float32") for key, value in case.items()}
    for name, case in FOUND["cases"].items()
}
LIMIT = 3e-6
"""Tolerance relative to the largest number: float32, and both libraries sum in different orders."""


class FixedMaskDropout(TokenDropout):
    """Our dropout, with the mask that torch has sampled."""

    kept: Any

    def mask(self, index: Any) -> Any:
        return paddle.to_tensor(self.kept != 0)[tuple(index)]


def linear(case: dict[str, Any]) -> paddle.nn.Linear:
    made = paddle.nn.Linear(*case["weight"].shape)
    made.weight.set_value(case["weight"])
    made.bias.set_value(case["bias"])
    made.weight.stop_gradient = made.bias.stop_gradient = True
    return made


def fill(layer: Any, **values: np.ndarray) -> None:
    for name, value in values.items():
        parameter = getattr(layer, name)
        if not parameter._is_initialized():
            parameter.initialize()
        parameter.set_value(value)


def near(found: Any, wanted: np.ndarray) -> None:
    value = found.numpy() if isinstance(found, paddle.Tensor) else found
    np.testing.assert_allclose(value, wanted, rtol=0, atol=LIMIT * np.abs(wanted).max())


def check(layer: Any, case: dict[str, Any], signs: np.ndarray) -> None:
    """The layer in training, its gradients, and in evaluation after a step. `signs`: of the columns of PEFT's A."""
    x = paddle.to_tensor(case["x"], stop_gradient=False)
    direction = paddle.to_tensor(case["direction"])
    layer.train()
    y = layer(x)
    near(y, case["y"])
    (y * direction).sum().backward()
    near(x.grad, case["gradient of x"])
    near(layer.lora_A.grad, case["gradient of A"] * signs)
    near(layer.lora_B.grad, case["gradient of B"] * signs[:, None])
    for parameter in (layer.lora_A, layer.lora_B):
        parameter.set_value(parameter.numpy() - SIZES["rate"] * parameter.grad.numpy())
    layer.eval()
    near(layer(x), case["y after a step"])


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("dropout")])
def test_dropout_with_the_same_mask(name: str) -> None:
    """PEFT too drops what goes into the adapter only, divides what is kept, and drops nothing in evaluation."""
    case = CASES[name]
    config = adapter_config(rank=SIZES["rank"], alpha=SIZES["alpha"], rslora=case["rslora"])
    layer: Any = LoraLinear(linear(case), config)
    layer.lora_dropout = FixedMaskDropout(SIZES["dropout"], "proj", 0, case["weight"].shape[0])
    layer.lora_dropout.kept = case["kept"]
    fill(layer, lora_A=case["A"], lora_B=case["B"])
    assert 0.5 < case["kept"].mean() < 0.9
    check(layer, case, np.ones(SIZES["rank"], "float32"))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("pissa")])
def test_pissa_begins_and_learns_as_with_a_changed_base(name: str) -> None:
    """PEFT takes the largest singular vectors off W; here W stays and they are taken off what the adapter adds."""
    case = CASES[name]
    config = adapter_config(init="pissa", rank=SIZES["rank"], alpha=SIZES["alpha"], rslora=case["rslora"])
    layer: Any = PissaLinear(linear(case), config)
    first, second = principal_factors(case["weight"], SIZES["rank"], layer.scaling)
    signs = np.sign((first * case["A"]).sum(0))
    near(first * signs, case["A"])  # singular vectors are known but for their sign
    near(second * signs[:, None], case["B"])
    fill(layer, lora_A=first, lora_B=second, lora_A0=first, lora_B0=second)
    check(layer, case, signs)
