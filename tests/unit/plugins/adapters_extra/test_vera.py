"""VeRA: what its layer computes, its initial values, and files of PaddleNLP that lack something."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from llmsuite.adapters.initial_values import with_adapter_values
from llmsuite.adapters.methods import adapter_config
from llmsuite.plugins.adapters_extra.layers.vera import VeraLinear
from llmsuite.plugins.adapters_extra.vera import VeraFiles
from tests.support.lora_layers import filled, linear


def test_vera_by_hand() -> None:
    layer = filled(VeraLinear(linear(6, 10), adapter_config("vera", rank=3, alpha=6.0)))
    x = paddle.randn([2, 4, 6])
    weights = paddle.randn([2, 4, 10])
    y = layer(x)
    update = 2.0 * layer.lora_A0 @ paddle.diag(layer.lora_d) @ layer.lora_B0 @ paddle.diag(layer.lora_b)
    np.testing.assert_allclose(y.numpy(), (layer.base(x) + x @ update).numpy(), rtol=1e-4, atol=1e-5)
    (y * weights).sum().backward()
    scaled = (2.0 * (x @ layer.lora_A0 * layer.lora_d) @ layer.lora_B0 * weights).sum([0, 1])
    between = (2.0 * (x @ layer.lora_A0) * ((weights * layer.lora_b) @ layer.lora_B0.T)).sum([0, 1])
    np.testing.assert_allclose(layer.lora_b.grad.numpy(), scaled.numpy(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(layer.lora_d.grad.numpy(), between.numpy(), rtol=1e-3, atol=1e-4)
    assert layer.lora_A0.grad is None
    assert layer.lora_B0.grad is None


def test_vera_learns_where_that_of_paddlenlp_does_not() -> None:
    """With its factors frozen, the vectors of paddlenlp's own get no gradient: its B is zero. The formula is the same,
    and W is not copied."""
    base = linear(6, 10)
    x = paddle.randn([2, 6])
    layer = filled(VeraLinear(base, adapter_config("vera", rank=3, alpha=6.0)))
    assert layer.weight is base.weight
    theirs = VeraLinear.__mro__[2](base, 6, 10, r=3, vera_alpha=6)
    assert type(theirs).__module__ == "paddlenlp.peft.vera.vera_layers"
    theirs.bias.set_value(base.bias)
    theirs(x).square().sum().backward()
    assert float(theirs.vera_b.grad.abs().max()) == float(theirs.vera_d.grad.abs().max()) == 0
    for name, own in (("vera_A", "lora_A0"), ("vera_B", "lora_B0"), ("vera_d", "lora_d"), ("vera_b", "lora_b")):
        getattr(theirs, name).set_value(getattr(layer, own))
    np.testing.assert_allclose(layer(x).numpy(), theirs(x).numpy(), rtol=1e-4, atol=1e-4)


def test_layers_of_vera_share_one_pair_and_learn_at_once() -> None:
    shapes = {"k.lora_A0": [6, 3], "q.lora_A0": [9, 3], "k.lora_B0": [3, 6], "q.lora_B0": [3, 9]}
    read = with_adapter_values(lambda *_: np.zeros(0), 3, shapes, adapter_config("vera", rank=3))
    of = {name: read(name, shape, [slice(0, size) for size in shape]) for name, shape in shapes.items()}
    np.testing.assert_allclose(of["k.lora_A0"] * 6**0.5, of["q.lora_A0"][:6] * 9**0.5, rtol=1e-5)
    np.testing.assert_array_equal(of["k.lora_B0"], of["q.lora_B0"][:, :6])
    part = read("q.lora_B0", [3, 9], [slice(0, 3), slice(4, 7)])
    np.testing.assert_array_equal(part, of["q.lora_B0"][:, 4:7])
    assert read("q.lora_d", [3], [slice(0, 3)]).tolist() == [np.float32(0.1)] * 3
    assert read("q.lora_b", [9], [slice(4, 7)]).tolist() == [0.0] * 3
    assert np.abs(of["q.lora_A0"]).min() > 0
    assert np.abs(of["q.lora_B0"]).min() > 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"vera_A": None, "vera_B": None}, "q has no vera_A and no vera_B; PaddleNLP saves only trained parameters"),
        ({"vera_d": (4,)}, r"'q.vera_d' is [4], which does not match 'q.vera_A' of [6, 3]"),
        ({"vera_b": (10, 1)}, r"'q.vera_b' is [10, 1], which does not match 'q.vera_B' of [3, 10]"),
    ],
    ids=str,
)
def test_stored_parameters_that_cannot_be_folded(
    changes: dict[str, tuple[int, ...] | None], problem: str | None
) -> None:
    shapes = {"vera_A": (6, 3), "vera_B": (3, 10), "vera_d": (3,), "vera_b": (10,), **changes}
    found = VeraFiles().problem("q", {kind: shape for kind, shape in shapes.items() if shape is not None})
    assert found is None if problem is None else str(found).startswith(problem)
