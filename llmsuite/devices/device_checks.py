"""Checks of a device for what plug-ins get wrong, which `llmsuite doctor` runs: small programs of Paddle with a known
result.

A device may lack a kernel: Paddle then copies the inputs to the host, computes there, and copies the result back. That
is slow, and wrong where the result has to be written into memory that is already there. So each check says what of
llmsuite depends on it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from llmsuite.base.errors import line_of
from llmsuite.base.safe_files import is_file
from llmsuite.base.typing import Tensor
from llmsuite.devices.base import PADDLE_DTYPE, DeviceBackend
from llmsuite.devices.registered_kernels import kernel_dtypes
from llmsuite.devices.tensors import array_of, tensor_of

_MOST_BLOCKS = 8
"""Blocks of 64 MiB within which a peak of memory has to grow."""
_NEEDED = (
    "matmul", "matmul_grad", "softmax", "softmax_grad", "add", "multiply", "scale", "cast", "embedding",
    "embedding_grad", "silu", "silu_grad", "rsqrt", "square", "mean", "sum", "split", "concat", "transpose",
    "index_select", "cross_entropy_with_softmax", "cross_entropy_with_softmax_grad", "adamw", "contiguous",
    "strided_copy", "full", "arange", "where", "cummax",
)  # fmt: skip
"""Operations of Paddle that a step of any model uses."""


@dataclasses.dataclass(frozen=True)
class DeviceCheck:
    """A check of the current device."""

    name: str
    breaks: str
    """Description of what goes wrong in llmsuite on a device that fails."""
    run: Callable[[DeviceBackend], None]
    """Raises AssertionError, with what was found, or any error of Paddle's."""
    is_fatal: bool = True
    """False where a failure costs time only."""


def _equal(found: Tensor, expected: Any, what: str) -> None:
    values = array_of(found.astype("float32"))
    wanted = np.asarray(expected, "float32")
    assert np.array_equal(values, wanted), f"{what} gives {values.tolist()} instead of {wanted.tolist()}"


def _near(found: Tensor, expected: np.ndarray, limit: float, what: str) -> None:
    values = array_of(found.astype("float32")).astype("float64")
    assert np.isfinite(values).all(), f"{what} gives numbers that are not finite"
    distance = float(np.abs(values - expected).max() / np.abs(expected).max())
    assert distance <= limit, f"{what} is off by {distance:.1e} of the largest number; at most {limit:.0e} was expected"


def _copies(backend: DeviceBackend) -> None:
    for values in (np.arange(6, dtype="float32"), np.arange(6, dtype="int64"), np.array([True, False, True])):
        there = tensor_of(values)
        assert np.array_equal(array_of(there), values), f"{values.dtype} comes back as {array_of(there).tolist()}"
    held = backend.to_host(tensor_of(np.arange(4, dtype="float32")))
    _equal(backend.to_device(held) + 1.0, [1, 2, 3, 4], "a tensor that was kept on the host")


def _view_added(backend: DeviceBackend) -> None:
    x = paddle.zeros([6])
    x[2:4].add_(paddle.ones([2]))
    _equal(x, [0, 0, 1, 1, 0, 0], "x[2:4].add_(1) on zeros")


def _view_scaled(backend: DeviceBackend) -> None:
    x = paddle.ones([6])
    x[2:4].scale_(3.0)
    _equal(x, [1, 1, 3, 3, 1, 1], "x[2:4].scale_(3) on ones")


def _view_copied(backend: DeviceBackend) -> None:
    x = paddle.zeros([6])
    x[2:4].copy_(paddle.full([2], 5.0), False)
    _equal(x, [0, 0, 5, 5, 0, 0], "x[2:4].copy_(5) on zeros")


def _view_reshaped(backend: DeviceBackend) -> None:
    x = paddle.zeros([2, 3])
    x.flatten().add_(paddle.arange(6, dtype="float32"))
    flat = x.view([6])
    flat.add_(paddle.ones([6]))
    found = array_of(x).flatten().tolist()
    expected = ([1.0] * 6, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])  # flatten may copy, view may not
    assert found in expected, f"x.view([6]).add_(1) gives {found}"


def _assigned_slice(backend: DeviceBackend) -> None:
    x = paddle.zeros([2, 3])
    x[:, 1] = paddle.ones([2])
    _equal(x, [[0, 1, 0], [0, 1, 0]], "x[:, 1] = 1 on zeros")


def _strided(backend: DeviceBackend) -> None:
    values = np.arange(24, dtype="float32").reshape(2, 3, 4)
    turned = tensor_of(values).transpose([0, 2, 1])
    _equal(turned.contiguous(), values.transpose(0, 2, 1), "contiguous() of a transposed tensor")
    _equal(turned * 2.0, values.transpose(0, 2, 1) * 2, "a product with a transposed tensor")
    other = np.ones([2, 3, 2], "float32")
    _equal(paddle.matmul(turned, tensor_of(other)), values.transpose(0, 2, 1) @ other, "matmul of a transposed tensor")
    _equal(tensor_of(values)[:, ::2, 1:3] + 1.0, values[:, ::2, 1:3] + 1, "a sum with every second row")


def _seeded(backend: DeviceBackend) -> None:
    paddle.seed(3)
    first = array_of(paddle.randn([64]))
    paddle.seed(3)
    again = array_of(paddle.randn([64]))
    assert np.array_equal(first, again), "paddle.seed(3) gives other numbers the second time"
    assert not np.array_equal(first, array_of(paddle.randn([64]))), "the same numbers come again and again"


def _random_state(backend: DeviceBackend) -> None:
    paddle.seed(3)
    paddle.randn([5])
    state = paddle.get_rng_state()
    first = array_of(paddle.randn([64]))
    paddle.set_rng_state(state)
    again = array_of(paddle.randn([64]))
    assert np.array_equal(first, again), "other numbers come after paddle.set_rng_state"


def _full_float32(backend: DeviceBackend) -> None:
    random = np.random.default_rng(0)
    x, y = (random.standard_normal([64, 64]).astype("float32") for _ in range(2))
    _near(tensor_of(x) @ tensor_of(y), x.astype("float64") @ y, 2e-6, "a product in float32")


def _gradients(backend: DeviceBackend) -> None:
    x = paddle.ones([4])
    x.stop_gradient = False
    for _ in range(2):
        (x * 3.0).sum().backward()
    _equal(x.grad, [6, 6, 6, 6], "the sum of two gradients")


def _clipped(backend: DeviceBackend) -> None:
    x = paddle.full([4], 2.0)
    grads = [(paddle.zeros([4]), x)]
    for parameter, _ in grads:
        parameter.stop_gradient = False
    clip = paddle.nn.ClipGradByGlobalNorm(1.0)
    _equal(clip(grads)[0][1], [0.5] * 4, "a gradient that is clipped to norm 1")


def _memory(backend: DeviceBackend) -> None:
    before = backend.peak_memory_bytes()
    held = []
    for _ in range(_MOST_BLOCKS):  # the first ones may use memory that was freed before
        held.append(paddle.ones([1 << 24]))
        float(held[-1][0])
        grown = backend.peak_memory_bytes() - before
        if grown >= 1 << 25:
            return
    assert held[0] is not None, "all are held until the end"
    size = _MOST_BLOCKS << 6
    raise AssertionError(f"{size} MiB more are allocated, and the peak of memory has grown by {grown} bytes")


def _kernels(backend: DeviceBackend) -> None:
    kind = paddle.device.get_device().partition(":")[0]
    dtypes = [PADDLE_DTYPE[precision] for precision in backend.precisions if precision in PADDLE_DTYPE]
    missing = []
    for dtype in dtypes:
        lacks = [name for name in _NEEDED if dtype not in kernel_dtypes(name, kind)]
        if lacks:
            missing.append(f"in {dtype} {', '.join(lacks)}")
    assert not missing, f"no kernel {'; '.join(missing)}"


CHECKS: tuple[DeviceCheck, ...] = (
    DeviceCheck("copies", "data and weights are not those that were read", _copies),
    DeviceCheck("view, add_", "gradients of ranks and micro-batches are lost", _view_added),
    DeviceCheck("view, scale_", "gradients are neither averaged nor clipped", _view_scaled),
    DeviceCheck("view, copy_", "updated parameters are lost, and so are loaded weights", _view_copied),
    DeviceCheck("view, reshaped", "gradients in buckets are lost", _view_reshaped),
    DeviceCheck("assigned slice", "caches of generation keep no keys and values", _assigned_slice),
    DeviceCheck("strided tensors", "attention fails, or is wrong", _strided),
    DeviceCheck("random seed", "two runs of a recipe differ", _seeded),
    DeviceCheck("random state", "recomputed layers have another dropout, and so has a resumed run", _random_state),
    DeviceCheck("float32", "losses differ between strategies in float32", _full_float32),
    DeviceCheck("gradients", "gradients of several micro-batches are wrong", _gradients),
    DeviceCheck("clipping", "train.max_grad_norm fails", _clipped),
    DeviceCheck("memory", "metrics and reports have no device memory", _memory, is_fatal=False),
    DeviceCheck("kernels", "Paddle computes these on the host, which is slow", _kernels, is_fatal=False),
)
"""In the order in which they are run: the first ones need least."""


def found_wrong(check: DeviceCheck, backend: DeviceBackend) -> str | None:
    """Run a check on the current device. Returns what is wrong in one line; None if nothing is."""
    try:
        check.run(backend)
    except Exception as error:
        text = line_of(error)
        return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"
    return None


def run_checks(backend: DeviceBackend, file: Path, checks: Sequence[DeviceCheck] = CHECKS) -> None:
    """Run checks that FILE does not have yet. A line is appended before each (its name), and one after it, with what is
    wrong: a check may end the process."""
    begun = {name for name, _ in read_checks(file)}
    for check in checks:
        if check.name in begun:
            continue
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps([check.name]) + "\n")
        wrong = found_wrong(check, backend)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps([check.name, wrong]) + "\n")


ENDED = "the process ended"
"""Finding of a check that has ended the process."""


def read_checks(file: Path) -> list[tuple[str, str | None]]:
    """The checks of a file that were begun, and what was wrong with each."""
    found: dict[str, str | None] = {}
    if is_file(file):
        for line in file.read_text(encoding="utf-8").splitlines():
            name, *wrong = json.loads(line)
            found[name] = wrong[0] if wrong else ENDED
    return list(found.items())
