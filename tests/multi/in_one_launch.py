"""Several runs in one launch: their ranks start once, and take one recipe after the other."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from llmsuite.devices.cpu import CpuBackend
from llmsuite.engine.launch import launch
from tests.conftest import PluginSite
from tests.multi.conftest import RECIPE, ROOT, Runner

PLUGIN = """
import json, os, sys
from pathlib import Path
import llmsuite
from llmsuite.plugins.hookspecs import Command

opened = []

def run(arguments, registry):
    from llmsuite.devices.start import start_paddle
    from llmsuite.recipe.resolve import plan_run

    number, ranks = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    backend = registry.devices["cpu"].factory()
    start_paddle(backend, ranks, join=ranks > 1)
    runs = json.loads(Path(arguments.file).read_text())
    sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
    for output_dir, words in runs.items():
        plan = plan_run(RECIPE, [*words, f"--output_dir={output_dir}"], registry, smoke=True)
        from llmsuite.stages.run import run as run_stage

        os.environ["LLMSUITE_CACHE"] = f"{output_dir}-cache"  # its own: what is computed in front is compared too
        opened.clear()
        assert run_stage(plan, registry, resume=False) == 0
        Path(output_dir, f"opened-{number}.json").write_text(json.dumps(opened))
        print("done", output_dir, flush=True)
    return 0

@llmsuite.hookimpl
def llmsuite_register_commands():
    add = lambda parser: parser.add_argument("file", type=str)
    return [Command(name="many-runs", help="one recipe after the other", add_arguments=add, run=run)]
"""


def run_all(runner: Runner, directory: Path, num_ranks: int, runs: Mapping[str, Sequence[str]]) -> None:
    """Run the smoke recipe once for each name and overrides. The results are where `runner` looks for them.

    Args:
        runner: of the test.
        directory: for files in between; may not exist yet.
        num_ranks: of every run.
        runs: overrides by name; they have to make so many ranks.
    """
    directory.mkdir(parents=True)
    PluginSite(directory).install("many_runs", PLUGIN.replace("RECIPE", repr(str(ROOT / RECIPE))))
    names = {str(runner.directory / name): list(words) for name, words in runs.items()}
    for path in names:
        Path(path).mkdir(parents=True, exist_ok=True)
    (directory / "runs.json").write_text(json.dumps(names))
    backend, said = CpuBackend(), list[str]()
    path = os.pathsep.join([str(directory), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("LLMSUITE_PLUGINS", "many_runs")
        backend.prepare_ranks()

        def environment(rank: int) -> dict[str, str]:
            return {**backend.environment(num_ranks), **backend.rank_environment(rank)}

        words = [sys.executable, "-m", "llmsuite", "many-runs", str(directory / "runs.json")]
        code = launch(words, num_ranks, directory / "logs", environment, said.append)
    assert code == 0, "".join(said)


def opened_files(runner: Runner, name: str, rank: int) -> list[str]:
    """What a rank has opened during a run."""
    found: list[Any] = json.loads((runner.directory / name / f"opened-{rank}.json").read_text())
    return [str(path) for path in found]
