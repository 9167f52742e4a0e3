"""The virtual device as Paddle loads it: a plug-in in C++ for Paddle's CPU wheel, built once."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from llmsuite.base.safe_files import exists
from llmsuite.devices.cpp_library import CppLibrary, build_library

_RUNTIME = Path(__file__).parent / "runtime"
SHARED = _RUNTIME / "shared"
"""Directory of the sources that other devices of Paddle's CustomDevice interface may be built from too."""
_FIRST = _RUNTIME / "virtual_device.cc"


def sources(*directories: Path, first: Path) -> tuple[Path, ...]:
    """All C++ files and headers in some directories, `first` before the others, in one order everywhere."""
    found = {path for directory in directories for path in (*directory.glob("*.cc"), *directory.glob("*.h"))}
    return (first, *sorted(found - {first}))


LIBRARY = CppLibrary(
    name="rehearse",
    sources=sources(_RUNTIME, SHARED, first=_FIRST),
    options=("-O1", "-fvisibility=hidden", "-DPADDLE_WITH_CUSTOM_DEVICE"),
    links=("libphi_core.so", "libcommon.so"),
    is_for_this_cpu=False,
    without=("llmsuite rehearse needs", "estimate by arithmetic with: llmsuite plan"),
    include_directories=(SHARED,),
)


def plugin_directory(library: CppLibrary) -> Path:
    """A directory with this library and no other, as Paddle loads all that it finds; builds it if it is not there.

    Raises:
        UserError: it cannot be built.
    """
    built = build_library(library)
    directory = built.with_suffix("")
    directory.mkdir(exist_ok=True, mode=0o700)
    link = directory / f"lib{library.name}.so"
    if not exists(link):
        own = directory / f"{os.getpid()}.link"
        own.symlink_to(Path("..") / built.name)  # the cache may be reached by a path of the session
        own.replace(link)  # at once: several processes may do so
    return directory


@functools.cache
def loaded_library() -> ctypes.CDLL:
    """The library, in a process that Paddle has loaded it in."""
    return ctypes.CDLL(str(Path(os.environ["CUSTOM_DEVICE_ROOT"]) / f"lib{LIBRARY.name}.so"))


def reserved_bytes() -> tuple[int, int, int]:
    """Bytes that Paddle's allocator has taken: of the device now, the most of it so far, and the most of the host's
    pinned memory. More than is allocated: freed memory is kept for later tensors, which may not fit into it."""
    found = (ctypes.c_uint64 * 3)()
    loaded_library().rehearse_memory(found)
    return found[0], found[1], found[2]
