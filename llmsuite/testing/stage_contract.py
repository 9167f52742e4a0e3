"""Contract of a stage as one assertion: its keys are documented and checked, its loss falls, a resumed run equals the
run without interruption, and two ranks equal one.

A tiny model is trained on the CPU with the command line, in its own processes, as a user would do it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.cache import isolated_cache
from llmsuite.base.commands import Finished, run_command
from llmsuite.base.errors import RecipeError
from llmsuite.contract.registry import Registry, load_plugins
from llmsuite.contract.specs import StageSpec
from llmsuite.recipe.resolve import plan_run
from llmsuite.testing.descriptions import assert_described

STEPS = 4
SAVED_STEP = 2
LIMIT = 1e-6
"""Largest relative difference between one rank and two, in float32."""
_TIMING_METRICS = (
    "avg_reader_cost", "avg_rollout_cost", "avg_batch_cost", "speed", "ips_total", "ips", "model_tflops", "mfu",
    "peak_memory_bytes",
)  # fmt: skip


def assert_stage_contract(stage: str, directory: Path, keys: Mapping[str, Any] | None = None) -> None:
    """Raise AssertionError with the broken rule unless a registered stage fulfils the contract. Takes half a minute.

    Args:
        stage: name of the stage.
        directory: empty directory for the files of the runs, such as pytest's `tmp_path`.
        keys: values by dotted key that override a small recipe: at least "data.train", unless `StageSpec.smoke` has it.
            The file should have a few hundred samples at most, as all are evaluated.
    """
    registry = load_plugins()
    assert stage in registry.stages, registry.unknown("stage", stage)
    spec = registry.stages[stage]
    assert isinstance(spec, StageSpec), f"{stage} does not train"
    path = directory / "recipe.json"
    path.write_text(json.dumps(_recipe(spec, registry, keys or {}), indent=1), encoding="utf-8")
    _check_schema(spec, registry, path)
    one = directory / "one"
    again = directory / "again"
    two = directory / "two"
    _run(path, one, ["--checkpoint.save_steps=2"])
    has_updates = plan_run(path, [], registry).train.profile.updates > 0
    _check_learning(one, has_updates)
    _stop_at_saved_step(one, again)
    _run(path, again, ["--checkpoint.save_steps=2", "--resume"])
    _check_resumed(one, again)
    _run(path, two, ["--launch.num_devices=2", "--train.micro_batch_size=2", "--data.eval=null"])
    _check_ranks(one, two)


def _recipe(spec: StageSpec, registry: Registry, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Build a tiny recipe that is evaluated on its training data, with SGD, as Adam hides errors of scale."""
    given = {**spec.smoke, **keys}
    assert "data.train" in given, f"stage {spec.name} brings no data; give keys={{'data.train': FILE}}"
    given["data.eval"] = given["data.train"]
    family = registry.models["llama"]
    recipe: dict[str, Any] = {
        "stage": spec.name,
        "model": {
            "family": family.name,
            "tokenizer": "data/tokenizer",
            "config": {**family.smoke, "num_hidden_layers": 2},
        },
        "data": {"max_length": 128},
        "train": {
            "max_steps": STEPS, "global_batch_size": 16, "micro_batch_size": 8, "eval_steps": SAVED_STEP,
            "optimizer": "sgd", "learning_rate": 0.05, "lr_schedule": "constant",
        },
        "output_dir": "one",
    }  # fmt: skip
    if "adapters_only" in spec.capabilities:
        recipe["lora"] = {"rank": 4}
    for dotted, value in given.items():
        *sections, key = dotted.split(".")
        node = recipe
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = str(value) if isinstance(value, Path) else value
    return recipe


# checks


def _check_schema(spec: StageSpec, registry: Registry, path: Path) -> None:
    assert_described(spec.config_cls)
    assert spec.help.strip(), "StageSpec.help is empty"
    plan_run(path, [], registry)
    unknown = f"{spec.section_name}.no_such_key"
    assert unknown in _refused(path, [f"--{unknown}=1"], registry), f"{unknown} is not refused"
    checked = _python(["-c", _VALIDATE, "validate", str(path)], path.parent)
    assert checked.code != 3, "the plugin imports Paddle where a recipe is only checked"
    assert checked.code == 0, checked.output + checked.errors


_VALIDATE = """
import sys
from llmsuite.__main__ import main
sys.exit(main() or 3 * ("paddle" in sys.modules))
"""


def _refused(path: Path, args: Sequence[str], registry: Registry) -> list[str]:
    """Return the keys with errors in a recipe."""
    try:
        plan_run(path, args, registry)
    except RecipeError as error:
        return [problem.key for problem in error.problems]
    return []


def _check_learning(one: Path, has_updates: bool) -> None:
    if has_updates:  # the samples differ in each step
        assert any(record.get("grad_norm", 0) > 0 for record in _metrics(one)), "no step has a gradient"
        return
    evaluated = [record["eval/loss"] for record in _metrics(one) if "eval/loss" in record]
    assert len(evaluated) == STEPS // SAVED_STEP, f"{len(evaluated)} evaluations"
    first, last = evaluated
    assert first is not None, "the loss of the evaluation is not a number"
    assert last is not None, "the loss of the evaluation is not a number"
    assert last < first, f"two steps make the loss of the training rows rise from {first} to {last}"


def _check_resumed(one: Path, again: Path) -> None:
    uninterrupted = [_without_timing(record) for record in _metrics(one)]
    resumed = [_without_timing(record) for record in _metrics(again)]
    assert resumed == uninterrupted, f"a resumed run differs:\n{resumed}\ninstead of\n{uninterrupted}"
    expected = _tensors(one)
    found = _tensors(again)
    differing = [name for name, value in expected.items() if not np.array_equal(found[name], value)]
    assert not differing, f"after a resumed run these differ: {', '.join(differing)}"


def _check_ranks(one: Path, two: Path) -> None:
    on_one = [record for record in _metrics(one) if "loss" in record]
    on_two = [record for record in _metrics(two) if "loss" in record]
    for a, b in zip(on_one, on_two, strict=True):
        for key in ("tokens", "supervised_tokens", "loss", "grad_norm"):
            assert math.isclose(a[key], b[key], rel_tol=LIMIT, abs_tol=LIMIT * (key == "loss")), (
                f"step {a['step']}: {key} is {b[key]} on two ranks and {a[key]} on one. The sums of `loss` may not be "
                "divided in the stage, nor depend on what else is in the micro-batch"
            )
    expected = _tensors(one)
    found = _tensors(two)
    for name, value in expected.items():
        off = float(np.linalg.norm(found[name] - value)) / (float(np.linalg.norm(value)) or 1.0)
        assert off <= LIMIT, f"{name} differs by {off:.1e} between two ranks and one"


# runs


def _run(recipe: Path, output: Path, args: Sequence[str]) -> None:
    command = ["-m", "llmsuite", "run", str(recipe), f"--output_dir={output}", *args]
    done = _python(command, recipe.parent)
    assert done.code == 0, f"llmsuite run {' '.join(args)}: exit code {done.code}\n{done.output}{done.errors}"


def _python(args: Sequence[str], directory: Path) -> Finished:
    environment = {**os.environ, "LLMSUITE_CACHE": str(isolated_cache(directory / "cache"))}
    return run_command([sys.executable, *args], environment)


def _stop_at_saved_step(one: Path, again: Path) -> None:
    """Copy a run as if it had been stopped after its first checkpoint."""
    shutil.copytree(one, again)
    shutil.rmtree(again / "checkpoints" / f"step-{STEPS}")
    (again / "checkpoints" / "latest").write_text(f"step-{SAVED_STEP}\n")


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def _without_timing(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in _TIMING_METRICS}


def _tensors(run: Path) -> dict[str, np.ndarray]:
    """Load all tensors of the last checkpoint, with the optimizer state; their distribution over files depends on the
    ranks."""
    import safetensors.numpy

    files = sorted((run / "checkpoints" / f"step-{STEPS}").glob("*.safetensors"))
    tensors = {}
    for file in files:
        stem = file.name.partition("-")[0]
        for name, value in safetensors.numpy.load_file(file).items():
            tensors[f"{stem}: {name}"] = value
    return tensors
