"""An attention between whose products all is bfloat16: numbers against float64 rounded in the same places, and what it
keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from llmsuite.adapters.layers.lora import LoraLinear
from llmsuite.adapters.layers.prefix import add_prefixes
from llmsuite.adapters.methods import adapter_config
from llmsuite.contract.registry import Registry
from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import Attention
from llmsuite.models.linear_ops import LinearOps, use_linear_ops
from llmsuite.models.shape_spec import GatedMLP as Size
from llmsuite.models.shape_spec import GroupedQuery, LayerSpec
from llmsuite.planning import activations
from llmsuite.planning.activations import ActivationSettings, MicroBatch
from llmsuite.planning.layout import Layout
from llmsuite.planning.memory import activation_settings
from llmsuite.plugins.cpu_kernels.cpu import CpuKernels
from llmsuite.recipe.resolve import plan_run
from tests.support import tiny_llama
from tests.support.allocated import allocated
from tests.support.devices import cpu_backend
from tests.support.linear_forms import INSTRUCTIONS, leaf, random, rounded
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(not INSTRUCTIONS, reason="attention rounds nothing without instructions for bfloat16")

ROWS = 2
LENGTH = 37
HIDDEN = 48
HEADS = 6
KEY_HEADS = 2
SIZE = 16
NEAR = 2.0**-6
"""Tolerance, relative to the largest number, of an intermediate number that is rounded to bfloat16."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture
def ops() -> Ops:
    return cpu_backend(multiplies_bf16=True).ops("bf16")


def attention_of(ops: Ops, adapted: bool = False, **more: Any) -> Attention:
    """With `adapted`, the matrices of queries, values and outputs have low-rank adapters, which alone are trained."""
    attention = Attention(HIDDEN, 1e-6, ops, GroupedQuery(heads=HEADS, kv_heads=KEY_HEADS, head_size=SIZE, **more))
    if adapted:
        for name in ("q_proj", "v_proj", "o_proj"):
            layer = LoraLinear(getattr(attention, name), adapter_config("lora", rank=4, alpha=12))
            layer.weight.stop_gradient = True
            setattr(attention, name, layer)
    for seed, parameter in enumerate(attention.parameters()):
        parameter.set_value(random(*parameter.shape, seed=seed) / parameter.shape[0] ** 0.5)
    use_linear_ops(attention, LinearOps(ops))
    return attention


def turns() -> tuple[np.ndarray, np.ndarray]:
    angles = random(1, LENGTH, 1, SIZE // 2, seed=20)
    return np.cos(angles), np.sin(angles)


def run(attention: Attention, x: Any, mask: Any = None) -> Any:
    return attention(x, *(paddle.to_tensor(part) for part in turns()), mask)[0]


def check(found: Any, expected: np.ndarray) -> None:
    """Few are rounded to another side, by the order of float32 sums."""
    far = np.abs(found.astype("float32").numpy() - expected) / np.abs(expected).max()
    assert np.median(far) <= 2.0**-13
    assert far.max() <= NEAR


def turned(x: np.ndarray, sign: int = 1) -> np.ndarray:
    cos, sin = turns()
    first, second = np.split(x, 2, -1)
    return np.concatenate([first * cos - sign * second * sin, second * cos + sign * first * sin], -1)


def heads_of(x: np.ndarray) -> np.ndarray:
    return x.reshape(ROWS, LENGTH, -1, SIZE)


def rows_of(x: np.ndarray) -> np.ndarray:
    return x.reshape(ROWS * LENGTH, -1)


def test_values_and_gradients(ops: Ops) -> None:
    """In float64, rounded where products give something, rotary does, attention does, and inside attention."""
    attention = attention_of(ops)
    given = random(ROWS, LENGTH, HIDDEN, seed=5)
    gradient = random(1, 1, HIDDEN, seed=6)
    x = leaf(given)
    gradient = np.broadcast_to(gradient, given.shape).copy()
    y = run(attention, x)
    y.backward(paddle.to_tensor(gradient))
    q_w, k_w, v_w, o_w = (rounded(getattr(attention, name).weight.numpy()) for name in PROJECTIONS)
    rows = rows_of(rounded(given))
    d_y = rows_of(rounded(gradient))
    group = HEADS // KEY_HEADS
    q, k, v = (heads_of(rounded(rows @ matrix)) for matrix in (q_w, k_w, v_w))
    q = rounded(turned(q))
    k = rounded(turned(k))
    wide_k, wide_v = (np.repeat(part, group, 2) for part in (k, v))
    scores = np.einsum("blhk,bshk->bhls", q, wide_k) * SIZE**-0.5
    scores = np.where(np.tril(np.ones([LENGTH, LENGTH])) > 0, scores, -np.inf)
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    total = exponentials.sum(-1, keepdims=True)
    out = rounded(np.einsum("bhls,bshk->blhk", rounded(exponentials), wide_v) / total.transpose([0, 2, 1, 3]))
    assert [t.dtype for t in (y, x.grad)] == [paddle.float32] * 2
    check(y, (rows_of(out) @ o_w).reshape(given.shape))
    d_out = heads_of(rounded(d_y @ o_w.T))
    weights = exponentials / total
    slopes = np.einsum("blhk,bshk->bhls", d_out, wide_v)
    slopes = rounded(weights * (slopes - (weights * slopes).sum(-1, keepdims=True)) * SIZE**-0.5)
    of_group = lambda each: each.reshape(ROWS, LENGTH, KEY_HEADS, group, SIZE).sum(3)  # noqa: E731
    d_q = rounded(np.einsum("bhls,bshk->blhk", slopes, wide_k))
    d_k = rounded(of_group(np.einsum("bhls,blhk->bshk", slopes, q)))
    d_v = rounded(of_group(np.einsum("bhls,blhk->bshk", rounded(weights), d_out)))
    d_q = rounded(turned(d_q, -1))
    d_k = rounded(turned(d_k, -1))
    d_q = rows_of(d_q)
    d_k = rows_of(d_k)
    d_v = rows_of(d_v)
    check(x.grad, (d_q @ q_w.T + d_k @ k_w.T + d_v @ v_w.T).reshape(given.shape))
    inputs_and_outputs = (rows, d_q), (rows, d_k), (rows, d_v), (rows_of(out), d_y)
    for name, (of_input, of_output) in zip(PROJECTIONS, inputs_and_outputs):
        found = getattr(attention, name).weight.grad
        assert found.dtype == paddle.float32
        check(found, of_input.T @ of_output)


def test_it_keeps_what_is_planned(ops: Ops) -> None:
    """Byte for byte: but for its input, rounded, and its output, bfloat16 queries, keys, values and what is made of
    them; and what the rotation takes, which is made here."""
    attention = attention_of(ops)
    x = leaf(random(ROWS, LENGTH, HIDDEN))
    layer = LayerSpec(attention=GroupedQuery(heads=HEADS, kv_heads=KEY_HEADS, head_size=SIZE), mlp=Size(width=8))
    settings = ActivationSettings(num_bytes=4, head_bytes=2, fused=frozenset(["attention", "rotary"]))
    tokens = ROWS * LENGTH
    planned = activations.attention_kept(layer, MicroBatch(ROWS, LENGTH, tokens), settings)
    assert allocated(lambda: run(attention, x)) == planned + tokens * HIDDEN * (2 + 4) + LENGTH * SIZE * 4


@pytest.mark.parametrize(
    ("words", "num_bytes"),
    [
        ([], 2),
        (["--engine.precision=fp32"], None),
        (["--lora.rank=4"], 2),
        (["--lora.rank=4", "--lora.method=dora"], None),
        (["--prefix.tokens=4"], None),
    ],
    ids=str,
)
def test_a_plan_knows_where_it_is(
    words: list[str], num_bytes: int | None, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuKernels, "_has_bf16", lambda self: True)
    given = words if "--engine.precision=fp32" in words else [*words, "--engine.precision=bf16"]
    place = ["--parallel={}", "--launch.num_devices=1"]
    plan = plan_run(ROOT / "recipes" / "llama" / "sft.json", [*place, *given], registry, smoke=True)
    assert activation_settings(Layout(plan.model, plan.parallel), plan.train.profile).head_bytes == num_bytes


def between(attention: Attention, x: Any, mask: Any = None) -> list[Any]:
    """Dtypes of what rotary and attention take and give."""
    seen = list[Any]()
    core = attention.core
    rotary = attention.rotary

    def noted_core(q: Any, k: Any, v: Any, mask: Any) -> Any:
        out = core(q, k, v, mask)
        seen.extend(t.dtype for t in (q, k, v, out))
        return out

    def noted_rotary(given: Any, cos: Any, sin: Any) -> Any:
        out = rotary(given, cos, sin)
        seen.extend([given.dtype, out.dtype])
        return out

    attention.core = noted_core
    attention.rotary = noted_rotary
    y = run(attention, x, mask)
    attention.core = core
    attention.rotary = rotary
    assert y.dtype == paddle.float32
    return sorted({str(dtype) for dtype in seen})


def test_what_else_sees_or_adds_leaves_float32(ops: Ops) -> None:
    x = leaf(random(ROWS, LENGTH, HIDDEN))
    whole = ["paddle.float32"]
    half = ["paddle.bfloat16"]
    plain = attention_of(ops)
    assert between(plain, x) == half
    with paddle.no_grad():
        assert between(plain, x) == half
    for more in ({"adapted": True}, {"interleaved": True}, {"output_biased": True}):
        assert between(attention_of(ops, **more), x) == half, more
    for more in ({"biased": True}, {"normed": "heads"}):
        assert between(attention_of(ops, **more), x) == whole, more
    for layer in (plain.q_proj, plain.o_proj):
        seen = layer.register_forward_post_hook(lambda *_: None)
        assert between(plain, x) == whole
        seen.remove()
    plain.o_proj.__class__ = type("More", (nn.Linear,), {})
    assert between(plain, x) == whole
    assert between(attention_of(cpu_backend(multiplies_bf16=False).ops("bf16")), x) == whole


def test_attention_with_a_prefix_is_float32(ops: Ops) -> None:
    model = tiny_llama.FAMILY.factory()(tiny_llama.CONFIG, ops)
    assert all(layer.self_attn.rounds_activations for layer in model.model.layers)
    add_prefixes(model, 3)
    use_linear_ops(model, LinearOps(ops))
    assert not any(layer.self_attn.rounds_activations for layer in model.model.layers)
    model(paddle.to_tensor([[1, 7, 11]])).sum().backward()
    grad = model.model.layers[0].self_attn.prefix_k.grad
    assert grad.dtype == paddle.float32


def outcome(attention: Attention, run: Any) -> list[np.ndarray]:
    """Output, and gradients of the input and of all that is trained."""
    x = leaf(random(ROWS, LENGTH, HIDDEN))
    y = run(x)
    (y * paddle.to_tensor(random(*y.shape, seed=9))).sum().backward()
    trained = [parameter for parameter in attention.parameters() if not parameter.stop_gradient]
    return [t.numpy() for t in (y, x.grad, *(parameter.grad for parameter in trained))]


@pytest.mark.parametrize("adapted", [False, True])
def test_recomputed_it_is_the_same(ops: Ops, adapted: bool) -> None:
    one = attention_of(ops, adapted)
    again = attention_of(ops, adapted)
    recompute = paddle.distributed.fleet.utils.recompute
    found = outcome(again, lambda x: recompute(lambda x: run(again, x), x))
    for ours, theirs in zip(found, outcome(one, lambda x: run(one, x)), strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_its_program_has_the_same_numbers(ops: Ops, adapted: bool, interleaved: bool) -> None:
    one, other = (attention_of(ops, adapted, interleaved=interleaved) for _ in range(2))
    spans = paddle.to_tensor(np.stack([[[0] * LENGTH] * 2 + [[0] * 20 + [20] * (LENGTH - 20)]] * ROWS), dtype="int64")
    found = outcome(other, compiled(other, spans))
    for ours, theirs in zip(found, outcome(one, lambda x: run(one, x, spans)), strict=True):
        # adapters in programs are products of their own, whose sum is rounded: few numbers to another side
        limit = NEAR if adapted else 1e-6
        assert np.abs(ours - theirs).max() <= limit * np.abs(theirs).max()


def compiled(attention: Attention, spans: Any) -> Any:
    """The layer as a program, in which nothing of Python's is made again from its source."""
    cos, sin = (paddle.to_tensor(part) for part in turns())

    class Compiled(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        @paddle.jit.not_to_static
        def run(self, x: Any, cos: Any, sin: Any, spans: Any) -> Any:
            return self.attention.forward(x, cos, sin, spans)[0]

        def forward(self, x: Any, cos: Any, sin: Any, spans: Any) -> Any:
            return self.run(x, cos, sin, spans)

    program = paddle.jit.to_static(Compiled(), full_graph=True)
    return lambda x: program(x, cos, sin, spans)
