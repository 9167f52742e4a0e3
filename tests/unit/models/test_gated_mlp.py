"""A gated MLP between whose products all is bfloat16: numbers against float64 rounded in the same places, and what it
keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import GatedMLP
from llmsuite.models.linear_ops import LinearOps, use_linear_ops
from llmsuite.models.shape_spec import GatedMLP as Size
from llmsuite.models.shape_spec import GroupedQuery, LayerSpec
from llmsuite.planning import activations
from llmsuite.planning.activations import ActivationSettings, MicroBatch
from tests.support.allocated import allocated
from tests.support.compiled_layers import compiled
from tests.support.devices import cpu_backend
from tests.support.linear_forms import FORMS, leaf, random, rounded

HIDDEN = 48
INNER = 80
NEAR = 2.0**-6
"""Tolerance, relative to the largest number, of an intermediate number that is rounded to bfloat16."""


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def ops(request: pytest.FixtureRequest) -> Ops:
    return cpu_backend(multiplies_bf16=request.param).ops("bf16")


def mlp_of(ops: Ops, bias: bool = False) -> GatedMLP:
    mlp = GatedMLP(HIDDEN, INNER, ops, bias)
    for seed, parameter in enumerate(mlp.parameters()):
        parameter.set_value(random(*parameter.shape, seed=seed) / parameter.shape[0] ** 0.5)
    use_linear_ops(mlp, LinearOps(ops))
    return mlp


def check(found: Any, expected: np.ndarray) -> None:
    """Few are rounded to another side, by the order of float32 sums."""
    far = np.abs(found.astype("float32").numpy() - expected) / np.abs(expected).max()
    assert np.median(far) <= 1e-6
    assert far.max() <= NEAR


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def test_values_and_gradients(ops: Ops) -> None:
    mlp = mlp_of(ops)
    given = random(2, 37, HIDDEN, seed=5)
    x = leaf(given)
    gradient = random(2, 37, HIDDEN, seed=6)
    y = mlp(x)
    y.backward(paddle.to_tensor(gradient))
    gate_w, up_w, down_w = (
        rounded(p.numpy()) for p in (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
    )
    rows = rounded(given).reshape(-1, HIDDEN)
    d_y = rounded(gradient).reshape(-1, HIDDEN)
    gate = rounded(rows @ gate_w)
    up = rounded(rows @ up_w)
    inner = rounded(silu(gate) * up)
    assert [t.dtype for t in (y, x.grad)] == [paddle.float32] * 2
    check(y.reshape([-1, HIDDEN]), inner @ down_w)
    d_inner = rounded(d_y @ down_w.T)
    sigmoid = 1 / (1 + np.exp(-gate))
    d_gate = rounded(d_inner * up * (sigmoid + silu(gate) * (1 - sigmoid)))
    d_up = rounded(d_inner * silu(gate))
    check(x.grad.reshape([-1, HIDDEN]), d_gate @ gate_w.T + d_up @ up_w.T)
    for layer, (of_input, of_output) in {
        mlp.gate_proj: (rows, d_gate), mlp.up_proj: (rows, d_up), mlp.down_proj: (inner, d_y)
    }.items():  # fmt: skip
        assert layer.weight.grad.dtype == paddle.float32
        check(layer.weight.grad, of_input.T @ of_output)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("size", [(1, 64, 7), (37, 65, 131), (0, 8, 8), (5, 0, 3)])
def test_products_that_are_rounded_or_added_up(ops: Ops, size: tuple[int, int, int], transpose: bool) -> None:
    rows, inputs, outputs = size
    pairs = []
    expected = np.zeros([rows, outputs])
    assert ops.matmuls.rounded_output_matmul is not None
    for seed, width in enumerate((inputs, inputs, 16)):
        x = random(rows, width, seed=seed)
        y = random(width, outputs, seed=3 + seed)
        expected = expected + rounded(x) @ rounded(y)
        pairs.append((paddle.to_tensor(x), paddle.to_tensor(y.T.copy() if transpose else y)))
        near = 1e-6 * np.abs(expected).max(initial=0)
        whole = ops.matmuls.sum_of_products(pairs, transpose)
        half = ops.matmuls.rounded_output_matmul(pairs, transpose)
        assert [whole.dtype, half.dtype] == [paddle.float32, paddle.bfloat16]
        assert (np.abs(whole.numpy() - expected) <= near).all()
        assert (np.abs(half.astype("float32").numpy() - expected) <= 2.0**-8 * np.abs(expected) + near).all()


def kept_dtypes(mlp: GatedMLP, x: Any) -> list[Any]:
    """Tensors that a forward pass saves, without parameters."""
    kept = list[Any]()
    own = {id(parameter) for parameter in mlp.parameters()}

    def pack(tensor: Any) -> Any:
        if id(tensor) not in own and tensor.ndim > 2:
            kept.append(tensor.dtype)
        return tensor

    with paddle.autograd.saved_tensors_hooks(pack, lambda tensor: tensor):
        mlp(x)
    return kept


@pytest.mark.parametrize("shape", [(0,), (2, 0)], ids=str)
def test_no_tokens_have_gradients_too(ops: Ops, shape: tuple[int, ...]) -> None:
    mlp = mlp_of(ops)
    x = leaf(np.zeros([*shape, HIDDEN], "float32"))
    y = mlp(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == [*shape, HIDDEN]
    assert all(not parameter.grad.any() for parameter in mlp.parameters())


def test_it_keeps_bfloat16_only(ops: Ops) -> None:
    kept = kept_dtypes(mlp_of(ops), leaf(random(2, 5, HIDDEN)))
    assert set(kept) == {paddle.bfloat16}, kept


def test_it_keeps_what_is_planned(ops: Ops) -> None:
    """Byte for byte: but for its input, rounded, and its output, bfloat16 gate, up and what is made of them."""
    mlp = mlp_of(ops)
    x = leaf(random(2, 37, HIDDEN))
    layer = LayerSpec(attention=GroupedQuery(heads=1, kv_heads=1, head_size=8), mlp=Size(width=INNER))
    settings = ActivationSettings(num_bytes=4, inner_bytes=2, fused=frozenset(["swiglu"]))
    planned = activations.mlp_kept(layer, HIDDEN, MicroBatch(2, 37, 74), settings)
    assert allocated(lambda: mlp(x)) == planned + 74 * HIDDEN * (2 + 4)


def between(mlp: GatedMLP, x: Any) -> list[Any]:
    """Dtypes of what SwiGLU takes."""
    taken = list[Any]()
    swiglu = mlp.swiglu

    def noted(gate: Any, up: Any) -> Any:
        taken.extend([gate.dtype, up.dtype])
        return swiglu(gate, up)

    mlp.swiglu = noted
    y = mlp(x)
    mlp.swiglu = swiglu
    assert y.dtype == paddle.float32
    return taken


def test_what_else_sees_or_adds_leaves_float32(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    x = leaf(random(2, 5, HIDDEN))
    plain = mlp_of(ops)
    assert between(plain, x) == [paddle.bfloat16] * 2
    with paddle.no_grad():
        assert between(plain, x) == [paddle.bfloat16] * 2
    assert between(mlp_of(ops, bias=True), x) == [paddle.float32] * 2
    for layer in (plain.gate_proj, plain.down_proj):
        seen = layer.register_forward_post_hook(lambda *_: None)
        assert between(plain, x) == [paddle.float32] * 2
        seen.remove()
    plain.down_proj.__class__ = type("More", (paddle.nn.Linear,), {})
    assert between(plain, x) == [paddle.float32] * 2
    monkeypatch.setattr("llmsuite.plugins.cpu_kernels.cpu.can_be_built", lambda *_: False)
    assert between(mlp_of(cpu_backend(multiplies_bf16=False).ops("bf16")), x) == [paddle.float32] * 2


def test_recomputed_it_is_the_same(ops: Ops) -> None:
    found = []
    for again in (False, True):
        mlp = mlp_of(ops)
        x = leaf(random(2, 5, HIDDEN))
        y = paddle.distributed.fleet.utils.recompute(mlp, x) if again else mlp(x)
        y.sum().backward()
        found.append([t.numpy().tobytes() for t in (y, x.grad, *(p.grad for p in mlp.parameters()))])
    assert found[0] == found[1]


def test_its_program_has_the_same_numbers(ops: Ops) -> None:
    found = []
    for compiles in (False, True):
        mlp = mlp_of(ops)
        x = leaf(random(2, 5, HIDDEN))
        y = compiled(mlp)(x) if compiles else mlp(x)
        y.sum().backward()
        found.append([t.numpy() for t in (y, x.grad, *(p.grad for p in mlp.parameters()))])
    for ours, theirs in zip(*found):
        assert np.abs(ours - theirs).max() <= 1e-6 * np.abs(ours).max()
