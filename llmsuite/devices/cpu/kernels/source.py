"""How the kernels are built, and whether they can be. Imports no Paddle."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

from llmsuite.devices.cpu.build import Library

_HERE = Path(__file__).parent
KERNELS = Library(
    name="kernels",
    sources=tuple(_HERE / name for name in ("attention.cc", "rows.cc", "decode.cc", "common.h")),
    # OpenMP's calls are those of Paddle's own libiomp5: with a second runtime beside it each thread would do all work
    options=("-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-Wl,--as-needed"),
    links=("libphi_core.so", "libcommon.so", "libiomp5.so", "libmklml_intel.so"),
    is_for_this_cpu=True,
    without=("the CPU's fused operations need", "do without them"),
)


def can_be_built() -> bool:
    """Whether this machine has a compiler, and a Paddle with Intel's library of products."""
    return platform.machine() == "x86_64" and platform.system() == "Linux" and shutil.which("g++") is not None
