"""Comparison of a device's operations, forward and backward, with their plain forms in float32 on the host: for
`llmsuite doctor --kernels`.

Shapes: B batch, L query length, S key length, H query heads, J key-value heads, K head size, F intermediate, N tokens,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.base.errors import line_of
from llmsuite.base.typing import Tensor
from llmsuite.devices.base import PADDLE_DTYPE, DeviceBackend
from llmsuite.devices.kernel_table import forms
from llmsuite.devices.ops import Ops
from llmsuite.devices.optimizer_ops import OptimizerOps
from llmsuite.devices.tensors import array_of, tensor_of

EPSILON = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half the distance between 1 and the next number; of bfloat16 the full one, as kernels may truncate."""
_FACTOR = {"float32": 256.0, "bfloat16": 8.0, "float16": 16.0}
"""The largest difference in units of `EPSILON`, relative to the largest number of the plain form. In float32 sums of
some hundred numbers in another order; in 16 bits a result is rounded once, and inside attention the scores, weights and
their gradients are rounded too, each of up to four units."""
_HEAD_SIZES = (64, 80, 96, 128, 192, 256)
_REPEATS = 3
_LENGTH = 48


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """An operation with inputs."""

    operation: str
    name: str
    inputs: Callable[[np.random.Generator], Sequence[np.ndarray]]
    """Inputs of a float dtype; they get gradients."""
    run: Callable[[Ops, OptimizerOps, Sequence[Tensor]], Tensor]
    has_gradient: bool = True


@dataclasses.dataclass(frozen=True)
class KernelResult:
    """The outcome of a case in one precision."""

    operation: str
    case: str
    precision: str
    is_fused: bool
    forward: float
    """Largest difference of the output, relative to the largest number of the plain form."""
    backward: float | None
    """Largest such difference of the gradients of all inputs; None where there are none."""
    limit: float
    is_repeatable: bool
    """True if a second run gives the same bits."""
    milliseconds: float
    """Median time of a forward and backward pass, with a read."""
    memory_bytes: int
    """Growth of the peak of memory."""
    error: str | None = None
    """The first line of an error; None where it runs."""

    def faults(self, is_deterministic: bool) -> list[str]:
        """Descriptions of what is wrong."""
        where = f"{self.operation} ({self.case}, {self.precision})"
        if self.error is not None:
            return [f"{where}: {self.error}"]
        found = []
        for what, far in (("output", self.forward), ("gradients", self.backward)):
            if far is not None and not far <= self.limit:  # also where it is not a number
                found.append(f"{where}: {what} off by {far:.1e} of the largest number; at most {self.limit:.1e}")
        if is_deterministic and not self.is_repeatable:
            found.append(f"{where}: a second run gives other bits")
        return found


def _normal(*shapes: Sequence[int]) -> Callable[[np.random.Generator], list[np.ndarray]]:
    return lambda random: [random.standard_normal(shape).astype("float32") for shape in shapes]


def _attention(head_size: int, mask: str) -> KernelCase:
    def run(ops: Ops, optimizer_ops: OptimizerOps, inputs: Sequence[Tensor]) -> Tensor:
        q, k, v = inputs
        dtype = q.dtype
        if mask == "documents":
            starts = np.repeat([[0, 20], [0, 7]], [20, _LENGTH - 20], axis=1)
            starts[1, 20:] = np.where(np.arange(20, _LENGTH) < 30, 0, 30)
            starts[1, :20] = 0
            table: Tensor | None = ops.document_mask(tensor_of(starts.astype("int64")), dtype)
        else:
            table = ops.causal_mask(_LENGTH, _LENGTH, dtype, 16 if mask == "window" else None)
        return ops.attention(q, k, v, table)

    shape = [2, _LENGTH, 4, head_size]
    shared = [2, _LENGTH, 2, head_size]
    return KernelCase("attention", f"head {head_size}, {mask}", _normal(shape, shared, shared), run)


def _rotary(head_size: int) -> KernelCase:
    def run(ops: Ops, optimizer_ops: OptimizerOps, inputs: Sequence[Tensor]) -> Tensor:
        angles = np.outer(np.arange(_LENGTH), 1e-2 ** np.linspace(0, 1, head_size // 2)).reshape(1, _LENGTH, 1, -1)
        dtype = inputs[0].dtype
        cos, sin = (tensor_of(f(angles).astype("float32")).astype(dtype) for f in (np.cos, np.sin))
        return ops.rotary(inputs[0], cos, sin)

    return KernelCase("rotary", f"head {head_size}", _normal([2, _LENGTH, 4, head_size]), run)


def _rms_norm(width: int) -> KernelCase:
    return KernelCase(
        "rms_norm", f"width {width}", _normal([64, width], [width]), lambda ops, _, x: ops.rms_norm(x[0], x[1], 1e-6)
    )


def _cross_entropy(ops: Ops, optimizer_ops: OptimizerOps, inputs: Sequence[Tensor]) -> Tensor:
    targets = tensor_of(np.arange(64, dtype="int64") * 7 % 997)
    return ops.cross_entropy(inputs[0].astype("float32") * 1.0, targets)  # which may overwrite its input


def _experts(ops: Ops, optimizer_ops: OptimizerOps, inputs: Sequence[Tensor]) -> Tensor:
    tokens, weights, matrices = inputs
    order = np.random.default_rng(1).permutation(64)
    there = tensor_of(order.astype("int64"))
    back = tensor_of(np.argsort(order).astype("int64"))
    counts = tensor_of(np.array([30, 0, 20, 14], "int64"))
    rows = ops.experts.dispatch_rows(tokens, there, back, counts)
    rows = ops.experts.grouped_matmul(rows, matrices, counts)
    return ops.experts.combine_rows(rows, weights, there, back, counts)


def _square_sum(ops: Ops, optimizer_ops: OptimizerOps, inputs: Sequence[Tensor]) -> Tensor:
    return optimizer_ops.square_sum([x.astype("float32") for x in inputs], 0.5)


def _scale(ops: Ops, optimizer_ops: OptimizerOps, inputs: Sequence[Tensor]) -> Tensor:
    x = inputs[0].astype("float32") * 1.0
    optimizer_ops.scale(x, 0.25)
    return x


def _adamw(ops: Ops, optimizer_ops: OptimizerOps, inputs: Sequence[Tensor]) -> Tensor:
    """The first update of two parameters with a gradient each; both parameters in one tensor."""
    matrix, vector, *gradients = (x.detach().astype("float32") * 1.0 for x in inputs)
    parameters = [matrix, vector]
    rate = 0.01
    decays = (0.1, 0.0)
    betas = (0.9, 0.999)
    epsilon = 1e-8
    with paddle.no_grad():
        if optimizer_ops.adamw is None:
            # Loshchilov and Hutter 2019, arXiv 1711.05101: after the first update the corrected moments are g and g^2
            for x, g, decay in zip(parameters, gradients, decays):
                x.copy_(x * (1 - rate * decay) - rate * g / (g.abs() + epsilon), False)
        else:
            slots = []
            for _ in betas:
                slots.append([paddle.zeros_like(x) for x in parameters])
            for beta in betas:
                slots.append([tensor_of([beta], "float32", paddle.CPUPlace()) for _ in parameters])
            rates = [rate] * len(parameters)
            optimizer_ops.adamw(parameters, gradients, 1.0, rates, slots, betas, epsilon, decays)
    return paddle.concat([x.flatten() for x in parameters])


def _two_products(ops: Ops, optimizer_ops: OptimizerOps, inputs: Sequence[Tensor]) -> Tensor:
    x, y, a, b = inputs
    return ops.matmuls.sum_of_products([(x, a), (y, b)], False)


CASES: tuple[KernelCase, ...] = (
    *(_attention(size, mask) for size in _HEAD_SIZES for mask in ("causal", "documents", "window")),
    *(_rotary(size) for size in _HEAD_SIZES),
    *(_rms_norm(width) for width in (64, 576, 1024, 4096)),
    KernelCase("swiglu", "width 1536", _normal([64, 1536], [64, 1536]), lambda ops, _, x: ops.swiglu(*x)),
    KernelCase("cross_entropy", "vocabulary 997", _normal([64, 997]), _cross_entropy),
    KernelCase(
        "matmul",
        "64 x 576 x 192",
        _normal([64, 576], [576, 192]),
        lambda ops, _, x: ops.matmuls.matmul(x[0], x[1], False, False),
        has_gradient=False,
    ),
    KernelCase("sum_matmul", "two products", _normal([64, 96], [64, 32], [96, 48], [32, 48]), _two_products, False),
    KernelCase("linear", "64 x 576 x 192", _normal([64, 576], [576, 192]), lambda ops, _, x: x[0] @ x[1]),
    KernelCase(
        "joined_swiglu",
        "width 1536",
        _normal([4, 16, 3072]),
        lambda ops, _, x: ops.decoding.joined_swiglu(x[0]),
        has_gradient=False,
    ),
    KernelCase("grouped_matmul", "4 experts", _normal([32, 64], [32, 2], [4, 64, 48]), _experts, has_gradient=False),
    KernelCase("square_sum", "two tensors", _normal([96, 64], [64]), _square_sum, has_gradient=False),
    KernelCase("scale", "in place", _normal([96, 64]), _scale, has_gradient=False),
    KernelCase("adamw", "two parameters", _normal([96, 64], [64], [96, 64], [64]), _adamw, has_gradient=False),
)
"""All cases. Those of experts are `dispatch_rows`, `grouped_matmul` and `combine_rows` one after the other."""

_CHECKED_TOGETHER = {"causal_mask", "document_mask", "dispatch_rows", "combine_rows"}


def unchecked(backend: DeviceBackend, precision: str) -> list[str]:
    """Names of operations with a kernel that no case runs."""
    checked = {case.operation for case in CASES} | _CHECKED_TOGETHER
    return sorted(set(backend.loaded_kernels(precision)) - checked)


def check_kernels(
    backend: DeviceBackend, precision: str, cases: Sequence[KernelCase] = CASES
) -> Iterator[KernelResult]:
    """Run cases in a precision on the current device."""
    ops = backend.ops(precision)
    optimizer_ops = backend.optimizer_ops(precision)
    plain = forms(Ops(), OptimizerOps())
    own = forms(ops, optimizer_ops)
    for case in cases:
        is_fused = own.get(case.operation) is not plain.get(case.operation)
        try:
            yield _check(backend, precision, case, ops, optimizer_ops, is_fused)
        except Exception as error:
            yield KernelResult(
                case.operation, case.name, precision, is_fused, 0.0, None, 0.0, False, 0.0, 0,
                f"{type(error).__name__}: {line_of(error)}",
            )  # fmt: skip


def _check(
    backend: DeviceBackend,
    precision: str,
    case: KernelCase,
    ops: Ops,
    optimizer_ops: OptimizerOps,
    is_fused: bool,
) -> KernelResult:
    rounded = PADDLE_DTYPE[precision]
    dtype = backend.parameter_dtype(precision)
    arrays = _rounded(case.inputs(np.random.default_rng(0)), rounded)
    device = paddle.device.get_device()
    paddle.set_device("cpu")
    try:
        expected = _run(case, Ops(), OptimizerOps(), arrays, "float32", rounded)
    finally:
        paddle.set_device(device)
    before = backend.peak_memory_bytes()
    seconds = []
    runs = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        runs.append(_run(case, ops, optimizer_ops, arrays, dtype, rounded))
        seconds.append(time.perf_counter() - start)
    far = [_distance(found, wanted) for found, wanted in zip(runs[0], expected, strict=True)]
    return KernelResult(
        operation=case.operation,
        case=case.name,
        precision=precision,
        is_fused=is_fused,
        forward=far[0],
        backward=max(far[1:]) if far[1:] else None,
        limit=_FACTOR[rounded] * EPSILON[rounded],
        is_repeatable=all(np.array_equal(a, b, equal_nan=True) for a, b in zip(runs[0], runs[1], strict=True)),
        milliseconds=statistics.median(seconds) * 1e3,
        memory_bytes=backend.peak_memory_bytes() - before,
    )


def _rounded(arrays: Sequence[np.ndarray], dtype: str) -> list[np.ndarray]:
    """Values that a dtype has, in float32."""
    return [array_of(tensor_of(x, place=paddle.CPUPlace()).astype(dtype).astype("float32")) for x in arrays]


def _run(
    case: KernelCase,
    ops: Ops,
    optimizer_ops: OptimizerOps,
    arrays: Sequence[np.ndarray],
    dtype: Any,
    rounded: str,
) -> list[np.ndarray]:
    """The output, and the gradients of all inputs, in float32. The gradient of the output is rounded to a dtype."""
    inputs = [tensor_of(x).astype(dtype) for x in arrays]
    for x in inputs:
        x.stop_gradient = not case.has_gradient
    if not case.has_gradient:
        return [array_of(case.run(ops, optimizer_ops, inputs).astype("float32"))]
    output = case.run(ops, optimizer_ops, inputs)
    random = np.random.default_rng(1).standard_normal(output.shape).astype("float32")
    output.backward(tensor_of(_rounded([random], rounded)[0]).astype(output.dtype))
    gradients = [x.grad for x in inputs]
    return [array_of(x.astype("float32")) for x in (output, *gradients)]


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    scale = float(np.abs(expected).max())
    return float(np.abs(found.astype("float64") - expected).max() / (scale or 1.0))
