"""`import llmsuite.devices.cpu_ranks` before `import paddle`: your own Paddle script on several CPU processes.

For scripts that call `paddle.distributed` themselves and that `python -m paddle.distributed.launch` starts, with
`dist.shard_tensor`, `dist.reshard`, `dist.shard_dataloader`, `dist.shard_optimizer` and `dist.to_static`. In Paddle's
wheel for the CPU some of their communication is missing or wrong; this import fixes it in the current process, as
`llmsuite run` does in its ranks. Where Paddle is installed for another device, it does nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.start import start_paddle
from llmsuite.devices.variables import NUM_RANKS, number_in

_FOR_OTHER_DEVICES = {"paddlepaddle-gpu", "paddlepaddle-xpu"}
_LOCAL_SIZE = "PADDLE_LOCAL_SIZE"  # paddle.distributed.launch sets it


def _start() -> None:
    """Start Paddle as a rank on the CPU.

    Raises:
        ImportError: Paddle has been imported already.
        UserError: the kernels for several processes cannot be built, or the variables of a rank are invalid.
    """
    if "paddle" in sys.modules:
        raise ImportError(
            "import llmsuite.devices.cpu_ranks before paddle: its fixes take effect when Paddle is imported"
        )
    num_ranks = number_in(os.environ, NUM_RANKS, 1)
    start_paddle(CpuBackend(), number_in(os.environ, _LOCAL_SIZE, num_ranks), join=num_ranks > 1)


if not _FOR_OTHER_DEVICES & {package.name for package in importlib.metadata.distributions()}:
    _start()
