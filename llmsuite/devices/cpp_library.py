"""Build of C++ code that is linked to Paddle's CPU wheel, into the user's cache.

A library is built once for each of its versions, installations of Paddle (and so interpreters), and compiler options;
and for each processor, where it is compiled for one. Processes that start at the same time build it once.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from llmsuite.base.cache import BUILT, cache_root, is_private_file, locked, private_directory
from llmsuite.base.commands import run_command
from llmsuite.base.errors import UserError
from llmsuite.base.extras import install_command


@dataclasses.dataclass(frozen=True)
class CppLibrary:
    """A shared library that is built from C++."""

    name: str
    """Name of its directory in the cache."""
    sources: tuple[Path, ...]
    """Source files and headers; the first one names the library."""
    options: tuple[str, ...]
    """Compiler options in addition to those of all libraries."""
    links: tuple[str, ...]
    """File names of the libraries of Paddle that it is linked to."""
    is_for_this_cpu: bool
    """True where it is compiled for all instruction sets of this machine's processor."""
    without: tuple[str, str]
    """Two parts of the error message where there is no compiler: the feature that needs one, and the alternative."""
    instructions: tuple[tuple[str, str], ...] = ()
    """Instruction sets that the compiler has to support if this processor has them: pairs of the name in /proc/cpuinfo
    and the compiler's macro."""
    include_directories: tuple[Path, ...] = ()
    """Directories of headers that are among the sources, where they are not next to the files that include them."""


def build_library(what: CppLibrary) -> Path:
    """Path of the shared library for the installed Paddle; builds it (up to a minute) if it is not in the cache.

    Raises:
        UserError: there is no g++, or it cannot build the library, or the disk is full.
    """
    paddle = _paddle()
    # the library is linked to this very installation, so its path is part of the name
    content = b"".join(source.read_bytes() for source in what.sources)
    content += " ".join([str(paddle), *what.options, *what.links]).encode()
    content += _processor() if what.is_for_this_cpu else b""
    directory = private_directory(cache_root() / BUILT / what.name)
    version = importlib.metadata.version("paddlepaddle")
    target = directory / f"{what.sources[0].stem}-{version}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if is_private_file(target):
        return target
    try:
        with locked(directory / "build.lock"):  # two runs may start at the same time
            if not is_private_file(target):
                _build(what, target, paddle)
    except OSError as error:
        where = f"{directory}: {error.strerror or error}"
        raise UserError(
            f"{where}; code that Paddle's CPU wheel lacks is built there: set LLMSUITE_CACHE to another directory"
        ) from error
    return target


def _paddle() -> Path:
    """Directory of the Paddle package, found without importing it: some libraries have to be loaded before it."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.origin is None:
        raise UserError(f"Paddle is not installed; install it with: {install_command('cpu')}")
    return Path(spec.origin).parent


def _processor() -> bytes:
    """The features of the processor: several machines may share a home directory."""
    with open("/proc/cpuinfo", "rb") as lines:
        return b"".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))


def _build(what: CppLibrary, target: Path, paddle: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        raise UserError(
            f"{what.without[0]} a C++ compiler once, to build code that Paddle's CPU wheel lacks; "
            f"install it with: apt-get install g++ (or your system's package), or {what.without[1]}"
        )
    if what.is_for_this_cpu and what.instructions:
        _check_knows(compiler, what)
    print(
        f"compiling C++ code for the CPU ({what.name}; first run only, up to a minute) …", file=sys.stderr, flush=True
    )
    build_options = [*what.options, *(["-march=native"] if what.is_for_this_cpu else []), "-fPIC", "-w"]
    directories = (*what.include_directories, paddle / "include", paddle / "include" / "third_party")
    includes = [f"-I{directory}" for directory in directories]
    macros = [f'-DLIBPADDLE="{paddle / "base" / "libpaddle.so"}"', "-DPADDLE_ON_INFERENCE=0"]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = {source: Path(scratch) / f"{source.stem}.o" for source in what.sources if source.suffix == ".cc"}
        _run_all(
            [
                [compiler, "-std=c++17", *build_options, *macros, *includes, "-c", str(source), "-o", str(to)]
                for source, to in objects.items()
            ],
            target,
        )
        output = Path(scratch) / target.name
        link = [
            compiler, *build_options, "-shared", *map(str, objects.values()), "-o", str(output),
            f"-L{paddle / 'libs'}", *(f"-l:{name}" for name in what.links),
            f"-Wl,-rpath,{paddle / 'libs'}", "-Wl,-z,lazy",
        ]  # fmt: skip
        _run_all([link], target)
        output.chmod(0o700)
        os.replace(output, target)


def _check_knows(compiler: str, what: CppLibrary) -> None:
    """Raise UserError if the compiler is too old for this processor: it would ignore the instructions that the library
    is for."""
    command = [compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    known = run_command(command).output.split()
    flags = _processor().decode().split()
    if missing := [name for name, macro in what.instructions if name in flags and macro not in known]:
        raise UserError(
            f"{what.without[0]} a C++ compiler that knows {', '.join(missing)} of this processor: "
            f"install g++ 11 or newer, or {what.without[1]}"
        )


def _run_all(commands: Sequence[list[str]], target: Path) -> None:
    """Run commands of the compiler, up to four in parallel: each may take 400 MB.

    Raises:
        UserError: one fails; its messages are in a log file next to the target.
    """
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        results = list(pool.map(run_command, commands))
    for command, result in zip(commands, results, strict=True):
        if result.code != 0:
            log = target.with_suffix(".log")
            log.write_text(" ".join(command) + "\n" + result.output + result.errors)
            raise UserError(f"building the CPU kernels failed; the compiler's messages are in {log}")
