"""The files `events.jsonl`, events of a run other than its steps, one JSON object per line, and `environment.json`, the
machine and software of the run."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite import __version__
from llmsuite.base.files import NO_ROOM, os_errors
from llmsuite.base.redaction import redacted_words
from llmsuite.base.safe_files import is_file

EVENTS = "events.jsonl"
ENVIRONMENT = "environment.json"
_PACKAGES = ("paddlepaddle", "paddlepaddle-gpu", "paddlepaddle-xpu", "paddlenlp", "numpy", "safetensors", "tokenizers")
# no other variables are recorded: they may hold secrets
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_DEBUG_CPU_TYPE", "KMP_BLOCKTIME", "CUDA_VISIBLE_DEVICES",
              "XPU_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "LLMSUITE_PLUGINS", "LLMSUITE_NO_PLUGINS",
              "LLMSUITE_GLOO_TIMEOUT_S")  # fmt: skip


def add_event(run: Path, event: str, **more: Any) -> None:
    """Append an event to the events of a run.

    Args:
        run: its directory.
        event: the name of the event, such as "started".
        more: additional fields, JSON values.

    Raises:
        UserError: it cannot be written.
    """
    record = {"time": _now(), "event": event, **more}
    with os_errors(run / EVENTS, NO_ROOM), open(run / EVENTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_events(run: Path) -> list[dict[str, Any]]:
    """The events of a run, oldest first, without a last line that was truncated by a kill."""
    if not is_file(run / EVENTS):
        return []
    lines = (run / EVENTS).read_text(encoding="utf-8", errors="replace").split("\n")  # U+2028 ends no line
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "event" in record and "time" in record:
            found.append(record)
    return found


def environment(device: str, mesh: str, num_ranks: int) -> dict[str, Any]:
    """The machine, packages and variables this process runs with."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "started": _now(),
        "command": redacted_words(sys.argv),
        "directory": os.getcwd(),
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "llmsuite": __version__,
        "packages": versions,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "device": device,
        "mesh": mesh,
        "ranks": num_ranks,
    }


def write_environment(run: Path, found: Mapping[str, Any]) -> None:
    """Write `environment.json` into the directory of a run, replacing that of an earlier start."""
    with os_errors(run / ENVIRONMENT, NO_ROOM):
        (run / ENVIRONMENT).write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    except OSError:  # not Linux
        return platform.processor() or "unknown"


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
