"""Initial values of PiSSA and OLoRA, and what their layer computes."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from llmsuite.adapters.layers.pissa import PissaLinear
from llmsuite.adapters.methods import adapter_config
from llmsuite.adapters.olora import Olora, OrthonormalFactors
from llmsuite.adapters.pissa import PrincipalFactors, principal_factors
from llmsuite.base.errors import UserError
from tests.support.lora_layers import filled, linear


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (6, 50)], ids=str)
def test_principal_factors_are_the_best_of_their_rank(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(0).normal(size=shape).astype("float32")
    first, second = principal_factors(matrix, 4, 0.5)
    u, s, v = np.linalg.svd(matrix.astype("float64"))
    np.testing.assert_allclose(0.5 * first @ second, (u[:, :4] * s[:4]) @ v[:4], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(first, axis=0), np.linalg.norm(second, axis=1), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(first, axis=0) ** 2, s[:4] / 0.5, rtol=1e-5)
    assert (first[np.abs(first).argmax(0), np.arange(4)] > 0).all()


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (6, 50), (50, 4)], ids=str)
def test_orthonormal_factors_are_those_of_a_full_decomposition(shape: tuple[int, int]) -> None:
    """As PEFT has them: Q, R = qr(W'), B = Q[:, :rank] and A = R[:rank], of W' = W transposed, up to signs that A and B
    share."""
    matrix = np.random.default_rng(0).normal(size=shape).astype("float32")
    factors = OrthonormalFactors(lambda *_: matrix, {"q.weight": shape}, adapter_config(init="olora", rank=4))
    first = factors.read("q", 0, [slice(0, shape[0]), slice(0, 4)])
    second = factors.read("q", 1, [slice(0, 4), slice(0, shape[1])])
    q, triangle = np.linalg.qr(matrix.astype("float64").T)
    signs = np.sign(np.diag(triangle)[:4])
    np.testing.assert_allclose(second, (q[:, :4] * signs).T, atol=1e-6)
    np.testing.assert_allclose(first, (triangle[:4] * signs[:, None]).T, atol=1e-5)
    np.testing.assert_allclose(second @ second.T, np.eye(4), atol=1e-6)
    np.testing.assert_allclose((first @ second)[:4], matrix[:4], atol=1e-5)  # rows that B spans
    assert isinstance(adapter_config(init="olora", rank=4).method, Olora)


def test_pissa_by_hand() -> None:
    layer = filled(PissaLinear(linear(6, 10), adapter_config(init="pissa", rank=3, alpha=6.0)))
    x = paddle.randn([2, 4, 6])
    weights = paddle.randn([2, 4, 10])
    update = layer.lora_A @ layer.lora_B - layer.lora_A0 @ layer.lora_B0
    y = layer(x)
    np.testing.assert_allclose(y.numpy(), (layer.base(x) + 2.0 * x @ update).numpy(), rtol=1e-4, atol=1e-5)
    (y * weights).sum().backward()
    expected = 2.0 * paddle.einsum("bli,blo,ro->ir", x, weights, layer.lora_B)
    np.testing.assert_allclose(layer.lora_A.grad.numpy(), expected.numpy(), rtol=1e-3, atol=1e-4)
    assert layer.lora_A0.grad is None
    assert layer.lora_B0.grad is None
    layer.is_enabled = False
    np.testing.assert_array_equal(layer(x).numpy(), layer.base(x).numpy())


def test_more_rank_than_singular_vectors_is_refused() -> None:
    shapes = {"q.weight": [4, 9]}
    principal = PrincipalFactors(lambda *_: np.ones([4, 9], "float32"), shapes, adapter_config(init="pissa", rank=5))
    with pytest.raises(UserError, match=r"lora.rank: is 5, but q is 4 x 9 and has no more than 4"):
        principal.read("q", 0, [slice(0, 4), slice(0, 5)])
    orthonormal = OrthonormalFactors(lambda *_: np.ones([4, 9]), shapes, adapter_config(init="olora", rank=5))
    with pytest.raises(UserError, match="has no more than 4 orthonormal rows for olora"):
        orthonormal.read("q", 0, [slice(0, 4), slice(0, 5)])
