"""Linear layers with inputs rounded to bfloat16: values and gradients against float64, and the layers that use them."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest
from paddle import nn

from llmsuite.adapters.layers.adapter import Adapter
from llmsuite.devices.cpu.rounding import rounded_matmul
from llmsuite.devices.matmul_ops import MatmulOps
from llmsuite.devices.ops import Ops
from llmsuite.models import blocks
from llmsuite.models.block_quant import BlockFormat
from llmsuite.models.experts import GroupedLinear
from llmsuite.models.linear_ops import LinearOps, use_linear_ops
from llmsuite.models.logit_ops import LogitOps
from llmsuite.models.qat import FakeQuantLinear
from llmsuite.models.quantised import QuantisedLinear
from llmsuite.plugins.cpu_kernels import kernels
from llmsuite.plugins.cpu_kernels.libraries import PRODUCTS, can_be_built
from tests.support import tiny_llama
from tests.support.devices import cpu_backend
from tests.support.linear_forms import FORMS, LIMIT, leaf, random, rounded


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def ops(request: pytest.FixtureRequest) -> Ops:
    return cpu_backend(multiplies_bf16=request.param).ops("bf16")


def check(found: Any, expected: np.ndarray, limit: float = LIMIT) -> None:
    assert found.dtype == paddle.float32
    assert found.shape == list(expected.shape)
    assert np.abs(found.numpy() - expected).max() <= limit * np.abs(expected).max()


@pytest.mark.skipif(not can_be_built(PRODUCTS), reason="there is no compiler")
@pytest.mark.parametrize("together", [True, False])
def test_float32_in_parts_rounds_nothing(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers, of which one is thin, against float64.

    Each product is six of parts, which are added up one after another, for an input as many as all layers have outputs:
    more sums are rounded than those of LIMIT. How exact they are is looked at where the kernel is tested.
    """
    limit = 4 * LIMIT
    ops = cpu_backend(splits=True).ops("fp32")
    called = []
    run = kernels._run
    monkeypatch.setattr(kernels, "_run", lambda name, *given: called.append(name) or run(name, *given))
    layers = nn.LayerList([nn.Linear(96, outputs, bias_attr=False) for outputs in (80, 72, 8)])
    layers.apply_linears = blocks.apply_linears
    use_linear_ops(layers, LinearOps(ops), together)
    x = leaf(random(2, 40, 96))
    given = [random(2, 40, outputs, seed=outputs) for outputs in (80, 72, 8)]
    ys = layers.apply_linears(list(layers), x)
    paddle.autograd.backward(ys, [paddle.to_tensor(gradient) for gradient in given])
    rows = x.numpy().reshape(-1, 96).astype("float64")
    of_x = np.zeros([80, 96])
    for layer, y, gradient in zip(layers, ys, given, strict=True):
        matrix = layer.weight.numpy().astype("float64")
        d_y = gradient.reshape(80, -1).astype("float64")
        check(y, (rows @ matrix).reshape(y.shape), limit)
        check(layer.weight.grad, rows.T @ d_y, limit)
        of_x += d_y @ matrix.T
    check(x.grad, of_x.reshape(x.shape), limit)
    # forward and gradients of the matrices, and of their input: one sum, or a product each
    assert called.count("split_product") == 6 + (1 if together else 3)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("leading", "inputs", "outputs"), [((2, 32), 48, 80), ((3, 37), 65, 131), ((1,), 64, 7)])
def test_inputs_are_rounded_and_sums_are_not(
    ops: Ops, leading: tuple[int, ...], inputs: int, outputs: int, is_transposed: bool
) -> None:
    shape = (outputs, inputs) if is_transposed else (inputs, outputs)
    given = random(*leading, inputs), random(*shape, seed=1), random(*leading, outputs, seed=2)
    x = leaf(given[0])
    weight = leaf(given[1])
    y = LinearOps(ops)(x, weight, transpose_y=is_transposed)
    y.backward(paddle.to_tensor(given[2]))
    rows, matrix, gradient = (rounded(values) for values in given)
    matrix = matrix.T if is_transposed else matrix
    check(y, rows @ matrix)
    check(x.grad, gradient @ matrix.T)
    of_matrix = rows.reshape(-1, inputs).T @ gradient.reshape(-1, outputs)
    check(weight.grad, of_matrix.T if is_transposed else of_matrix)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_the_form_for_programs_has_the_same_numbers(ops: Ops, rows: int, is_transposed: bool) -> None:
    """To the last bit, those of its gradients too, in which nothing is Python."""
    shape = (131, 64) if is_transposed else (64, 131)
    given = random(2, rows, 64), random(*shape, seed=1), random(2, rows, 131, seed=2)
    found = []
    in_program = ops.matmuls.program_matmul
    assert in_program is not None
    forms = (lambda x, w: LinearOps(ops)(x, w, transpose_y=is_transposed), lambda x, w: in_program(x, w, is_transposed))
    for form in forms:
        x = leaf(given[0])
        weight = leaf(given[1])
        y = form(x, weight)
        y.backward(paddle.to_tensor(given[2]))
        found.append([tensor.numpy().tobytes() for tensor in (y, x.grad, weight.grad)])
    assert found[0] == found[1]


def test_all_forms_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    values = random(10_001)
    values[:6] = [np.nan, np.inf, -np.inf, 3.4e38, 1 + 2.0**-8, 1 + 3 * 2.0**-8]  # the last two lie in the middle
    expected = values.astype(ml_dtypes.bfloat16).astype("float32")
    forms = [cpu_backend(multiplies_bf16=form).ops("bf16") for form in FORMS.values()]
    monkeypatch.setattr("llmsuite.plugins.cpu_kernels.cpu.can_be_built", lambda *_: False)
    without_compiler = cpu_backend(multiplies_bf16=False).ops("bf16")
    assert without_compiler.matmuls.matmul is rounded_matmul
    eye = paddle.eye(4)
    check(without_compiler.matmuls.matmul(paddle.to_tensor(values[-4:]), eye, False, False), rounded(values[-4:]))
    for ops in (*forms, without_compiler):
        found = ops.matmuls.round_activation(paddle.to_tensor(values))
        assert found.dtype == paddle.bfloat16
        np.testing.assert_array_equal(found.astype("float32").numpy(), expected)


def test_the_same_bits_each_time(ops: Ops) -> None:
    x = paddle.to_tensor(random(70, 96))
    y = paddle.to_tensor(random(96, 33, seed=1))
    first = ops.matmuls.matmul(x, y, False, False).numpy()
    for rows in (1, 69, 70):  # another number of rows may be another program
        ops.matmuls.matmul(x[:rows], y, False, False)
    assert ops.matmuls.matmul(x, y, False, False).numpy().tobytes() == first.tobytes()


def test_more_shapes_than_are_kept(ops: Ops) -> None:
    y = random(8, 5, seed=1)
    for rows in [*range(1, 140), 1, 2]:
        x = random(rows, 8)
        check(ops.matmuls.matmul(paddle.to_tensor(x), paddle.to_tensor(y), False, False), rounded(x) @ rounded(y))


def test_no_rows(ops: Ops) -> None:
    x = leaf(np.zeros([0, 4], "float32"))
    weight = leaf(random(4, 3))
    y = LinearOps(ops)(x, weight)
    assert y.shape == [0, 3]
    assert not ops.matmuls.matmul(x, y, True, False).numpy().any(), "a sum of nothing"


def test_tensors_with_gaps(ops: Ops) -> None:
    whole = random(6, 5)
    weight = random(5, 8, seed=1)
    x = paddle.to_tensor(whole).t()[:, ::2]  # [5, 3]
    y = LinearOps(ops)(x, paddle.to_tensor(weight[:3]))
    check(y, rounded(whole.T[:, ::2]) @ rounded(weight[:3]))


def test_what_nobody_wants_is_not_computed(ops: Ops) -> None:
    asked = list[tuple[bool, bool]]()

    def counted(x: Any, y: Any, transpose_x: bool, transpose_y: bool) -> Any:
        asked.append((transpose_x, transpose_y))
        return ops.matmuls.matmul(x, y, transpose_x, transpose_y)

    products = LinearOps(Ops(matmuls=MatmulOps(counted, round_activation=ops.matmuls.round_activation)))
    for wants_x, wants_weight, made in ((True, False, [(False, True)]), (False, True, [(True, False)])):
        x = leaf(random(4, 6), wants_x)
        weight = leaf(random(6, 3), wants_weight)
        y = products(x, weight)
        asked.clear()
        y.sum().backward()
        assert asked == made
        assert (x.grad is not None, weight.grad is not None) == (wants_x, wants_weight)


def test_several_products_keep_one_rounded_input(ops: Ops) -> None:
    x = leaf(random(2, 4, 6))
    weights = [leaf(random(6, size, seed=size)) for size in (3, 5)]
    kept = list[Any]()

    def noted(tensor: Any) -> Any:
        kept.append(tensor)
        return ops.matmuls.round_activation(tensor)

    ys = LinearOps(Ops(matmuls=MatmulOps(ops.matmuls.matmul, round_activation=noted))).matmul_many(x, weights)
    assert len(kept) == 1
    sum(y.sum() for y in ys).backward()
    gradients = [rounded(np.ones(y.shape, "float32")) for y in ys]
    check(x.grad, sum(g @ rounded(w.numpy()).T for g, w in zip(gradients, weights)))
    for weight, gradient in zip(weights, gradients):
        check(weight.grad, rounded(x.numpy()).reshape(-1, 6).T @ gradient.reshape(8, -1))


class _Layers(nn.Layer):
    """One layer of each kind that multiplies with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear(8, 4)
        self.plain = nn.Linear(8, 4)
        self.adapter = Adapter()
        self.adapter.take(linear)
        self.quantised = QuantisedLinear(linear, BlockFormat("int8", 8))
        self.rounded = FakeQuantLinear(linear, rounds_weight=False)
        self.stacked = GroupedLinear(2, 8, 4)


def test_every_kind_of_layer_multiplies_so() -> None:
    model = _Layers()
    made = list[list[int]]()

    def noted(x: Any, y: Any, transpose_x: bool, transpose_y: bool) -> Any:
        made.append(y.shape)
        return paddle.matmul(x, y, transpose_x, transpose_y)

    use_linear_ops(model, LinearOps(Ops(matmuls=MatmulOps(noted))))
    x = leaf(random(6, 8))
    counts = [4, 2]
    calls = {
        "plain": lambda: model.plain(x),
        "adapter": lambda: model.adapter.base(x),
        "the adapter's matrix": lambda: model.adapter.weight_product(x),
        "quantised": lambda: model.quantised(x),
        "fake-quantised": lambda: model.rounded(x),
        "experts": lambda: model.stacked.product(x, counts),
    }
    for name, call in calls.items():
        made.clear()
        y = call()
        assert made, name
        made.clear()
        y.sum().backward()
        assert made, f"gradients of {name}"


def test_a_model_is_the_same_but_for_rounding(ops: Ops) -> None:
    ids = paddle.to_tensor(np.arange(20).reshape(2, 10) % 7)
    losses = {}
    for name, form in {"float32": None, "bf16": ops}.items():
        model = tiny_llama.model()
        if form is not None:
            use_linear_ops(model, LinearOps(form))
        hidden, _ = model.hidden_states(ids)
        losses[name] = float(model.token_nll(hidden.flatten(0, 1), ids.flatten()).mean())
    assert 0 < abs(losses["bf16"] / losses["float32"] - 1) < 2e-3


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("frozen", ["", "the head", "all but the head"])
def test_a_head_and_its_loss_are_one_operation(ops: Ops, is_tied: bool, frozen: str) -> None:
    """Bit for bit what two operations find."""
    if ops.matmuls.rounded_grad_cross_entropy is None:
        pytest.skip("there is no compiler")
    hidden = random(35, 24)
    targets = paddle.to_tensor(np.arange(35) % 11)
    found = []
    for together in (True, False):
        model = tiny_llama.model(tiny_llama.tied() if is_tied else tiny_llama.CONFIG)
        model.logit_ops = LogitOps(ops)
        head = model.model.embed_tokens if is_tied else model.lm_head
        head.weight.stop_gradient = frozen == "the head"
        given = ops.matmuls if together else dataclasses.replace(ops.matmuls, rounded_grad_cross_entropy=None)
        use_linear_ops(model, LinearOps(dataclasses.replace(ops, matmuls=given)))
        x = leaf(hidden, frozen != "all but the head")
        nll = model.token_nll(x, targets)
        assert ("Nll" in nll.grad_fn.name()) is together
        (nll * paddle.arange(35, dtype="float32")).mean().backward()
        found.append([t.numpy() for t in (nll, x.grad, head.weight.grad) if t is not None])
    assert len(found[0]) == (3 if not frozen else 2)
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


class _Seen(blocks.TiedHead):
    def __init__(self, inner: blocks.TiedHead, seen: list[Any]):
        super().__init__()
        self._inner = inner
        self._seen = seen

    def __call__(self, hidden: Any, embedding: Any) -> Any:
        self._seen.append(hidden.shape)
        return self._inner(hidden, embedding)


def test_who_looks_at_logits_sees_them(ops: Ops) -> None:
    for config in (tiny_llama.CONFIG, tiny_llama.tied()):
        model = tiny_llama.model(config)
        seen = list[Any]()
        use_linear_ops(model, LinearOps(ops))
        if model.lm_head is None:  # as what gathers the matrix for it under sharding stage 3
            model.tied_head = _Seen(model.tied_head, seen)
        else:
            model.lm_head.register_forward_post_hook(lambda layer, inputs, y, seen=seen: seen.append(y.shape))
        model.token_nll(leaf(random(3, 24)), paddle.to_tensor([1, 2, 3])).sum().backward()
        assert [shape[0] for shape in seen] == [3]


class Scaled(blocks.RotaryLM):
    def logits(self, hidden: Any) -> Any:
        return super().logits(hidden) / 4


class Smoothed(blocks.RotaryLM):
    def token_nll(self, hidden: Any, targets: Any) -> Any:
        return super().token_nll(hidden, targets) / 4


class SharperOps(LogitOps):
    def cross_entropy(self, logits: Any, targets: Any) -> Any:
        return super().cross_entropy(logits * 4, targets)


class Sharper(blocks.RotaryLM):
    def __init__(self, *args: Any):
        super().__init__(*args)
        self.logit_ops = SharperOps(self.ops)


@pytest.mark.parametrize("kind", [Scaled, Smoothed, Sharper])
def test_a_family_keeps_a_loss_of_its_own(ops: Ops, kind: type[blocks.RotaryLM]) -> None:
    """In training as without a gradient."""
    paddle.seed(0)
    model = kind(tiny_llama.CONFIG, ops, [], nn.Identity())
    nn.initializer.Normal()(model.lm_head.weight)
    use_linear_ops(model, LinearOps(ops))
    hidden = random(3, 24)
    targets = paddle.to_tensor([1, 2, 3])
    with paddle.no_grad():
        expected = model.token_nll(leaf(hidden), targets).numpy()
    check(model.token_nll(leaf(hidden), targets), expected)


def test_a_model_of_another_make_keeps_its_loss(ops: Ops) -> None:
    class Other(nn.Layer):
        def token_nll(self, hidden: Any, targets: Any) -> Any:
            return hidden.sum(-1)

    model = Other()
    use_linear_ops(model, LinearOps(ops))
    assert model.token_nll(leaf(random(3, 24)), None).shape == [3]


def test_a_processor_without_the_instructions_is_named() -> None:
    assert cpu_backend(multiplies_bf16=True).precision_warning("bf16") is None
    assert cpu_backend(multiplies_bf16=False).precision_warning("fp32") is None
    assert "slower than engine.precision fp32" in str(cpu_backend(multiplies_bf16=False).precision_warning("bf16"))
