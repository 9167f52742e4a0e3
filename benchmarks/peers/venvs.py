"""The virtual environments of the peers, made once and kept in llmsuite's cache directory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from llmsuite.base.cache import cache_root, locked

TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PACKAGES = {
    "torch": [
        "transformers==5.23.0",
        "trl==1.16.0",
        "peft==0.21.2",
        "accelerate==1.15.0",
        "datasets==5.2.0",
        "bitsandbytes==0.50.2",
    ],
    # what is beside paddlenlp: see pyproject.toml
    "paddlenlp": [
        "paddlepaddle==3.3.1",
        "paddlenlp==3.0.0b4",
        "aistudio-sdk<0.3",
        "numpy==1.26.4",
        "datasets==5.0.1",
        "pyarrow==25.0.1",
    ],
}


def place_of(name: str) -> Path:
    """Where an environment is, or would be."""
    digest = hashlib.sha256("\n".join([sys.version, *_pins(name)]).encode()).hexdigest()[:12]
    return cache_root() / "peers" / f"{name}-{digest}"


def _pins(name: str) -> list[str]:
    return ([TORCH] if name == "torch" else []) + PACKAGES[name]


def python_of(name: str) -> Path:
    """The Python of an environment, which is made if it is not there: a gigabyte or two, and some minutes."""
    place = place_of(name)
    with locked(place.with_suffix(".lock")):
        if not place.exists():
            part = place.with_suffix(".tmp")
            shutil.rmtree(part, ignore_errors=True)
            _make(part, name)
            part.rename(place)  # scripts in bin/ know the old name; they are not used
    return place / "bin" / "python"


def _make(place: Path, name: str) -> None:
    print(f"making the environment of {name} in {place.parent}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    install = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if name == "torch":  # on PyPI are the wheels for CUDA only
        found = subprocess.run([*install, TORCH], env=environment, capture_output=True)
        if found.returncode:
            subprocess.run([*install, TORCH, "--index-url", TORCH_INDEX], env=environment, check=True)
    subprocess.run([*install, *PACKAGES[name]], env=environment, check=True)


def versions(name: str) -> dict[str, str]:
    """Versions of the packages of an environment that a table names."""
    wanted = {"torch": ["torch", "transformers", "trl", "peft"], "paddlenlp": ["paddlepaddle", "paddlenlp"]}[name]
    ask = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    told = subprocess.run([str(python_of(name)), "-c", ask, *wanted], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(told.stdout)
    return found
