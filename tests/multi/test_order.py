"""The calls that a plan writes down for each rank are those that ranks log in a training step, in the same order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmsuite.contract.registry import load_plugins
from llmsuite.parallel.mesh import Mesh
from llmsuite.planning.call_order import calls_of_ranks
from llmsuite.planning.layout import Layout
from llmsuite.planning.memory import full_micro_batch
from llmsuite.recipe.resolve import plan_run
from tests.conftest import PluginSite
from tests.multi.conftest import Runner
from tests.support.paths import ROOT

STEP = 2
# rank 0 is in its third step: what all ranks did in the second one is in their files
PLUGIN = """
import dataclasses, json, os
from pathlib import Path
import llmsuite
from llmsuite.launch.calls import ENVIRONMENT, read

@llmsuite.hookimpl
def llmsuite_step_end(run, step):
    if step == 3:
        for path in Path(os.environ[ENVIRONMENT]).glob("*.calls"):
            calls = [dataclasses.asdict(call) for call in read(path)]
            (Path(run.output_dir) / f"{path.stem}.json").write_text(json.dumps(calls))
"""
COMMON = (
    "--train.max_steps=4", "--train.global_batch_size=8", "--train.micro_batch_size=1",
    "--data.eval=null", "--checkpoint.save_steps=null",
)  # fmt: skip
PP = {"pipeline_parallel_degree": 2}
RUNS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "tied, interleaved, stage 1": (
        "llama/sft",
        {**PP, "pipeline_schedule": "interleaved", "sharding": "stage1", "gradient_bucket_bytes": 1 << 20},
        ("--model.config.tie_word_embeddings=true",),
    ),
    "four stages": ("qwen/sft", {"pipeline_parallel_degree": 4}, ()),
    "scales of 8-bit moments": ("llama/sft", {**PP, "sharding": "stage2"}, ("--train.optimizer=adamw_8bit",)),
    "experts, stage 2": ("deepseek/sft", {**PP, "sharding": "stage2", "expert_parallel_degree": 2}, ()),
}


def _words(name: str) -> list[str]:
    _, parallel, more = RUNS[name]
    return [*COMMON, "--launch.num_devices=4", f"--parallel={json.dumps(parallel)}", *more]


@pytest.fixture(scope="module")
def logged(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """All runs, each with the calls of its ranks beside its metrics."""
    site = tmp_path_factory.mktemp("site")
    PluginSite(site).install("keeper", PLUGIN)
    for name, (recipe, _, _) in RUNS.items():
        output = f"--output_dir={runner.directory / name}"
        environment = {"PYTHONPATH": f"{site}:{ROOT}", "LLMSUITE_PLUGINS": "keeper"}
        runner.run("run", f"recipes/{recipe}.json", "--smoke", output, *_words(name), **environment)
    return runner


@pytest.mark.parametrize("name", RUNS)
def test_ranks_make_the_calls_that_are_written_down(logged: Runner, name: str) -> None:
    """Operation, ranks and, where it is told, shape; but for what is sent inside of a pass, one call there."""
    plan = plan_run(f"recipes/{RUNS[name][0]}.json", _words(name), load_plugins(), smoke=True)
    layout = Layout(plan.model, plan.parallel)
    batch = full_micro_batch(plan.model, plan.data, plan.parallel, plan.train)
    planned = calls_of_ranks(layout, plan.train, batch, 8 // plan.parallel.degrees.num_data_ranks)
    assert sorted(planned) == [0, 1, 2, 3]
    for rank, calls in planned.items():
        end = next(i for i, call in enumerate(calls) if call.why.endswith("in an evaluation"))
        expected = [call for call in calls[:end] if call.what != "pass"]
        records = json.loads((logged.directory / name / f"{rank}.json").read_text())
        step = [
            r for r in records if r["step"] == STEP and not r["where"].startswith("trainer.py")
        ]  # which writes it down
        ledger = next(i for i, r in enumerate(step) if r["where"].startswith("loss_ledger.py"))
        inside = [r for r in step[:ledger] if r["where"].startswith(("sharding.py", "buckets.py", "experts.py"))]
        found = [r for r in step if r not in inside]
        assert [(r["what"], r["ranks"]) for r in found] == [(c.what, sorted(c.group.ranks)) for c in expected], rank
        for call, record in zip(expected, found):
            assert not call.size or record["shape"] == str(list(call.size)), (call, record)
        sums = [r["shape"] for r in inside if r["what"] == "all_reduce"]
        buckets = layout.buckets(Mesh(plan.parallel.degrees, rank))
        together = [bucket for bucket in buckets if not bucket[0].reduces_each_pass]
        shapes = [b[0].local_shape if len(b) == 1 else (sum(held.size for held in b),) for b in together]
        assert sorted(sums) == sorted(str(list(shape)) for shape in shapes)
