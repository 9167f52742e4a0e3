"""`llmsuite recipe tune` with rehearsals, of a model of true width and few layers."""

from __future__ import annotations

import json

from llmsuite.contract.registry import load_plugins
from llmsuite.recipe.resolve import plan_run
from tests.multi.conftest import Runner
from tests.support.rehearsed import RECIPE, WORDS


def test_the_fastest_layout_is_rehearsed_and_written(runner: Runner) -> None:
    output = runner.directory / "tuned.json"
    process = runner.start(
        "recipe", "tune", RECIPE, *WORDS, "--hardware=h100", "--devices=2", "--rehearse=1", "--output", str(output)
    )
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    # the recipe as it is needs 4 devices
    assert "rehearsing 1 of 1: tp" in printed
    assert "the recipe as it is: launch.num_devices 2 devices cannot hold" in printed
    (row,) = (line for line in printed.splitlines() if line.endswith("recommended"))
    assert "%" in row
    plan = plan_run(output, [], load_plugins())
    assert plan.parallel.degrees.num_ranks == 2
    assert plan.train.section.global_batch_size == 8
    assert json.loads(output.read_text())["pretrain"]["split"] == "700,299,1"
