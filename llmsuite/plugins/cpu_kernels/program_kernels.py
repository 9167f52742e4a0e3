"""Builds the operations of an exported program by Paddle's own tools, and registers them with Paddle.

This file is in `kernels` of an exported model, with the sources. It needs Paddle, g++ and setuptools, but not llmsuite:

    import sys

    sys.path.insert(0, "MODEL/kernels")
    import program_kernels

    program_kernels.register()  # once a process, before `paddle.inference.create_predictor`

They are built once for each processor and Paddle, in about twenty seconds, into Paddle's cache of extensions
(PADDLE_EXTENSION_DIR). `python MODEL/kernels/program_kernels.py` prints the path of the library: a C++ program links
it, or opens it with `dlopen` before it creates the predictor.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def register() -> None:
    """Build and register the operations, so that predictors of this process can load the program.

    Raises:
        RuntimeError: the operations cannot be built.
    """
    import paddle
    from paddle.utils.cpp_extension import load

    libraries = os.path.join(os.path.dirname(paddle.__file__), "libs")
    # OpenMP's runtime is Paddle's own: with a second runtime in the process each thread would do all the work
    names = ("libiomp5.so", "libmklml_intel.so", "libphi_core.so", "libcommon.so")
    with contextlib.redirect_stdout(sys.stderr):  # messages about the build
        load(
            name=_name(),
            sources=[os.path.join(_HERE, "stored.cc")],
            extra_cxx_cflags=["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-w"],
            extra_ldflags=[f"-L{libraries}", *(f"-l:{name}" for name in names), f"-Wl,-rpath,{libraries}"],
        )


def library() -> str:
    """Path of the library, after `register`."""
    from paddle.utils.cpp_extension.extension_utils import get_build_directory

    (found,) = glob.glob(os.path.join(get_build_directory(), _name(), "*.so"))
    return found


def _name() -> str:
    """A name that depends on processor, Paddle and sources: machines may share a home directory."""
    import paddle

    content = [paddle.__version__.encode(), os.path.dirname(paddle.__file__).encode()]
    for path in sorted(glob.glob(os.path.join(_HERE, "*.cc")) + glob.glob(os.path.join(_HERE, "*.h"))):
        with open(path, "rb") as file:
            content.append(file.read())
    with open("/proc/cpuinfo", "rb") as lines:
        content += sorted({line for line in lines if line.startswith((b"flags", b"model name"))})
    return f"llmsuite_program_{hashlib.sha256(b''.join(content)).hexdigest()[:16]}"


if __name__ == "__main__":
    register()
    print(library())
