"""Two plugins that want the same name: what is built in stays, of third parties neither wins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llmsuite
from llmsuite import builtin
from llmsuite.base.errors import RecipeError, UserError
from llmsuite.contract.hookspecs import Command, LoggerSpec
from llmsuite.contract.registry import ALLOW_LIST, PluginInfo, load_plugins
from llmsuite.recipe.resolve import plan_run
from tests.conftest import STAGE_PLUGIN, STAGES, PluginSite, registry_with

BOTH = "stage 'spin' is registered by both first-package 1.0 and second-package 1.0; uninstall one, or name the plugins"


class Loggers:
    """A plugin that brings loggers."""

    def __init__(self, *names: str):
        self.names = names

    @llmsuite.hookimpl
    def llmsuite_register_loggers(self) -> list[LoggerSpec]:
        return [LoggerSpec(name=name, help="", factory=lambda run_dir: NotImplemented) for name in self.names]


def test_name_that_is_built_in(site: PluginSite, plan: Callable[..., Any], write_recipe: Callable[..., Path]) -> None:
    site.install("first-package", STAGE_PLUGIN.replace('"spin"', '"dpo"'), "impostor = {module}")
    registry = load_plugins()
    (info,) = [info for info in registry.plugins if info.name == "impostor"]
    assert info.error is not None
    assert info.error.startswith("stage 'dpo' is registered by both llmsuite (built in) and first-package 1.0")
    assert registry.owner("stage", "dpo").plugin is builtin
    assert plan_run(write_recipe({"dpo": {"loss": "ipo"}}), [], registry).train.stage is registry.stages["dpo"]


def test_two_third_parties(site: PluginSite, write_recipe: Callable[..., Path]) -> None:
    site.install("second-package", entry_points="b_stage = {module}")
    site.install("first-package", entry_points="a_stage = {module}")
    registry = load_plugins()
    plugins = {info.name: info for info in registry.plugins}
    assert "spin" not in registry.stages
    assert plugins["a_stage"].provides == plugins["b_stage"].provides == []
    assert BOTH in str(plugins["b_stage"].error)
    assert BOTH in registry.unknown("stage", "spin")
    with pytest.raises(RecipeError) as caught:
        plan_run(write_recipe({"stage": "spin", "spin": {}}), [], registry)
    assert [(p.key, p.message[: len(BOTH)]) for p in caught.value.problems] == [("stage", BOTH)]
    plan_run(write_recipe(), [], registry)


def test_the_allow_list_settles_it(
    site: PluginSite, write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("second-package", entry_points="b_stage = {module}")
    site.install("first-package", entry_points="a_stage = {module}")
    monkeypatch.setenv(ALLOW_LIST, "b_stage")
    registry = load_plugins()
    assert registry.owner("stage", "spin").distribution == "second-package 1.0"
    plan_run(write_recipe({"stage": "spin"}), [], registry)


def test_a_third_claim_does_not_succeed_either() -> None:
    registry = registry_with(first=Loggers("x", "own"), second=Loggers("x"), third=Loggers("x"))
    assert "x" not in registry.loggers
    assert [bool(info.error) for info in registry.plugins[-3:]] == [False, True, True]
    assert "first-package 1.0 and second-package 1.0" in str(registry.plugins[-1].error)
    assert registry.plugins[-3].provides == ["logger own"]  # the rest of the first stays
    assert "own" in registry.loggers


def test_a_refused_plugin_leaves_none_of_its_names() -> None:
    registry = registry_with(first=Loggers("x"), second=Loggers("y", "x", "z"), third=Loggers("y", "z"))
    assert set(registry.loggers) == {*registry_with().loggers, "y", "z"}
    assert registry.owner("logger", "y").name == "third"


def test_names_of_different_kinds_do_not_clash() -> None:
    registry = registry_with(plugin=Loggers("dpo", "llama"))
    assert registry.plugins[-1].error is None
    assert {"dpo", "llama"} <= set(registry.loggers)


def test_two_plugins_of_one_name_both_work(site: PluginSite) -> None:
    site.install("first-package", entry_points="same = {module}")
    site.install("second-package", STAGE_PLUGIN.replace('"spin"', '"orpo"'), "same = {module}")
    site.install("third-package", STAGE_PLUGIN.replace('"spin"', '"simpo"'), "builtin = {module}")
    registry = load_plugins()
    assert [info.error for info in registry.plugins if info.name in ("same", "builtin")] == [None] * 4
    assert set(registry.stages) == {*STAGES, "spin", "orpo", "simpo"}


@pytest.mark.parametrize("value", ["llmsuite.builtin", "first_package"])
def test_one_module_registered_twice(site: PluginSite, value: str) -> None:
    site.install("first-package", entry_points=f"a_stage = {{module}}\nb_again = {value}")
    registry = load_plugins()
    plugins = {info.name: info for info in registry.plugins}
    assert plugins["a_stage"].error is None
    assert str(plugins["b_again"].error).startswith(f"{value} is already registered, as plugin ")
    # the first one is whole: its hooks are called
    assert {"dpo", "spin"} <= set(registry.stages)
    assert registry.pm.is_registered(plugins["a_stage"].plugin)
    assert registry.pm.is_registered(builtin)


class Commands:
    @llmsuite.hookimpl
    def llmsuite_register_commands(self) -> list[Command]:
        def add_arguments(parser: Any) -> None:
            raise RuntimeError("not today")

        return [Command(name="hello", help="", add_arguments=add_arguments, run=lambda args, registry: 0)]


def test_specs_that_fail_later_are_withdrawn() -> None:
    registry = registry_with(plugin=Commands())
    registry.disable("command", "hello", RuntimeError("not today"))
    info = registry.plugins[-1]
    assert "hello" not in registry.commands
    assert (info.provides, info.error) == ([], "RuntimeError: not today")
    assert registry.unknown("command", "hello") == (
        "command 'hello' of plugin-package 1.0 does not work: RuntimeError: not today"
    )


def test_built_in_specs_are_not_withdrawn() -> None:
    registry = registry_with()
    with pytest.raises(RuntimeError, match="a bug"):
        registry.disable("command", "run", RuntimeError("a bug"))
    assert "run" in registry.commands


def test_unknown_name_of_every_kind() -> None:
    registry = registry_with()
    assert (
        registry.unknown("device", "gpus")
        == "no device is called 'gpus'; did you mean 'gpu'? registered: cpu, gpu, xpu"
    )
    assert registry.unknown("logger", "zzz") == (
        "no logger is called 'zzz'; registered: mlflow, swanlab, tensorboard, visualdl, wandb"
    )
    registry.plugins.append(PluginInfo("x", "x 1.0", "x", error="first line\nBadError: last line"))
    assert registry.unknown("logger", "zzz").endswith(
        "visualdl, wandb. It may be in a plugin that failed to load: x (BadError: last line)"
    )


def test_error_that_is_no_user_error_keeps_its_traceback() -> None:
    class Plugin:
        @llmsuite.hookimpl
        def llmsuite_register_loggers(self) -> list[LoggerSpec]:
            raise KeyError("deep inside")

    class Other:
        @llmsuite.hookimpl
        def llmsuite_register_loggers(self) -> list[LoggerSpec]:
            raise UserError("install the server first")

    registry = registry_with(first=Plugin(), second=Other())
    assert Path(__file__).name in str(registry.plugins[-2].error)
    assert registry.plugins[-1].error == "install the server first"
