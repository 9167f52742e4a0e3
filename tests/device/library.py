"""What the library of the device says of itself, in a process that Paddle has loaded it in."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

FIGURES = ("allocations", "releases", "used", "peak", "launched", "waited", "unordered")
"""Counts, bytes in use and their peak, kernels that the host launched and went on, those it waited for, and operations
that touch memory without an order."""


def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(os.environ["CUSTOM_DEVICE_ROOT"]) / "libsim.so"))


def figures() -> dict[str, int]:
    """The counts so far."""
    found = (ctypes.c_uint64 * len(FIGURES))()
    library().sim_figures(found)
    return dict(zip(FIGURES, found, strict=True))


def last_unordered() -> str:
    """The text of the last operation without an order."""
    text = ctypes.create_string_buffer(1000)
    library().sim_last_unordered(text, ctypes.c_size_t(len(text)))
    return text.value.decode()
