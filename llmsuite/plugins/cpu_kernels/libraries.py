"""Build of the kernels, and the check that they can be built. Imports no Paddle."""

from __future__ import annotations

import dataclasses
import platform
import shutil
import sys
from pathlib import Path

from llmsuite.base.errors import UserError
from llmsuite.devices.cpp_library import CppLibrary, build_library

TILE = 32
"""Outputs of a tile of a packed matrix, see `packing`; the same number as in `sources/stored.h`."""
_SOURCES = Path(__file__).parent / "sources"
_FILES = (
    *("attention.cc", "bf16_attention.cc", "rows.cc", "decode.cc", "stored.cc", "rounding.cc", "rounded_linear.cc"),
    *("grouped.cc", "expert_rows.cc", "gradients.cc", "adamw.cc"),
)
_HEADERS = (
    "attention.h",
    "common.h",
    "grouped.h",
    "linear.h",
    "packing.h",
    "products.h",
    "rounding.h",
    "stored.h",
    "tiles.h",
)
KERNELS = CppLibrary(
    name="kernels",
    sources=tuple(_SOURCES / name for name in (*_FILES, *_HEADERS)),
    # OpenMP's runtime is Paddle's own libiomp5: with a second runtime in the process each thread would do all the work
    options=(
        "-O3",
        "-mprefer-vector-width=512",  # GCC's default on Intel is 256, with which attention takes 10% longer
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fopenmp",
        "-Wl,--as-needed",
    ),
    links=("libphi_core.so", "libcommon.so", "libiomp5.so", "libmklml_intel.so"),
    is_for_this_cpu=True,
    without=("the CPU's fused operations need", "do without them"),
)


PRODUCTS = dataclasses.replace(
    KERNELS,
    name="products",
    sources=tuple(
        _SOURCES / name
        for name in (
            *(
                "products.cc",
                "bf16_grouped.cc",
                "blocks.h",
                "common.h",
                "grouped.h",
                "linear.h",
                "packing.h",
                "parts.h",
            ),
            *("rounding.h", "tiles.h"),
        )
    ),
    links=("libphi_core.so", "libcommon.so", "libiomp5.so"),
    without=("products in bfloat16 need", "do without their instructions"),
    instructions=(("avx512_bf16", "__AVX512BF16__"), ("amx_bf16", "__AMX_BF16__")),
)

PROGRAM_FILES = (
    *(_SOURCES / name for name in ("stored.cc", "products.h", "rounding.h", "stored.h", "common.h")),
    Path(__file__).with_name("program_kernels.py"),
)
"""Files that are written with an exported program that has packed weights."""


def can_be_built(what: CppLibrary = KERNELS) -> bool:
    """True if this machine has a compiler, and a Paddle with Intel's MKL. A compiler that fails is known only after
    `build_kernels` has tried."""
    is_there = platform.machine() == "x86_64" and platform.system() == "Linux" and shutil.which("g++") is not None
    return is_there and what.name not in _FAILED


def build_kernels(what: CppLibrary = KERNELS) -> Path | None:
    """The library of kernels for the installed Paddle. None if it cannot be built: plain operations compute the same,
    slower, so that is a warning, not an error."""
    if not can_be_built(what):
        return None
    try:
        return build_library(what)
    except UserError as error:
        _FAILED[what.name] = str(error)
        print(f"warning: {error}; continuing with plain operations, which are slower", file=sys.stderr, flush=True)
        return None


_FAILED: dict[str, str] = {}
"""Errors by the names of libraries that could not be built, in this process or the one that forked it."""
