"""Accelerators of vendors: their names, with and without a plug-in for Paddle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmsuite.base.commands import Finished
from llmsuite.base.errors import RecipeError, UserError
from llmsuite.base.resources import bundled
from llmsuite.contract.given import plugin_from_specs
from llmsuite.contract.registry import Registry
from llmsuite.contract.specs import DeviceSpec
from llmsuite.devices import vendors
from llmsuite.devices.vendors import VENDORS, backend_of, find_vendor, plug_in_devices
from llmsuite.recipe.resolve import plan_run
from tests.conftest import registry_with
from tests.device import SimBackend
from tests.support.paths import ROOT

Patch = pytest.MonkeyPatch
RECIPE = bundled("recipes") / "llama" / "sft.json"


@pytest.mark.parametrize("vendor", VENDORS, ids=lambda vendor: vendor.name)
def test_a_known_accelerator_needs_no_registration(vendor: vendors.Vendor, registry: Registry) -> None:
    backend = registry.device(vendor.name).factory()
    assert (backend.name, backend.install, backend.visible_devices) == (
        vendor.name,
        vendor.install,
        vendor.visible_devices,
    )
    assert vendor.name not in registry.devices
    plan = plan_run(RECIPE, [f"--device={vendor.name}", "--parallel={}", "--launch.num_devices=1"], registry)
    assert plan.parallel.device.name == vendor.name


def test_the_guide_has_every_known_accelerator() -> None:
    text = (ROOT / "docs" / "guide" / "devices.md").read_text(encoding="utf-8")
    for vendor in VENDORS:
        assert f"`{vendor.name}`" in text
        assert all(f"`{name}`" in text for name in vendor.visible_devices)
        assert vendor.install in text or not vendor.install.startswith("pip ")


def test_a_plugin_replaces_the_backend_of_a_vendor() -> None:
    own = registry_with(own=plugin_from_specs([DeviceSpec(name="npu", help="", factory=SimBackend)]))
    assert isinstance(own.device("npu").factory(), SimBackend)


def test_an_unknown_name_is_refused(registry: Registry) -> None:
    assert registry.find_device("npuu") is None
    with pytest.raises(UserError, match="no device is called 'npuu'"):
        registry.device("npuu")


def test_paddle_is_asked_once_for_other_names(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUSTOM_DEVICE_ROOT", str(tmp_path))
    monkeypatch.delenv("LLMSUITE_CUSTOM_DEVICES", raising=False)
    assert plug_in_devices() == (), "there is no library"
    (tmp_path / "libother.so").touch()
    asked = list[bool]()

    def run(*args: object, **options: object) -> Finished:
        asked.append(True)
        return Finished(0, "a line of Paddle's\n" + json.dumps(["other"]) + "\n", "")

    monkeypatch.setattr(vendors, "run_command", run)
    found = find_vendor("other")
    assert found is not None
    assert backend_of(found).rank_environment(1) == {"FLAGS_selected_others": "1"}
    assert find_vendor("another") is None
    assert len(asked) == 1


@pytest.mark.parametrize("words", [(1, "", ""), (0, "no json\n", ""), (0, "", "")])
def test_plug_ins_that_do_not_work_have_no_devices(monkeypatch: Patch, words: tuple[int, str, str]) -> None:
    monkeypatch.setattr(vendors, "run_command", lambda *args, **options: Finished(*words))
    assert vendors._ask_paddle() == []


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (['--parallel={"tensor_parallel_degree": 2}', "--engine.precision=fp32"], "parallel.tensor_parallel_degree"),
        (["--parallel={}", "--engine.mode=to_static", "--engine.program=step"], "engine.program"),
        (["--parallel={}", "--engine.deterministic=true"], "engine.deterministic"),
        (
            ['--parallel={"pipeline_parallel_degree": 2, "pipeline_schedule": "interleaved"}'],
            "parallel.pipeline_schedule",
        ),
    ],
)
def test_what_they_do_not_do_is_refused(words: list[str], key: str, registry: Registry) -> None:
    few = ["--launch.num_devices=2", "--launch.nnodes=1", "--engine.recompute=none"]
    with pytest.raises(RecipeError) as error:
        plan_run(RECIPE, ["--device=npu", *few, *words], registry)
    assert key in [problem.key for problem in error.value.problems]
    try:
        plan_run(RECIPE, ["--device=gpu", *few, *words], registry)
    except RecipeError as of_gpu:
        pytest.fail(str(of_gpu))


def test_devices_without_numbers_cannot_be_chosen(registry: Registry) -> None:
    with pytest.raises(RecipeError, match=r"launch\.devices"):
        plan_run(RECIPE, ["--device=sdaa", "--parallel={}", "--launch.devices=0"], registry)
