"""Checks of the device `sim` itself, in a process of its own: `python -m tests.device.checks FILE`.

Each check is a function; FILE gets a JSON object of their names, with null for what is right.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.devices.start import start_paddle
from tests.device import SimBackend
from tests.device.library import figures, library

BACKEND = SimBackend()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """While active, no stream does anything."""
    library().sim_hold()
    try:
        yield
    finally:
        library().sim_let_go()


def same(found: Any, expected: Any) -> None:
    found = found.astype("float32").numpy()
    assert np.array_equal(found, np.asarray(expected, "float32")), f"{found} instead of {expected}"


def the_host_cannot_read_device_memory() -> None:
    import paddle

    address = paddle.ones([4]).data_ptr()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(address, 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status
    assert os.WTERMSIG(status) == signal.SIGSEGV, status


def kernels_are_over_later() -> None:
    import paddle

    x = paddle.arange(6, dtype="float32").reshape([2, 3])
    x @ x.t()  # for the first call of a kernel the host waits
    event = paddle.device.Event()
    with held():
        y = x @ x.t()
        event.record()
        assert not event.query()
    event.synchronize()
    assert event.query()
    same(y, [[5, 14], [14, 50]])


def memory_counts() -> None:
    import paddle

    before = BACKEND.peak_memory_bytes()
    x = paddle.zeros([1 << 22])  # larger than what was freed before
    assert BACKEND.peak_memory_bytes() - before >= (1 << 22), (BACKEND.peak_memory_bytes(), before)
    assert figures()["used"] >= 4 * (1 << 22)
    del x


def sixteen_bits_are_float32_rounded() -> None:
    import paddle

    random = np.random.default_rng(0)
    a, b = (random.standard_normal([8, 8]).astype("float32") for _ in range(2))
    for dtype in ("bfloat16", "float16"):
        x, y = (paddle.to_tensor(value).astype(dtype) for value in (a, b))
        wide = (x.astype("float32") @ y.astype("float32")).astype(dtype)
        same(x @ y, wide.astype("float32").numpy())


def views_are_written_in_place() -> None:
    import paddle

    x = paddle.zeros([6])
    x[2:4].add_(paddle.ones([2]))
    same(x, [0, 0, 1, 1, 0, 0])


def random_states_are_kept() -> None:
    import paddle

    paddle.seed(3)
    state = paddle.get_rng_state()
    first = paddle.randn([4]).numpy()
    paddle.set_rng_state(state)
    same(paddle.randn([4]), first)


def other_stream() -> Any:
    import paddle

    return paddle.device.Stream(paddle.device.get_device())


def _is_refused(run: Callable[[], Any], *words: str) -> None:
    try:
        run()
    except Exception as error:
        found = str(error)
        assert all(word in found for word in ("not ordered", *words)), found
    else:
        raise AssertionError("it is not refused")


def a_read_waits_for_the_write() -> None:
    import paddle

    x = paddle.ones([4]) * 2.0
    x * 3.0
    stream = other_stream()
    with paddle.device.stream_guard(stream):
        _is_refused(lambda: x * 3.0, "reads", "writes")
    stream.wait_stream(paddle.device.current_stream())
    with paddle.device.stream_guard(stream):
        y = x * 3.0
    stream.synchronize()
    same(y, [6, 6, 6, 6])


def a_write_waits_for_reads() -> None:
    import paddle

    x, y = paddle.ones([4]), paddle.ones([4])
    x.scale_(1.0)
    stream = other_stream()
    stream.wait_stream(paddle.device.current_stream())
    y += x  # reads x after the event
    with paddle.device.stream_guard(stream):
        _is_refused(lambda: x.scale_(2.0), "writes", "reads")


def the_host_waits_for_an_event() -> None:
    import paddle

    x = paddle.ones([4]) * 2.0
    event = paddle.device.Event()
    event.record()
    event.synchronize()
    with paddle.device.stream_guard(other_stream()):
        y = x * 3.0
    paddle.device.synchronize()
    same(y, [6, 6, 6, 6])


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        the_host_cannot_read_device_memory,
        kernels_are_over_later,
        memory_counts,
        sixteen_bits_are_float32_rounded,
        views_are_written_in_place,
        random_states_are_kept,
        a_read_waits_for_the_write,
        a_write_waits_for_reads,
        the_host_waits_for_an_event,
    )
}


def paddle_is_done() -> None:
    """Wait for all streams: memory of the check before may be used again."""
    import paddle

    paddle.device.synchronize()


def _wrong(check: Callable[[], None]) -> str | None:
    paddle_is_done()
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return None


def main(file: str) -> None:
    """Run all checks, then those of `llmsuite doctor`."""
    start_paddle(BACKEND, 1)
    reason = BACKEND.unavailable(1)
    assert reason is None, reason
    BACKEND.activate(0)
    found = {name: _wrong(check) for name, check in CHECKS.items()}
    from llmsuite.devices import device_checks

    for check in device_checks.CHECKS:
        paddle_is_done()
        found[check.name] = device_checks.found_wrong(check, BACKEND)
    Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
