"""VeRA's frozen factors and what PiSSA begins with."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from llmsuite.errors import UserError
from llmsuite.models.lora_layers import PissaLinear, VeraLinear
from llmsuite.models.peft_configs import lora_config
from llmsuite.train.adapters import PrincipalFactors, principal_factors, with_factors
from tests.unit.models.test_adapters import section
from tests.unit.models.test_lora_layers import filled, linear

# VeRA


def test_vera_by_hand() -> None:
    layer = filled(VeraLinear(linear(6, 10), lora_config("vera", r=3, lora_alpha=6.0)))
    x, weights = paddle.randn([2, 4, 6]), paddle.randn([2, 4, 10])
    y = layer(x)
    update = 2.0 * layer.lora_A0 @ paddle.diag(layer.lora_d) @ layer.lora_B0 @ paddle.diag(layer.lora_b)
    np.testing.assert_allclose(y.numpy(), (layer.base(x) + x @ update).numpy(), rtol=1e-4, atol=1e-5)
    (y * weights).sum().backward()
    behind = (2.0 * (x @ layer.lora_A0 * layer.lora_d) @ layer.lora_B0 * weights).sum([0, 1])
    between = (2.0 * (x @ layer.lora_A0) * ((weights * layer.lora_b) @ layer.lora_B0.T)).sum([0, 1])
    np.testing.assert_allclose(layer.lora_b.grad.numpy(), behind.numpy(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(layer.lora_d.grad.numpy(), between.numpy(), rtol=1e-3, atol=1e-4)
    assert layer.lora_A0.grad is None
    assert layer.lora_B0.grad is None


def test_vera_learns_where_that_of_paddlenlp_does_not() -> None:
    """With its factors frozen, the vectors of paddlenlp's own get no gradient: its B is zero. The formula is the same,
    and W is not copied."""
    base, x = linear(6, 10), paddle.randn([2, 6])
    layer = filled(VeraLinear(base, lora_config("vera", r=3, lora_alpha=6.0)))
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
    read = with_factors(lambda *_: np.zeros(0), 3, shapes, lora=section(method="vera"))
    of = {name: read(name, shape, [slice(0, size) for size in shape]) for name, shape in shapes.items()}
    np.testing.assert_allclose(of["k.lora_A0"] * 6**0.5, of["q.lora_A0"][:6] * 9**0.5, rtol=1e-5)
    np.testing.assert_array_equal(of["k.lora_B0"], of["q.lora_B0"][:, :6])
    part = read("q.lora_B0", [3, 9], [slice(0, 3), slice(4, 7)])
    np.testing.assert_array_equal(part, of["q.lora_B0"][:, 4:7])
    assert read("q.lora_d", [3], [slice(0, 3)]).tolist() == [np.float32(0.1)] * 3
    assert read("q.lora_b", [9], [slice(4, 7)]).tolist() == [0.0] * 3
    assert np.abs(of["q.lora_A0"]).min() > 0
    assert np.abs(of["q.lora_B0"]).min() > 0


# PiSSA


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (6, 50)], ids=str)
def test_principal_factors_are_the_best_of_their_rank(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(0).normal(size=shape).astype("float32")
    first, second = principal_factors(matrix, 4, 0.5)
    u, s, v = np.linalg.svd(matrix.astype("float64"))
    np.testing.assert_allclose(0.5 * first @ second, (u[:, :4] * s[:4]) @ v[:4], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(first, axis=0), np.linalg.norm(second, axis=1), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(first, axis=0) ** 2, s[:4] / 0.5, rtol=1e-5)
    assert (first[np.abs(first).argmax(0), np.arange(4)] > 0).all()


def test_pissa_by_hand() -> None:
    layer = filled(PissaLinear(linear(6, 10), lora_config(init="pissa", r=3, lora_alpha=6.0)))
    x, weights = paddle.randn([2, 4, 6]), paddle.randn([2, 4, 10])
    update = layer.lora_A @ layer.lora_B - layer.lora_A0 @ layer.lora_B0
    y = layer(x)
    np.testing.assert_allclose(y.numpy(), (layer.base(x) + 2.0 * x @ update).numpy(), rtol=1e-4, atol=1e-5)
    (y * weights).sum().backward()
    expected = 2.0 * paddle.einsum("bli,blo,ro->ir", x, weights, layer.lora_B)
    np.testing.assert_allclose(layer.lora_A.grad.numpy(), expected.numpy(), rtol=1e-3, atol=1e-4)
    assert layer.lora_A0.grad is None
    assert layer.lora_B0.grad is None
    layer.is_on = False
    np.testing.assert_array_equal(layer(x).numpy(), layer.base(x).numpy())


def test_more_rank_than_singular_vectors_is_refused() -> None:
    shapes = {"q.weight": [4, 9]}
    principal = PrincipalFactors(lambda *_: np.ones([4, 9], "float32"), shapes, section(rank=5, init="pissa"))
    with pytest.raises(UserError, match=r"lora.rank: is 5, but q is 4 x 9 and has no more than 4"):
        principal.read("q", 0, [slice(0, 4), slice(0, 5)])
