"""Workarounds for bugs of Paddle 3.3.1 with several CPU processes over Gloo; a comment at each says why.

Import order matters: `preload` before `import paddle`, `install` right after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.devices.cpp_library import CppLibrary, build_library
from llmsuite.devices.cpu.gloo import GLOO_TIMEOUT
from llmsuite.devices.pipeline_events import without_pipeline_events

_HERE = Path(__file__).parent
KERNELS = CppLibrary(
    name="gloo",
    sources=(_HERE / "kernels.cc", _HERE / "types.h", _HERE / "messages.cc", _HERE / "messages.h"),
    options=("-O1",),
    links=("libphi_core.so", "libcommon.so"),
    is_for_this_cpu=False,
    without=("several CPU processes need", "set launch.num_devices to 1"),
)
_FRONT_SOURCES = tuple(_HERE / name for name in ("front.cc", "types.h", "messages.h"))
FRONT = dataclasses.replace(KERNELS, name="gloo_front", sources=_FRONT_SOURCES, links=())
"""Definitions that the linker finds before the wheel's stubs. It links no library of Paddle: see front.cc."""

_STORE_SECONDS = 1800  # the store counts milliseconds in 32 bits
_MOST_STORE_SECONDS = 86400
_SIOCGIFADDR = 0x8915  # Linux: ask for the address of an interface
_FIRST_RING = 100_000  # above the numbers of all groups
_stores: list[Any] = []  # kept alive: a store serves its group until the process ends
_ranks_of_group: list[str] = []


def build_kernels() -> None:
    """Build the missing kernels, if necessary. Raises UserError if they cannot be built."""
    for what in (FRONT, KERNELS):
        build_library(what)


def preload() -> None:
    """Load `FRONT` before Paddle, so that its symbols are found first. Raises UserError if it cannot be built."""
    build_kernels()
    ctypes.CDLL(str(build_library(FRONT)), mode=ctypes.RTLD_GLOBAL | os.RTLD_LAZY)


def load_kernels() -> None:
    """Load the kernels that `FRONT` calls, after Paddle is loaded."""
    kernels = ctypes.CDLL(str(build_library(KERNELS)), mode=ctypes.RTLD_LOCAL | os.RTLD_LAZY)
    ctypes.CDLL(str(build_library(FRONT))).use_kernels(ctypes.c_void_p(kernels._handle))


def install() -> None:
    """Patch Paddle; to be called once per process."""
    import paddle
    import paddle.distributed as dist
    from paddle.base import core
    from paddle.distributed import collective
    from paddle.distributed.auto_parallel.static import process_group

    load_kernels()

    # Gloo listens on the address of the host's name, often the loopback, which other machines cannot reach.
    if (interface := _interface(_own_address())) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    # Groups created back to back use the same keys of one store and mix them up: each gets its own store.
    # Disjoint groups may share an id, so the store's name needs the ranks, which only new_group knows.
    new_group = collective.new_group
    create = core.ProcessGroupGloo.create

    def new_group_with_ranks(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        _ranks_of_group.append("all" if ranks is None else "-".join(map(str, sorted(ranks))))
        try:
            return new_group(ranks, *args, **kwargs)
        finally:
            _ranks_of_group.pop()

    def create_with_private_store(store: Any, rank: int, size: int, group_id: int = 0, *args: Any) -> Any:
        if size > 1:
            members = _ranks_of_group[-1] if _ranks_of_group else "all"
            store = _private_store(store, f"group/{group_id}/{members}", rank)
        return create(store, rank, size, group_id)

    collective.new_group = dist.new_group = new_group_with_ranks
    core.ProcessGroupGloo.create = create_with_private_store  # type: ignore[method-assign, assignment]

    # Static programs: ProcessGroup.instantiate knows CUDA, XPU and custom devices only.
    def instantiate(self: Any) -> None:
        rank = dist.get_rank()
        # ring 0 is the default group, which exists already
        if not self._is_instantiate and self.id != 0 and self.nranks > 1 and rank in self.ranks:
            members = "-".join(map(str, self.ranks))
            shared = core.create_or_get_global_tcp_store()
            store = _private_store(shared, f"ring/{self.id}/{members}", self.local_rank(rank))
            core.CommContextManager.create_gloo_comm_context(store, str(self.id), self.local_rank(rank), self.nranks)
        self._is_instantiate = True

    process_group.ProcessGroup.instantiate = instantiate

    # Rings of programs get numbers that later groups would get again: start above them.
    process_group._new_ring_id = lambda: _FIRST_RING

    without_pipeline_events()

    # The barrier inside to_static is an NCCL op; the public one does the same over Gloo.
    def barrier(x: Any, out: Any, *attributes: Any) -> Any:
        dist.barrier()
        return out

    paddle._legacy_C_ops.barrier = barrier

    # dist.load_state_dict moves tensors that one rank has read for another to a device with an index, by `cuda()`.
    paddle.Tensor.cuda = lambda self, *arguments, **named: self


def _store_seconds() -> int:
    """Seconds that a rank waits for the others when a group is created."""
    return min(_MOST_STORE_SECONDS, int(os.environ.get(GLOO_TIMEOUT) or _STORE_SECONDS))


def _private_store(shared: Any, name: str, rank: int) -> Any:
    """A store for one group: its first rank serves it and publishes its address in the shared store."""
    from paddle.base import core

    key = f"llmsuite/{name}"
    if rank == 0:
        address = _own_address()
        for _ in range(20):  # another process may take the port after `_free_port` has returned it
            port = _free_port(address)
            try:
                store = core.TCPStore(address, port, True, 0, _store_seconds())
                break
            except (RuntimeError, OSError):
                continue
        else:
            raise UserError(f"no free port on {address} for the rendezvous of the ranks")
        shared.set(key, f"{address}:{port}")
    else:
        address, _, text = bytes(shared.get(key)).decode().rpartition(":")
        store = core.TCPStore(address, int(text), False, 0, _store_seconds())
    _stores.append(store)
    return store


def _own_address() -> str:
    """The address of this machine on the route to the master, which the other machines can reach."""
    host = os.environ.get("PADDLE_MASTER", "127.0.0.1:0").rpartition(":")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, 9))  # sends nothing: only finds the route
        return str(s.getsockname()[0])


def _interface(address: str) -> str | None:
    """The network interface with an address; None for the loopback, or if no interface has it."""
    if address.startswith("127."):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode())
                if socket.inet_ntoa(fcntl.ioctl(s, _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None


def _free_port(address: str) -> int:
    with socket.socket() as s:
        s.bind((address, 0))
        return int(s.getsockname()[1])
