"""`llmsuite doctor`: can this machine run, and if not, what mends it?"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmsuite import __version__
from llmsuite.plugins.hookspecs import Command
from llmsuite.plugins.manager import Registry

_OK, _WARN, _BAD = "ok", "warn", "BAD"
_PACKAGES = ("paddlepaddle", "paddlepaddle-gpu", "paddlepaddle-xpu", "paddlenlp", "tokenizers", "safetensors", "numpy")
Finding = tuple[str, str, str]


def add_arguments(parser: Any) -> None:
    parser.add_argument("--device", type=str, default="cpu", help="the device to check; see: llmsuite list devices")


def run(args: Any, registry: Registry) -> int:
    findings = [*_machine(), *_packages(), *_device(args.device, registry), *_plugins(registry)]
    width = max(len(what) for _, what, _ in findings)
    for level, what, text in findings:
        print(f"{level:4}  {what:{width}}  {text}")
    return 2 if any(level == _BAD for level, _, _ in findings) else 0


def _machine() -> Iterator[Finding]:
    version = platform.python_version()
    good = (3, 10) <= sys.version_info[:2] < (3, 12)
    yield (_OK if good else _BAD), "python", version + ("" if good else "; install Python 3.10 or 3.11")
    yield _OK, "llmsuite", __version__
    yield _OK, "cores", str(os.cpu_count())
    compiler = shutil.which("g++")
    yield (_OK if compiler else _WARN), "g++", compiler or "missing; apt-get install g++ (or your system's package)"
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    yield (_OK if free > 5 else _WARN), "free disk", f"{free:.0f} GB here" + ("" if free > 5 else "; free some")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield (_OK if files >= 1024 else _WARN), "open files", f"{files}" + ("" if files >= 1024 else "; ulimit -n 4096")
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").total / 1e9
        yield (_OK if shared >= 0.5 else _WARN), "shared memory", f"{shared:.1f} GB in /dev/shm"


def _packages() -> Iterator[Finding]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield _OK, name, found[name]
    paddles = [name for name in found if name.startswith("paddlepaddle")]
    if not paddles:
        yield _BAD, "paddle", "missing; pip install 'llmsuite[cpu]', or the gpu or xpu build"
    elif len(paddles) > 1:
        yield _BAD, "paddle", f"{' and '.join(paddles)} overwrite each other; uninstall all of them, then install one"


def _device(name: str, registry: Registry) -> Iterator[Finding]:
    if name not in registry.devices:
        yield _BAD, "device", registry.unknown("device", name)
        return
    backend = registry.devices[name].factory()
    for key, value in backend.environment(1).items():
        yours = os.environ.get(key)
        yield _OK, f"env {key}", f"{value} (set by llmsuite)" if yours is None else f"{yours} (set by you)"
    from llmsuite.devices.start import start_paddle

    try:
        start_paddle(backend, 1)
    except ImportError as error:
        yield _BAD, "device", f"Paddle does not import: {error}"
        return
    reason = backend.unavailable(1)
    yield (_BAD if reason else _OK), f"device {name}", reason or f"usable; precisions {', '.join(backend.precisions)}"


def _plugins(registry: Registry) -> Iterator[Finding]:
    for info in registry.plugins:
        if info.error:
            yield _WARN, f"plugin {info.name}", f"{info.error.splitlines()[-1]}; see: llmsuite plugins info {info.name}"


COMMAND = Command(name="doctor", help="check this machine and say what mends it", add_arguments=add_arguments, run=run)
