"""Runs of the command line in processes of their own, on tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from llmsuite.base.cache import isolated_cache
from tests.conftest import PluginSite
from tests.support.browser import chromium
from tests.support.chat import scripted_page
from tests.support.paths import ROOT
from tests.tools.warm import Started, warm

RECIPE = "recipes/llama/dpo.json"


_HOLD = """
import os, time
from pathlib import Path
import llmsuite

@llmsuite.hookimpl
def llmsuite_step_end(run, step, metrics):
    while step == int(os.environ["HOLD_AT"]) and not Path(os.environ["HOLD_UNTIL"]).exists():
        time.sleep(0.01)
"""


Process = subprocess.Popen[str] | Started


class Runner:
    """Starts `llmsuite` from the repository root, with a cache of its own but for the kernels, which are built once."""

    def __init__(self, directory: Path):
        self.directory = directory
        cache = isolated_cache(directory / "cache")
        self.environment = {**os.environ, "LLMSUITE_CACHE": str(cache), "LLMSUITE_PLUGINS": ""}
        self._site = directory / "site"

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start it in a process of its own, as users do, and return at once."""
        return subprocess.Popen(
            [sys.executable, "-m", "llmsuite", *arguments],
            cwd=ROOT,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def start_fork(self, *arguments: str, **environment: str) -> Started:
        """Start it as a fork of a process that has imported Paddle, and return at once."""
        return warm().start("llmsuite.cli.main", [*arguments], {**self.environment, **environment})

    def start_and_hold(
        self, name: str, step: int, *arguments: str, fresh: bool = False, saved: int | None = None
    ) -> Process:
        """Start it, as a fork or `fresh`, and wait until its step is recorded, and until the checkpoint of the step
        `saved` is on disk, which is written meanwhile; there it stays until `let_go`."""
        if not self._site.exists():
            self._site.mkdir()
            PluginSite(self._site).install("hold", _HOLD)
        process = (self.start if fresh else self.start_fork)(
            *arguments,
            LLMSUITE_PLUGINS="hold",
            PYTHONPATH=os.pathsep.join([str(self._site), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            HOLD_AT=str(step),
            HOLD_UNTIL=str(self.directory / f"{name}-goes-on"),
        )
        self.wait_for_step(name, step, process)
        if saved is not None:
            latest = self.directory / name / "checkpoints" / "latest"
            deadline = time.monotonic() + 60
            while not latest.exists() or latest.read_text() != f"step-{saved}\n":
                assert time.monotonic() < deadline, f"step {saved} was not saved"
                time.sleep(0.005)
        return process

    def let_go(self, name: str) -> None:
        """Let a run that is held go on."""
        (self.directory / f"{name}-goes-on").touch()

    def wait_for_step(self, name: str, step: int, process: Process) -> None:
        """Return as soon as a step is recorded."""
        metrics = self.directory / name / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if metrics.exists() and f'"step": {step},' in metrics.read_text():
                return
            time.sleep(0.005)
        raise AssertionError(f"step {step} did not come\n{process.communicate()[0]}")

    def run(self, *arguments: str, expect: int = 0, **environment: str) -> str:
        """Run it to its end, as a fork of a process that has imported Paddle; returns what it printed."""
        code, output = warm().run("llmsuite.cli.main", [*arguments], {**self.environment, **environment})
        assert code == expect, f"exit code {code}\n{output}"
        return output

    def launch(self, num_ranks: int, module: str, *words: str, fresh: bool = False) -> tuple[int, str]:
        """Run a module of tests in every rank of a launch, see `tests.tools.launched`.

        Args:
            num_ranks: how many.
            module: whose `main` each of them calls.
            words: that it is called with.
            fresh: whether Paddle has to be imported for it: the module does something before.

        Returns:
            Exit code, and what was printed.
        """
        arguments = [str(num_ranks), str(self.directory / f"logs of {module} {num_ranks}"), module, *words]
        if not fresh:
            return warm().run("tests.tools.launched", arguments, self.environment, timeout=3600)
        process = subprocess.run(
            [sys.executable, "-m", "tests.tools.launched", *arguments],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return process.returncode, process.stdout

    def smoke(self, name: str, *overrides: str) -> list[str]:
        """The words of a smoke run of the DPO recipe into a directory of this test."""
        return ["run", RECIPE, "--smoke", f"--output_dir={self.directory / name}", *overrides]

    def few_rows(self, count: int) -> str:
        """The override by which the DPO recipe is trained on its first rows only: an epoch has fewer steps."""
        path = self.directory / f"{count}-rows.jsonl"
        if not path.exists():
            rows = (ROOT / "data" / "preference" / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
            path.write_text("".join(rows[:count]), encoding="utf-8")
        return f"--data.train={path}"

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """The records of a run, without those of evaluations."""
        lines = (self.directory / name / "metrics.jsonl").read_text().splitlines()
        return [record for line in lines if "loss" in (record := json.loads(line))]

    def weights(self, name: str, step: int, stem: str = "model") -> dict[str, np.ndarray]:
        """The parameters in a checkpoint; with the stem "optimizer" its state."""
        directory = self.directory / name / "checkpoints" / f"step-{step}"
        files = sorted(directory.glob(f"{stem}*.safetensors"))
        return {k: v for file in files for k, v in safetensors.numpy.load_file(file).items()}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("runs"))


# what a record says of the machine rather than of the model
_TIMES = {
    "avg_reader_cost", "avg_rollout_cost", "avg_batch_cost", "speed", "ips_total", "ips", "model_tflops", "mfu",
    "peak_memory_bytes",
}  # fmt: skip


def learnt(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without times and memory."""
    return [{k: v for k, v in r.items() if k not in _TIMES and not k.startswith("straggler/")} for r in records]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium, for the pages of a module."""
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """The page to chat on, before a server that says what it is told to."""
    with scripted_page(browser) as shown:
        yield shown
