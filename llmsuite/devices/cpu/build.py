"""Builds C++ that Paddle's CPU wheel lacks, once per Paddle version, into the user's cache."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from llmsuite.cache import BUILT, cache_root, is_own_file, locked, own_directory
from llmsuite.errors import UserError
from llmsuite.extras import install_command


@dataclasses.dataclass(frozen=True)
class Library:
    """A shared library to be built from C++."""

    name: str
    """Name of its directory in the cache."""
    sources: tuple[Path, ...]
    """Source files and headers; the first one names the library."""
    options: tuple[str, ...]
    """Compiler options beside those that all libraries have."""
    links: tuple[str, ...]
    """File names of those of Paddle's libraries that it is linked to."""
    is_for_this_cpu: bool
    """Whether it uses all instructions of this machine's processor."""
    without: tuple[str, str]
    """For the error message without a compiler: what needs one, and how to do without."""


def library(what: Library) -> Path:
    """The shared library for the installed Paddle; builds it (up to a minute) when it is not in the cache.

    Raises:
        UserError: there is no g++, or it cannot build the library.
    """
    paddle = _paddle()
    # the library is linked to this very installation, so its place is part of the name
    content = b"".join(source.read_bytes() for source in what.sources) + " ".join([str(paddle), *what.options]).encode()
    content += _processor() if what.is_for_this_cpu else b""
    directory = own_directory(cache_root() / BUILT / what.name)
    version = importlib.metadata.version("paddlepaddle")
    target = directory / f"{what.sources[0].stem}-{version}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if is_own_file(target):
        return target
    with locked(directory / "build.lock"):  # two runs may start at once
        if not is_own_file(target):
            _build(what, target, paddle)
    return target


def _paddle() -> Path:
    """Directory of the Paddle package, found without importing it: some libraries are loaded first."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.origin is None:
        raise UserError(f"Paddle is not installed; install it with: {install_command('cpu')}")
    return Path(spec.origin).parent


def _processor() -> bytes:
    """The features of the processor: several machines may share a home directory."""
    with open("/proc/cpuinfo", "rb") as lines:
        return b"".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))


def _build(what: Library, target: Path, paddle: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        raise UserError(
            f"{what.without[0]} a C++ compiler once, to build what Paddle's CPU wheel lacks; "
            f"install it with: apt-get install g++ (or your system's package), or {what.without[1]}"
        )
    print(f"building what Paddle's CPU wheel lacks ({what.name}), once: up to a minute", file=sys.stderr, flush=True)
    sources = [str(source) for source in what.sources if source.suffix == ".cc"]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        command = [
            compiler, "-std=c++17", *what.options, *(["-march=native"] if what.is_for_this_cpu else []),
            "-fPIC", "-shared", "-w", f'-DLIBPADDLE="{paddle / "base" / "libpaddle.so"}"', "-DPADDLE_ON_INFERENCE=0",
            f"-I{paddle / 'include'}", f"-I{paddle / 'include' / 'third_party'}", *sources, "-o", str(output),
            f"-L{paddle / 'libs'}", *(f"-l:{name}" for name in what.links),
            f"-Wl,-rpath,{paddle / 'libs'}", "-Wl,-z,lazy",
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            log = target.with_suffix(".log")
            log.write_text(" ".join(command) + "\n" + result.stdout + result.stderr)
            raise UserError(f"building the CPU kernels failed; the compiler's messages are in {log}")
        output.chmod(0o700)
        os.replace(output, target)
