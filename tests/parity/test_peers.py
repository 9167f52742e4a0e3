"""The first steps of DPO on real pairs have TRL's losses: same weights, rows, template and hyper-parameters."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmsuite.base.cache import cache_root
from tests.support.paths import ROOT
from tests.support.real_rows import real

MODEL = Path(os.environ.get("LLMSUITE_TEST_MODEL", ROOT / "models" / "smollm2-135m-instruct"))
STEPS = 5
PEERS = cache_root() / "peers"
"""Where environments of peers are kept; the tests themselves have a cache of their own."""


def peer_environment(name: str) -> Path:
    """Where `benchmarks/step.py` keeps it."""
    path = ROOT / "benchmarks" / "peers" / "venvs.py"
    spec = importlib.util.spec_from_file_location("venvs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    place: Path = module.place_of(name)
    return place


def test_dpo_has_the_losses_of_trl(tmp_path: Path) -> None:
    data = real("dpo_en_demo.json").parent
    if not (MODEL / "config.json").is_file():
        pytest.skip(f"{MODEL} is not there; `make demo` makes it, or set LLMSUITE_TEST_MODEL")
    if PEERS.is_dir():
        (cache_root() / "peers").symlink_to(PEERS)
    if not peer_environment("torch").is_dir():
        pytest.skip("there is no environment with TRL; `make bench` makes it")
    command = [
        sys.executable, str(ROOT / "benchmarks" / "step.py"), f"--model={MODEL}", f"--data={data}", "--tasks=dpo",
        "--peers=trl", f"--rounds={STEPS - 1}", f"--json={tmp_path / 'found.json'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["dpo"]
    ours = found["llmsuite"]["losses"]
    theirs = found["trl"]["losses"]
    assert len(ours) == len(theirs) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-3)
    # the reference is the initial model, and from there on they move
    assert ours[0] == pytest.approx(math.log(2), abs=1e-4)  # float32 of sums over a few hundred tokens
    assert max(abs(loss - math.log(2)) for loss in ours) > 0.02
