"""The virtual device: in Paddle's own runtime, with memory that is address space and kernels that compute nothing."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Mapping
from typing import Any, ClassVar

from llmsuite.devices.custom import CustomBackend
from llmsuite.devices.gpu import GpuBackend
from llmsuite.plugins.rehearse.library import LIBRARY, loaded_library, plugin_directory

NAME = "virtual_gpu"
"""The name of the device, for recipes and for Paddle, whose Python takes the paths of a GPU where "gpu" is in it."""
PINNED = 1
"""Number of a second device, whose memory stands for the pinned memory of the host: address space, too."""
MEMORY = "LLMSUITE_REHEARSE_MEMORY"
"""Environment variable with the bytes of device memory beyond which allocations fail."""


class VirtualBackend(CustomBackend):
    """A GPU that computes nothing, for `llmsuite rehearse`."""

    name = NAME
    install = "pip install paddlepaddle==3.3.1"
    has_values = False
    supports_interleaving = True
    deterministic_flags: ClassVar[Mapping[str, str]] = {}  # nothing is computed

    def kernels(self, precision: str) -> Mapping[str, str]:
        return GpuBackend().kernels(precision)

    def environment(self, local_ranks: int, inference_only: bool = False) -> dict[str, str]:
        return {
            **super().environment(local_ranks, inference_only),
            # the values of small tensors are computed on the CPU, by one thread: the host's time is measured
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        return {self._selected: f"0,{PINNED}", "CUSTOM_DEVICE_ROOT": str(plugin_directory(LIBRARY))}

    def to_host(self, tensor: Any) -> Any:
        import paddle

        return tensor._copy_to(paddle.CustomPlace(self.name, PINNED), True)

    def activate(self, local_rank: int) -> None:
        super().activate(local_rank)
        _take_paths_of_gpus()
        if int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) > 1:
            _leave_alone()


def _take_paths_of_gpus() -> None:
    """Give Paddle's Python the flags of its CUDA wheel, by which it chooses kernels of attention."""
    import paddle
    from paddle.nn.attention import sdpa

    for kind in sdpa._backend_enabled:
        sdpa._backend_enabled[kind] = True
    only_cuda: dict[str, Any] = {"FLAGS_cudnn_deterministic": False, "FLAGS_flash_attn_version": 2}
    get_flags = paddle.base.framework.get_flags

    def get_flags_of_gpu(flags: Any) -> dict[str, Any]:
        names = [flags] if isinstance(flags, str) else list(flags)
        known = [name for name in names if name not in only_cuda]
        found = get_flags(known) if known else {}
        return {**found, **{name: only_cuda[name] for name in names if name in only_cuda}}

    paddle.get_flags = paddle.base.framework.get_flags = get_flags_of_gpu


def _leave_alone() -> None:
    """Make this process one rank of many without the others, before ranks would meet: the store in which they find
    each other answers at once."""
    from paddle.base import core

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    store = core.TCPStore("127.0.0.1", port, True, 1, 30)
    # pybind11 keeps the address of the C++ object after the header of Python's
    address = ctypes.c_void_p.from_address(id(store) + object.__basicsize__).value
    loaded_library().rehearse_leave_alone(ctypes.c_void_p(address))
    core.create_or_get_global_tcp_store = lambda: store
