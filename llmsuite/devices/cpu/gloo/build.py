"""Builds the missing CPU kernels once per Paddle version, into the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from llmsuite.cache import cache_root
from llmsuite.errors import UserError

_SOURCE = Path(__file__).with_name("kernels.cc")


def library(source: Path = _SOURCE) -> Path:
    """The shared library for the installed Paddle; builds it (a few seconds) when it is not in the cache.

    Raises:
        UserError: there is no g++, or it cannot build the library.
    """
    paddle = _paddle()
    # the library is linked to this very installation, so its place is part of the name
    digest = hashlib.sha256(source.read_bytes() + str(paddle).encode()).hexdigest()[:16]
    directory = cache_root() / "gloo"
    target = directory / f"{source.stem}-{importlib.metadata.version('paddlepaddle')}-{digest}.so"
    if target.is_file():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs may start at once
        if not target.is_file():
            _build(source, target, paddle)
    return target


def _paddle() -> Path:
    """Directory of the Paddle package, found without importing it: the library is loaded first."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.origin is None:
        raise UserError("Paddle is not installed; install it with: pip install 'llmsuite[cpu]'")
    return Path(spec.origin).parent


def _build(source: Path, target: Path, paddle: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        raise UserError(
            "several CPU processes need a C++ compiler once, to build what Paddle's CPU wheel lacks; "
            "install it with: apt-get install g++ (or your system's package), or set launch.num_devices to 1"
        )
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        command = [
            compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-w",
            f'-DLIBPADDLE="{paddle / "base" / "libpaddle.so"}"', "-DPADDLE_ON_INFERENCE=0",
            f"-I{paddle / 'include'}", f"-I{paddle / 'include' / 'third_party'}", str(source), "-o", str(output),
            f"-L{paddle / 'libs'}", "-l:libphi_core.so", "-l:libcommon.so",
            f"-Wl,-rpath,{paddle / 'libs'}", "-Wl,-z,lazy",
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            log = target.with_suffix(".log")
            log.write_text(" ".join(command) + "\n" + result.stdout + result.stderr)
            raise UserError(f"building the CPU kernels failed; the compiler's messages are in {log}")
        os.replace(output, target)
