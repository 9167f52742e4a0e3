"""What lies where under tensor parallel and sharding, and runs that go on on another mesh."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import PluginSite
from tests.multi.conftest import Runner

COMMON = ("--data.eval=null", "--model.config.num_hidden_layers=2", "--train.global_batch_size=16")
OPTIMIZERS = {
    # without clipping, at a rate that moves: an error of scale in the gradients cannot hide
    "sgd": ("--train.optimizer=sgd", "--train.learning_rate=0.05", "--train.max_grad_norm=null"),
    "adamw": ("--train.optimizer=adamw", "--train.learning_rate=1e-3", "--train.weight_decay=0.1"),
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2, dp2": (4, {"tensor_parallel_degree": 2}),
    "tp2 sequence, stage2 over 2": (
        4,
        {"tensor_parallel_degree": 2, "sequence_parallel": True, "sharding": "stage2"},
    ),
    "stage3 over 2": (2, {"sharding": "stage3"}),
    "stage3 over 2, tp2 sequence": (
        4,
        {"tensor_parallel_degree": 2, "sequence_parallel": True, "sharding": "stage3"},
    ),
}


def _words(runner: Runner, name: str, mesh: str, optimizer: str, *more: str) -> list[str]:
    ranks, parallel = MESHES[mesh]
    cut = (f"--launch.num_devices={ranks}", f"--parallel={json.dumps(parallel)}", "--train.micro_batch_size=2")
    # recompute runs the regions of sequence parallel a second time
    recompute = "full" if "sequence_parallel" in parallel else "none"
    return runner.smoke(name, *COMMON, *OPTIMIZERS[optimizer], *cut, f"--engine.recompute={recompute}", *more)


def _assert_same_metrics(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    for a, b in zip(expected, found):
        assert (a["tokens"], a["supervised_tokens"]) == (b["tokens"], b["supervised_tokens"])
        for key in ("loss", "grad_norm", "logps/chosen", "logps/rejected"):
            assert b[key] == pytest.approx(a[key], rel=1e-6), (a["step"], key)


def _assert_close(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float) -> None:
    assert {n: (v.shape, v.dtype) for n, v in found.items()} == {n: (v.shape, v.dtype) for n, v in expected.items()}
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= tolerance * np.linalg.norm(value), name


# a run on four ranks, looked into and resumed

STEPS = 4
SCHEDULE = (f"--train.max_steps={STEPS}", "--checkpoint.save_steps=2", "--checkpoint.keep_last=2")


SPY = '''
import json
import llmsuite

seen = {}

@llmsuite.hookimpl
def llmsuite_run_start(run):
    """On rank 0, once the model is built: note what its parameters, activations and optimizer hold here."""
    from llmsuite.parallel.optimizer import Optimizer
    from llmsuite.parallel.tensor import local_value
    from llmsuite.stages.dpo import DpoStage

    loss, step = DpoStage.loss, Optimizer.step

    def note(name, tensor):
        placements = [str(p) for p in tensor.placements] if tensor.is_dist() else []
        seen[name] = [list(tensor.shape), list(local_value(tensor).shape), placements]

    def spied_loss(self, model, batch):
        llama = model.model
        for name, parameter in llama.named_parameters():
            note(name, parameter)
        hooks = [
            llama.lm_head.register_forward_post_hook(lambda m, i, output: note("logits", output)),
            llama.model.layers[0].register_forward_post_hook(lambda m, i, output: note("between layers", output[0])),
            llama.model.layers[0].mlp.up_proj.register_forward_post_hook(lambda m, i, o: note("inside", o)),
        ]
        terms = loss(self, model, batch)
        for hook in hooks:
            hook.remove()
        return terms

    def spied_step(self, number):
        step(self, number)
        for entry in self.state():
            note(entry.name, entry.value)
        gradients = {shard.name: shard.parameter.grad for shard in self.shards}
        seen["gradients"] = [name for name, g in gradients.items() if g is not None and g._is_initialized()]

    DpoStage.loss, Optimizer.step = spied_loss, spied_step

@llmsuite.hookimpl
def llmsuite_run_end(run, step):
    (run.output_dir / "seen.json").write_text(json.dumps(seen))
'''


@pytest.fixture(scope="module")
def cut_run(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4, and what the plugin has seen. The same in one process is `whole`."""
    site = tmp_path_factory.mktemp("site")
    PluginSite(site).install("spy", SPY)
    runner.run(*_words(runner, "whole", "one", "adamw", *SCHEDULE))
    words = _words(runner, "cut", "tp2 sequence, stage2 over 2", "adamw", *SCHEDULE)
    runner.run(*words, PYTHONPATH=str(site), LLMSUITE_PLUGINS="spy")
    return runner.directory / "cut"


def test_nothing_lies_whole_that_should_be_cut(cut_run: Path) -> None:
    seen = json.loads((cut_run / "seen.json").read_text())
    layer = "model.layers.0"
    cut = {
        "model.embed_tokens": 0,
        "lm_head": 1,
        **{f"{layer}.self_attn.{part}_proj": 1 for part in "qkv"},
        f"{layer}.self_attn.o_proj": 0,
        f"{layer}.mlp.gate_proj": 1,
        f"{layer}.mlp.up_proj": 1,
        f"{layer}.mlp.down_proj": 0,
    }
    for name, dim in cut.items():
        whole, local, placements = seen[f"{name}.weight"]
        assert placements == [f"Shard(dim={dim})"], name
        assert local == [size // 2 if d == dim else size for d, size in enumerate(whole)], name
    for name in (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm"):
        whole, local, placements = seen[f"{name}.weight"]
        assert (local, placements) == (whole, ["Replicate()"])
    # logits are never brought together, activations are cut along the sequence between the regions
    whole, local, placements = seen["logits"]
    assert (whole[1], local, placements) == (512, [whole[0], 256], ["Shard(dim=1)"])
    for name, dim in {"between layers": 1, "inside": 2}.items():
        whole, local, placements = seen[name]
        assert placements == [f"Shard(dim={dim})"], name
        assert local[dim] == whole[dim] // 2, name
    # of the moments, half of what lies here
    for name in [*cut, f"{layer}.input_layernorm", "model.norm"]:
        size = int(np.prod(seen[f"{name}.weight"][1])) // 2
        assert seen[f"{name}.weight/moment1"][1] == seen[f"{name}.weight/moment2"][1] == [size], name
    assert seen["gradients"] == [], "kept beside the parts they were added up into"


MEMORY_SPY = """
import gc
import json
import llmsuite

seen = {"gradients": [], "sums": []}

@llmsuite.hookimpl
def llmsuite_run_start(run):
    from paddle.base import core
    from llmsuite.parallel import optimizer
    from llmsuite.stages.dpo import DpoStage

    loss, step, shards = DpoStage.loss, optimizer.Optimizer.step, []

    def live():
        gc.collect()
        return core.host_memory_stat_current_value("Allocated", 0)

    def spied_loss(self, model, batch):
        # at the beginning of each micro-batch: what the ones before it have left
        parameters = dict(model.model.named_parameters())
        seen["gradients"].append([n for n, p in parameters.items() if p.grad is not None and p.grad._is_initialized()])
        seen["sums"].append(sum(s._sum.size for s in shards if s._sum is not None))
        return loss(self, model, batch)

    def spied_step(self, number):
        shards[:] = self.shards
        step(self, number)
        seen["whole"] = [s.name for s in self.shards if s.parameter._is_initialized()]
        seen["live"] = live()

    DpoStage.loss, optimizer.Optimizer.step = spied_loss, spied_step

@llmsuite.hookimpl
def llmsuite_run_end(run, step):
    (run.output_dir / "seen.json").write_text(json.dumps(seen))
"""


def test_what_a_rank_holds_between_steps_and_between_micro_batches(
    runner: Runner, tmp_path_factory: pytest.TempPathFactory
) -> None:
    site = tmp_path_factory.mktemp("site")
    PluginSite(site).install("spy", MEMORY_SPY)
    seen = {}
    sizes = {}
    for stage in ("none", "stage2", "stage3"):
        name = f"memory-{stage}"
        parallel = f'--parallel={{"sharding": "{stage}"}}'
        words = runner.smoke(name, *COMMON, *OPTIMIZERS["sgd"], "--train.max_steps=2", "--launch.num_devices=2")
        words += [parallel, "--train.micro_batch_size=2", "--train.log_steps=100"]
        runner.run(*words, PYTHONPATH=str(site), LLMSUITE_PLUGINS="spy")
        seen[stage] = json.loads((runner.directory / name / "seen.json").read_text())
        sizes = {key: value.size for key, value in runner.weights(name, 2).items()}
    total = sum(sizes.values())
    assert all(size % 2 == 0 for size in sizes.values()), "the parts are equal"
    assert [len(seen[stage]["whole"]) for stage in seen] == [len(sizes), len(sizes), 0]
    # SGD has no state: stage 2 keeps the parameters and the parts it updates, stage 3 these parts only
    assert seen["stage2"]["live"] - seen["none"]["live"] == pytest.approx(4 * total / 2, abs=4 * total / 100)
    assert seen["none"]["live"] - seen["stage3"]["live"] == pytest.approx(4 * total / 2, abs=4 * total / 100)
    # four micro-batches: 8 samples a rank, 2 at a time; the first step's are not watched for their sums
    assert [bool(names) for names in seen["none"]["gradients"]] == [False, True, True, True] * 2
    for stage in ("stage2", "stage3"):
        assert seen[stage]["gradients"] == [[]] * 8
        assert seen[stage]["sums"][4:] == [0, *[total // 2] * 3]


@pytest.fixture(scope="module")
def stage3_run(runner: Runner, cut_run: Path) -> Path:
    """The same run as `whole`, of which `cut_run` has seen to it, under stage 3."""
    runner.run(*_words(runner, "stage3", "stage3 over 2", "adamw", *SCHEDULE))
    return runner.directory / "stage3"


@pytest.mark.parametrize("mesh", ["one", "tp2, dp2"])
def test_a_run_leaves_stage3(runner: Runner, stage3_run: Path, mesh: str) -> None:
    _goes_on(runner, stage3_run, mesh)


@pytest.mark.parametrize("mesh", ["one", "tp2, dp2", "stage3 over 2, tp2 sequence"])
def test_a_run_goes_on_on_another_mesh(runner: Runner, cut_run: Path, mesh: str) -> None:
    _goes_on(runner, cut_run, mesh)


def _goes_on(runner: Runner, run: Path, mesh: str) -> None:
    name = f"{run.name} resumed on {mesh}"
    target = runner.directory / name
    shutil.copytree(run, target)
    shutil.rmtree(target / "checkpoints" / f"step-{STEPS}")
    output = runner.run(*_words(runner, name, mesh, "adamw", *SCHEDULE), "--resume")
    assert f"resuming from {target / 'checkpoints' / 'step-2'}" in output
    expected = runner.metrics("whole")
    assert len(expected) == STEPS
    _assert_same_metrics(runner.metrics(name), expected)
    _assert_close(runner.weights(name, STEPS), runner.weights("whole", STEPS), 1e-5)
    _assert_close(runner.weights(name, STEPS, "optimizer"), runner.weights("whole", STEPS, "optimizer"), 1e-5)
