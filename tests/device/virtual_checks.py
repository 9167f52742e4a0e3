"""Checks of the virtual device of `llmsuite rehearse`, in a process of its own.

    python -m tests.device.virtual_checks FILE

Each check is a function; FILE gets a JSON object of their names, with null for what is right.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.devices.start import start_paddle
from llmsuite.plugins.rehearse import records as kinds
from llmsuite.plugins.rehearse.backend import MEMORY, VirtualBackend
from llmsuite.plugins.rehearse.library import loaded_library, reserved_bytes
from llmsuite.plugins.rehearse.records import Places, Record, parse_alive, parse_records

GIB = 1 << 30
PLACES = Places()


def resident_bytes() -> int:
    """Memory that this process takes."""
    with open("/proc/self/statm", encoding="utf-8") as lines:
        return int(lines.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def recorded(run: Callable[[], Any]) -> list[Record]:
    """What a call puts on the device."""
    loaded_library().rehearse_forget_records()
    kept = run()  # freed after the records are read
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "records"
        assert loaded_library().rehearse_write_records(str(path).encode()) == 0
        found = parse_records(path.read_text(encoding="utf-8").splitlines(), PLACES, {})
    del kept
    return found


def memory_is_address_space() -> None:
    import paddle

    before = resident_bytes()
    x = paddle.ones([20 * GIB // 2], "bfloat16")
    y = x + x
    assert paddle.device.memory_allocated() >= 40 * GIB
    assert reserved_bytes()[0] >= 40 * GIB
    assert resident_bytes() - before < 64 << 20, resident_bytes() - before
    del x, y


def small_tensors_have_values() -> None:
    import paddle

    lengths = paddle.to_tensor([3, 5, 2])
    mask = paddle.arange(6).unsqueeze(0) < lengths.unsqueeze(1)
    assert mask.astype("int64").sum(1).tolist() == [3, 5, 2]
    assert paddle.nonzero(lengths > 2).flatten().tolist() == [0, 1]


def large_tensors_read_as_ones() -> None:
    import paddle

    x = paddle.ones([1 << 20]) * 3.0
    assert float(x.sum()) == 1.0  # nobody has computed it


def products_are_counted() -> None:
    import paddle

    x = paddle.empty([512, 1024], "bfloat16")
    y = paddle.empty([1024, 2048], "bfloat16")
    (product,) = recorded(lambda: x @ y)
    assert (product.kind, product.name) == (kinds.KERNEL, "matmul")
    assert product.flops == 2 * 512 * 1024 * 2048
    assert product.bytes == 2 * (512 * 1024 + 1024 * 2048 + 512 * 2048)


def gradients_are_counted() -> None:
    import paddle

    x = paddle.empty([512, 1024], "bfloat16")
    weight = paddle.empty([1024, 2048], "bfloat16")
    weight.stop_gradient = False
    y = x @ weight
    found = [record for record in recorded(lambda: y.sum().backward()) if record.flops]
    assert [record.name for record in found] == ["matmul_grad"]
    assert found[0].flops == 2 * 512 * 1024 * 2048  # x needs none
    assert weight.grad.shape == [1024, 2048]


def kernels_of_gpus_are_there() -> None:
    import paddle

    from llmsuite.devices.paddle_kernels import document_ends, flash_attention, fused_rms_norm, fused_rotary

    q = paddle.empty([1, 512, 8, 64], "bfloat16")
    k = paddle.empty([1, 512, 2, 64], "bfloat16")
    for tensor in (q, k):
        tensor.stop_gradient = False
    ends = document_ends(paddle.zeros([1, 512], "int64"), "bfloat16")
    for mask, name in ((None, "flash_attn"), (ends, "flashmask_attention")):
        y = flash_attention(q, k, k, mask)
        assert y.shape == q.shape
        found = {record.name for record in recorded(lambda y=y: y.sum().backward())}
        assert f"{name}_grad" in found, found
    assert q.grad.shape == q.shape
    assert k.grad.shape == k.shape
    x = paddle.empty([1, 512, 1024], "bfloat16")
    weight = paddle.empty([1024], "bfloat16")
    x.stop_gradient = weight.stop_gradient = False
    fused_rms_norm(x, weight, 1e-5).sum().backward()
    assert weight.grad.shape == [1024]
    turned = fused_rotary(q, paddle.empty([1, 512, 1, 32]), paddle.empty([1, 512, 1, 32]))
    assert turned.shape == q.shape


def attention_weights_take_no_memory() -> None:
    import paddle

    from llmsuite.devices.paddle_kernels import flash_attention

    q = paddle.empty([1, 4096, 32, 128], "bfloat16")
    before = paddle.device.memory_allocated()
    y = flash_attention(q, q, q, None)
    assert paddle.device.memory_allocated() - before < 1.1 * 2 * 4096 * 32 * 128
    del y


def reads_and_waits_are_located() -> None:
    import paddle

    from llmsuite.devices.tensors import array_of, tensor_of

    locate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda kind: PLACES.current())
    loaded_library().rehearse_locate(locate, (1 << 9) - 1)
    try:
        uploaded = recorded(lambda: tensor_of(np.arange(4)))
        x = paddle.ones([4])
        read = recorded(lambda: array_of(x))
        item = recorded(lambda: x[0].item())
    finally:
        loaded_library().rehearse_locate(None, 0)
    assert [record.kind for record in uploaded if record.kind != kinds.KERNEL] == [kinds.UPLOAD], uploaded
    assert [record.kind for record in read] == [kinds.READ, kinds.WAIT], read
    assert kinds.READ in {record.kind for record in item}
    assert {record.place for record in (*uploaded, *read)} == {kinds.UNKNOWN}  # tests are no part of the package


def arrays_arrive_in_one_copy() -> None:
    from llmsuite.devices.tensors import array_of, in_one_copy, shared_tensor_of, tensors_of

    arrays = [
        np.arange(6).reshape(2, 3).T,  # not contiguous
        np.array([True, False, True]),
        np.linspace(0, 1, 130, dtype="float32"),
        np.zeros([0, 2], "int64"),
        np.array([1.5, -2.5]),
        np.array([0x3F80, 0x4000], "uint16"),  # bits of bfloat16
    ]
    made: list[Any] = []
    found = recorded(lambda: made.extend(tensors_of(arrays)))
    assert [record.kind for record in found if record.kind != kinds.KERNEL] == [kinds.UPLOAD, kinds.UPLOAD], found
    for tensor, array in zip(made, arrays, strict=True):
        assert tensor.shape == list(array.shape)
        assert tensor.stop_gradient
        assert tensor.is_contiguous()
        assert np.array_equal(array_of(tensor), array), (tensor, array)
    positions = np.arange(3)
    with in_one_copy([positions, *arrays[:3]]):
        found = recorded(lambda: made.extend(shared_tensor_of(array) for array in (positions, arrays[2], positions)))
    assert [record.kind for record in found if record.kind != kinds.KERNEL] == [kinds.UPLOAD], found
    assert array_of(made[-1]).tolist() == [0, 1, 2]
    assert np.array_equal(array_of(made[-2]), arrays[2])


def what_is_alive_is_known() -> None:
    import paddle

    held = [paddle.empty([GIB // 4]) for _ in range(3)]
    freed = paddle.empty([GIB])
    del freed
    loaded_library().rehearse_note_alive()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "alive"
        loaded_library().rehearse_write_peak(str(path).encode())
        alive = parse_alive(path.read_text(encoding="utf-8").splitlines(), PLACES)
    # the engine keeps small tables of earlier checks
    assert alive[0]["kernel"] == "empty", alive
    assert 3 * GIB <= alive[0]["bytes"] < 3 * GIB + (1 << 20), alive
    del held


def pinned_memory_is_address_space_too() -> None:
    import paddle

    backend = VirtualBackend()
    x = paddle.empty([50 * GIB // 2], "bfloat16")
    before = resident_bytes()
    for copy, kind in ((backend.to_host, kinds.READ), (backend.to_device, kinds.UPLOAD)):
        moved: list[Any] = []
        made = recorded(lambda copy=copy, x=x, moved=moved: moved.append(copy(x)))
        (record,) = (record for record in made if record.kind not in (kinds.KERNEL, kinds.WAIT))
        assert (record.kind, record.bytes) == (kind, 50 * GIB)
        assert made[-1].kind == kinds.WAIT, "the host waits for the copy"
        (x,) = moved
    assert reserved_bytes()[2] >= 50 * GIB
    assert resident_bytes() - before < 64 << 20
    assert paddle.device.get_device() == f"{backend.name}:0"
    values = backend.to_device(backend.to_host(paddle.to_tensor([3, 4])))
    assert values.tolist() == [3, 4]


def memory_ends() -> None:
    import paddle

    held = paddle.empty([60 * GIB // 2], "bfloat16")
    with pytest.raises(MemoryError, match="Out of memory"):
        paddle.empty([60 * GIB // 2], "bfloat16")
    del held
    paddle.empty([60 * GIB // 2], "bfloat16")  # it may have the memory that was kept


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        memory_is_address_space,
        small_tensors_have_values,
        large_tensors_read_as_ones,
        products_are_counted,
        gradients_are_counted,
        kernels_of_gpus_are_there,
        attention_weights_take_no_memory,
        reads_and_waits_are_located,
        arrays_arrive_in_one_copy,
        what_is_alive_is_known,
        pinned_memory_is_address_space_too,
        memory_ends,
    )
}


def _wrong(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return None


def main(file: str) -> None:
    """Run all checks."""
    os.environ[MEMORY] = str(100 * GIB)
    backend = VirtualBackend()
    start_paddle(backend, 1)
    reason = backend.unavailable(1)
    assert reason is None, reason
    backend.activate(0)
    Path(file).write_text(json.dumps({name: _wrong(check) for name, check in CHECKS.items()}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
