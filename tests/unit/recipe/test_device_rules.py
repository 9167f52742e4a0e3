"""Pipelines that would stand still on a device are refused by name: what each backend says it runs decides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from llmsuite.base.errors import RecipeError
from llmsuite.base.resources import bundled
from llmsuite.contract.given import plugin_from_specs
from llmsuite.contract.registry import Registry
from llmsuite.contract.specs import DeviceSpec
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.gpu import GpuBackend
from llmsuite.recipe.resolve import plan_run
from tests.conftest import registry_with
from tests.support.paths import ROOT

RECIPES = sorted(
    path for path in bundled("recipes").glob("*/*.json") if json.loads(path.read_text())["stage"] != "infer"
)
INTERLEAVED = '--parallel={"pipeline_parallel_degree": 2, "pipeline_schedule": "interleaved"}'
PIPELINE = '--parallel={"pipeline_parallel_degree": 2}'
STEP = ("--engine.mode=to_static", "--engine.program=step")
LAYERS = "--engine.program=layers"
HANGS = "ranks wait for each other"
WAITS = "does not support it with a pipeline"


class Silent(GpuBackend):
    """A device of a plugin that does not say which pipelines it runs."""

    name = "silent"
    supports_interleaving = DeviceBackend.supports_interleaving
    supports_step_pipelines = DeviceBackend.supports_step_pipelines


class Able(GpuBackend):
    """A device of a plugin that runs all of them."""

    name = "able"
    supports_interleaving = True
    supports_step_pipelines = True


RUNS = {
    "cpu": (True, True),
    "gpu": (True, True),
    "xpu": (False, True),
    "silent": (False, False),
    "able": (True, True),
}
"""Devices -> support of interleaved pipelines, and of pipelines in compiled training steps."""


@pytest.fixture(scope="module")
def devices() -> Registry:
    return registry_with(
        own=plugin_from_specs([DeviceSpec(name=cls.name, help="", factory=cls) for cls in (Silent, Able)])
    )


def _said(path: Path, words: Sequence[str], registry: Registry) -> list[tuple[str, str]]:
    """Keys of pipelines that would stand still, with the messages about that."""
    try:
        plan_run(path, words, registry)
    except RecipeError as error:
        found = [(problem.key, problem.message) for problem in error.problems]
        return [(key, text) for key, text in found if HANGS in text or WAITS in text]
    return []


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_rules_for_every_recipe_on_every_device(path: Path, devices: Registry) -> None:
    assert devices.devices.keys() == RUNS.keys()
    for device, (interleaved, compiled) in RUNS.items():
        on = f"--device={device}"
        for words, key, is_legal in (
            ((INTERLEAVED, LAYERS), "parallel.pipeline_schedule", interleaved),
            ((PIPELINE, *STEP), "engine.program", compiled),
            ((LAYERS,), "", True),
            ((PIPELINE, LAYERS), "", True),
            (("--parallel={}", *STEP), "", True),
        ):
            said = _said(path, [on, *words], devices)
            assert [key for key, _ in said] == ([] if is_legal else [key])
            assert all(f" {device}" in text and "; set it to " in text for _, text in said)


def test_a_smoke_run_is_on_the_cpu(devices: Registry) -> None:
    sizes = "--train.micro_batch_size=2", "--model.config.num_hidden_layers=4"
    words = ["--launch.num_devices=2", INTERLEAVED, *STEP, *sizes, "--engine.recompute=none"]
    plan = plan_run(ROOT / "recipes/llama/sft.json", words, devices, smoke=True)
    assert isinstance(plan.parallel.device.factory(), CpuBackend)


def test_the_number_of_chunks_is_left_out_with_the_schedule(devices: Registry) -> None:
    schedule = ["--device=xpu", "--parallel.pipeline_schedule=interleaved", "--parallel.virtual_pipeline_degree=4"]
    said = _said(ROOT / "recipes/llama/dpo.json", schedule, devices)
    ((key, text),) = said
    assert key == "parallel.pipeline_schedule"
    assert text.endswith("set it to 1F1B and remove virtual_pipeline_degree")


NO_MASTERS = "--train.master_weights=false"


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (["--device=gpu", "--engine.precision=bf16"], None, ""),
        (["--device=xpu", "--engine.precision=bf16", "--train.optimizer=adamw_8bit"], None, ""),
        (["--device=gpu", "--engine.precision=fp32"], "train.master_weights", "parameters are float32 with"),
        (["--device=gpu", "--engine.precision=fp16"], "train.master_weights", "second moments below 6e-8 would be 0"),
        (["--device=cpu", "--engine.precision=bf16"], "train.master_weights", "cpu keeps parameters in float32 with"),
        (
            ["--device=gpu", "--engine.precision=bf16", "--engine.offload_optimizer=true"],
            "engine.offload_optimizer",
            "which train.master_weights false does not support",
        ),
    ],
)
def test_parameters_without_masters(words: list[str], key: str | None, message: str, devices: Registry) -> None:
    problems = []
    try:
        plan_run(ROOT / "recipes/llama/sft.json", [*words, NO_MASTERS], devices)
    except RecipeError as error:
        problems = error.problems
    assert [problem.key for problem in problems] == ([] if key is None else [key])
    assert all(message in problem.message for problem in problems)


def test_a_smoke_run_has_masters(devices: Registry) -> None:
    words = ["--device=gpu", "--engine.precision=bf16", NO_MASTERS]
    assert not plan_run(ROOT / "recipes/llama/sft.json", words, devices).parallel.master_weights
    smoke = plan_run(ROOT / "recipes/llama/sft.json", words[:2], devices, smoke=True)
    assert smoke.parallel.master_weights
