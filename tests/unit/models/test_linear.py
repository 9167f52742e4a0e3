"""Linear layers with a choice of their kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn

from llmsuite.models.linear import Linear, adopt_linears, has_own_kernel, is_matrix, is_plain_linear


class Scaled(nn.Linear):
    def forward(self, x: Any) -> Any:
        return 3.0 * super().forward(x)


def test_layers_of_paddle_are_adopted_with_parameters_and_hooks() -> None:
    shared = nn.Linear(3, 2)
    model = nn.LayerList([nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared), Scaled(3, 2), Linear(3, 2)])
    seen = list[Any]()
    shared.register_forward_post_hook(lambda layer, inputs, output: seen.append(output.shape))
    names = [name for name, _ in model.named_parameters()]
    parameters = [id(parameter) for parameter in model.parameters()]
    x = paddle.to_tensor(np.random.default_rng(0).normal(size=[4, 3]), "float32")
    expected = [part(x).numpy() for part in model]
    before = list(model)
    adopt_linears(model)
    assert type(model[0][0]) is Linear
    assert model[1][0] is model[0][0]
    assert list(model)[2:] == before[2:], "subclasses keep their code"
    assert [name for name, _ in model.named_parameters()] == names
    assert [id(parameter) for parameter in model.parameters()] == parameters
    seen.clear()
    for part, wanted in zip(model, expected, strict=True):
        assert np.array_equal(part(x).numpy(), wanted)
    assert seen == [[4, 2]] * 2


def test_a_kernel_gets_input_matrix_and_bias() -> None:
    layer = Linear(3, 2)
    given = list[Any]()

    def kernel(x: Any, weight: Any, bias: Any) -> Any:
        given.append((weight, bias))
        return paddle.matmul(x, weight) + bias + 1.0

    x = paddle.ones([1, 3])
    plain = layer(x).numpy()
    assert is_plain_linear(layer)
    layer.kernel = kernel
    assert np.allclose(layer(x).numpy(), plain + 1.0)
    ((weight, bias),) = given
    assert weight is layer.weight
    assert bias is layer.bias
    assert has_own_kernel(layer)
    assert is_matrix(layer)
    assert not is_plain_linear(layer)


def test_other_layers_are_no_matrices() -> None:
    replaced = nn.Linear(3, 2)
    replaced.forward = lambda x: x
    assert is_matrix(nn.Linear(3, 2))
    assert not any(is_matrix(layer) for layer in (Scaled(3, 2), replaced, nn.Tanh()))
