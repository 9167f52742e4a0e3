"""Code that Paddle's CPU wheel lacks is built once. Several processes need it, a single one does not: both say so."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmsuite.base.errors import UserError
from llmsuite.devices import cpp_library
from llmsuite.devices.cpu.gloo.shims import KERNELS
from llmsuite.plugins.cpu_kernels.libraries import KERNELS as FUSED
from llmsuite.plugins.cpu_kernels.libraries import PRODUCTS


def num_files(library: cpp_library.CppLibrary) -> int:
    """Calls of the compiler, each for one file; one more makes the library of them."""
    return sum(source.suffix == ".cc" for source in library.sources)


PER_BUILD = num_files(KERNELS) + 1
# notes each call, waits long enough for another process to come by, and writes its -o
COMPILER = """#!/bin/sh
echo "$@" >> "$CALLS"
sleep "${DELAY:-0}"
while [ "$1" != -o ]; do shift; done
echo built > "$2"
"""
BROKEN = """#!/bin/sh
echo call >> "$CALLS"
echo "a note"
echo "kernels.cc:1: no such header" >&2
exit 1
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMSUITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "cache"


def install(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A g++ in front of that of the machine."""
    directory = tmp_path / "bin"
    directory.mkdir(exist_ok=True)
    (directory / "g++").write_text(script)
    (directory / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")


def run_alone(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_it_is_built_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, COMPILER, monkeypatch)
    library = cpp_library.build_library(KERNELS)
    assert library.read_text() == "built\n"
    assert library.parent == cache / "built" / "gloo"
    assert {path.name for path in library.parent.iterdir()} == {library.name, "build.lock"}
    words, *_ = calls(tmp_path)
    assert ".cc" in words
    assert "libpaddle.so" in words
    assert cpp_library.build_library(KERNELS) == library
    assert len(calls(tmp_path)) == PER_BUILD
    # another installation of Paddle has a library of its own
    monkeypatch.setattr(cpp_library, "_paddle", lambda: Path("/elsewhere/paddle"))
    assert cpp_library.build_library(KERNELS) != library
    assert len(calls(tmp_path)) == 2 * PER_BUILD


def test_what_is_there_needs_no_compiler(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, COMPILER, monkeypatch)
    library = cpp_library.build_library(KERNELS)
    monkeypatch.setenv("PATH", "")
    assert cpp_library.build_library(KERNELS) == library


def test_a_missing_compiler_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"need a C\+\+ compiler.*apt-get install g\+\+.*launch\.num_devices to 1"):
        cpp_library.build_library(KERNELS)
    assert not list(cache.glob("gloo/*.so"))


def test_a_missing_paddle_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = r"Paddle is not installed; install it with: pip install .*paddlepaddle=="
    with pytest.raises(UserError, match=message):
        cpp_library.build_library(KERNELS)


def test_a_failure_keeps_what_the_compiler_said(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, BROKEN, monkeypatch)
    with pytest.raises(UserError, match=r"building the CPU kernels failed; .* are in \S+\.log$") as caught:
        cpp_library.build_library(KERNELS)
    log = Path(str(caught.value).rpartition(" are in ")[2])
    assert log.parent == cache / "built" / "gloo"
    text = log.read_text()
    assert "g++ -std=c++17" in text, "the command, to try it by hand"
    assert "a note" in text
    assert "kernels.cc:1: no such header" in text
    assert {path.name for path in log.parent.iterdir()} == {log.name, "build.lock"}, "nothing half built is left"
    with pytest.raises(UserError):
        cpp_library.build_library(KERNELS)
    assert len(calls(tmp_path)) == 2 * num_files(KERNELS), "it is tried again"
    install(tmp_path, COMPILER, monkeypatch)
    assert cpp_library.build_library(KERNELS).read_text() == "built\n"


def test_two_processes_at_once_build_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, COMPILER, monkeypatch)
    monkeypatch.setenv("DELAY", "1.5")
    script = (
        "from llmsuite.devices.cpp_library import build_library; from llmsuite.devices.cpu.gloo.shims import KERNELS; "
        "print(build_library(KERNELS).read_text(), end='')"
    )
    said = "compiling C++ code for the CPU (gloo; first run only, up to a minute) …\n"
    both = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    messages = []
    for process in both:
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, "built\n"), errors
        messages.append(errors)
    assert sorted(messages) == ["", said], "by the one that builds"
    assert len(calls(tmp_path)) == PER_BUILD


def test_fused_operations_that_cannot_be_built_are_done_without(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, BROKEN, monkeypatch)
    script = (
        "from tests.support.devices import cpu_backend; from llmsuite.devices.ops import Ops; cpu = cpu_backend(); "
        "print(bool(cpu.fused('fp32')), [cpu.ops('fp32') == Ops() for _ in range(2)], bool(cpu.fused('fp32')))"
    )
    done = run_alone(script)
    assert (done.returncode, done.stdout) == (0, "True [True, True] False\n"), done.stderr
    assert done.stderr.count("continuing with plain operations, which are slower") == 1
    assert "are in" in done.stderr, "where the compiler's messages are"
    assert len(calls(tmp_path)) == num_files(FUSED), "it is tried once"


WITHOUT_ATTENTION = COMPILER.replace("sleep", 'case "$*" in */attention.cc*) exit 1 ;; esac\nsleep')


def test_bfloat16_is_by_rounding_where_some_of_its_operations_cannot_be_built(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, WITHOUT_ATTENTION, monkeypatch)
    script = (
        "from llmsuite.devices.cpu.rounding import rounded_matmul; from llmsuite.plugins.cpu_kernels import cpu; "
        "from tests.support.devices import cpu_backend; "
        "cpu.multiplies_bf16 = lambda: True; backend = cpu_backend(); "
        "print(backend.ops('bf16').matmuls.matmul is rounded_matmul, backend.precision_warning('bf16') is None)"
    )
    done = run_alone(script)
    assert (done.returncode, done.stdout) == (0, "True False\n"), done.stderr
    assert done.stderr.count("continuing with plain operations, which are slower") == 1


def test_a_compiler_that_is_older_than_the_processor(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, COMPILER, monkeypatch)  # which knows no macro
    monkeypatch.setattr(cpp_library, "_processor", lambda: b"flags : fma avx512_bf16 sse2\n")
    message = (
        r"need a C\+\+ compiler that knows avx512_bf16 of this processor.*install g\+\+ 11 or newer, or do without"
    )
    with pytest.raises(UserError, match=message):
        cpp_library.build_library(PRODUCTS)
    assert len(calls(tmp_path)) == 1, "and nothing is built"
    monkeypatch.setattr(cpp_library, "_processor", lambda: b"flags : fma sse2\n")
    assert cpp_library.build_library(PRODUCTS).read_text() == "built\n"


def test_a_full_disk_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    install(tmp_path, COMPILER, monkeypatch)
    monkeypatch.setattr("tempfile.TemporaryDirectory", is_full)
    with pytest.raises(UserError, match=r"gloo: No space left on device; .* set LLMSUITE_CACHE to another directory"):
        cpp_library.build_library(KERNELS)


NAMES = """
import ctypes, os, subprocess
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.start import start_paddle
start_paddle(CpuBackend(), 2, join=True)
from llmsuite.devices.cpp_library import build_library
from llmsuite.devices.cpu.gloo.shims import FRONT, KERNELS

def names(of):
    said = subprocess.run(["nm", "-D", "--defined-only", build_library(of)], capture_output=True, text=True, check=True)
    return {line.split()[2] for line in said.stdout.splitlines() if line.split()[1] in "TW"}

front, kernels = names(FRONT) - {"use_kernels"}, names(KERNELS)
assert front - kernels == {"_ZN4gloo7ContextC2Eiii"}, "what the kernels link to has this one"
anyone = ctypes.CDLL(None)  # what any library finds first
assert all(hasattr(anyone, name) for name in front)
print(len(front))
print([name for name in (%r, %r) if hasattr(anyone, name)])
"""


@pytest.mark.further
def test_only_the_names_in_front_are_global() -> None:
    """With libphi_core.so in the global scope a machine without AVX-512 stops at an illegal instruction."""
    resize = "_ZN3phi11DenseTensor6ResizeERKN6common4DDimE"
    get = "_ZNK3phi11distributed18CommContextManager3GetERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
    done = subprocess.run([sys.executable, "-c", NAMES % (resize, get)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["48", "[]"]
