"""A program in which Paddle 3.3.1 gives device memory back too early, unless FLAGS_fast_eager_deletion_mode is 0.

    python -m tests.device.early_release

ends with 0 if the numbers are right; see docs/notes/upstream.md.
"""

from __future__ import annotations

import os

from llmsuite.devices.start import start_paddle
from tests.device import SimBackend

ROWS = 8
EXPECTED = 1.0 + (ROWS + 8) + ROWS * 8


def run() -> float:
    """The result of the program, whose right value is `EXPECTED`."""
    import paddle
    from paddle.static import InputSpec

    @paddle.jit.to_static(full_graph=True, input_spec=[InputSpec([None, 8], "float32")])
    def program(x):
        # shapes are tensors of the host: each sum is copied to the device, the second one while the first may be read
        y = x + paddle.shape(x).astype("float32").sum()
        return y + paddle.shape(y).astype("float32").prod()

    x = paddle.ones([ROWS, 8])
    program(x)  # for the first call of a kernel the host waits
    paddle.device.synchronize()
    return float(program(x).max())


def main() -> None:
    os.environ["SIM_LATE_US"] = "50000"  # kernels begin after the next copy
    backend = SimBackend()
    start_paddle(backend, 1)
    backend.activate(0)
    found = run()
    assert found == EXPECTED, f"{found} instead of {EXPECTED}"


if __name__ == "__main__":
    main()
