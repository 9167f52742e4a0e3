"""Third-party packages are found and registered; one that is broken is reported and changes nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

import llmsuite
from llmsuite.adapters.methods import BUILT_IN
from llmsuite.base.errors import RecipeError
from llmsuite.cli.main import main
from llmsuite.contract import hookspecs
from llmsuite.contract.checks import check_adapter_method, check_family, check_fields, check_kernels, check_stage
from llmsuite.contract.hookspecs import LoggerSpec, StageSpec
from llmsuite.contract.registry import (
    ALLOW_LIST,
    BUILTIN,
    BUNDLED_PLUGINS,
    NO_PLUGINS,
    REGISTRATIONS,
    PluginInfo,
    Registry,
    left_out_notes,
    load_plugins,
)
from llmsuite.contract.schema.section import Section
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.schema_json import recipe_schema
from tests.conftest import STAGE_PLUGIN, STAGES, PluginSite, registry_with

BEFORE = "def llmsuite_register_stages"


def load(site: PluginSite) -> tuple[Registry, dict[str, PluginInfo]]:
    """Everything, and the plugins of this test by name."""
    registry = load_plugins()
    return registry, {i.name: i for i in registry.plugins if i.value.partition(":")[0] in site.modules}


def implementations(registry: Registry) -> set[str]:
    """Modules that some hook would call."""
    hooks = vars(registry.pm.hook).values()
    found = {impl.plugin for hook in hooks if hasattr(hook, "get_hookimpls") for impl in hook.get_hookimpls()}
    return {getattr(plugin, "__name__", str(plugin)) for plugin in found}


def test_working_plugin(site: PluginSite, write_recipe: Callable[..., Any]) -> None:
    site.install("third-party", entry_points="stages = {module}")
    registry, plugins = load(site)
    info = plugins["stages"]
    assert (info.error, info.distribution, info.value) == (None, "third-party 1.0", "third_party")
    assert info.provides == ["stage spin"]
    assert info.hooks == ["llmsuite_register_stages"]
    assert registry.owner("stage", "spin") is info
    plan = plan_run(write_recipe({"stage": "spin", "spin": {"beta": 0.2}}), [], registry)
    assert plan.recipe.spin.beta == 0.2  # type: ignore[attr-defined]
    with pytest.raises(RecipeError, match=r"spin\.betta: unknown key; did you mean 'beta'"):
        plan_run(write_recipe({"stage": "spin", "spin": {"betta": 1}}), [], registry)


def test_an_object_can_be_a_plugin(site: PluginSite) -> None:
    methods = STAGE_PLUGIN.replace("\n@llmsuite", "\nclass Plugin:\n  @llmsuite").replace(
        f"{BEFORE}():\n    ", f"  {BEFORE}(self):\n        "
    )
    site.install("third-party", f"{methods}\nplugin = Plugin()\n", "own = {module}:plugin")
    registry, plugins = load(site)
    assert plugins["own"].error is None
    assert "spin" in registry.stages


def test_a_class_is_no_plugin(site: PluginSite) -> None:
    methods = "import llmsuite\nclass Plugin:\n  @llmsuite.hookimpl\n  def llmsuite_run_end(self): pass\n"
    site.install("third-party", methods, "own = {module}:Plugin")
    assert load(site)[1]["own"].error == "third_party:Plugin is the class Plugin; name an instance of it"


def test_a_hook_of_other_versions_may_be_optional(site: PluginSite) -> None:
    later = "\n@llmsuite.hookimpl(optionalhook=True)\ndef llmsuite_of_later(): pass\n"
    site.install("third-party", STAGE_PLUGIN + later)
    assert "spin" in load(site)[0].stages


def test_function_of_another_name(site: PluginSite) -> None:
    marked = STAGE_PLUGIN.replace("hookimpl", 'hookimpl(specname="llmsuite_register_stages")')
    site.install("third-party", marked.replace(BEFORE, "def stages"))
    assert "spin" in load(site)[0].stages


SPEC = 'StageSpec(name="spin"'
COMMAND_PLUGIN = """
import llmsuite
from llmsuite.contract.hookspecs import Command

@llmsuite.hookimpl
def llmsuite_register_commands():
    return [Command(name="{}", help="", add_arguments=lambda parser: None, run=lambda args, registry: 0)]
"""
SUITE_PLUGIN = """
import llmsuite
from llmsuite.contract.hookspecs import SuiteSpec

@llmsuite.hookimpl
def llmsuite_register_suites():
    return [SuiteSpec(name="{}", help="", convert={})]
"""
BROKEN = {
    "import": ("import json\nraise RuntimeError('no licence')", "RuntimeError: no licence"),
    "syntax": ("import json\ndef (", '", line 2\n    def ('),
    "exit": ("import sys\nsys.exit(3)", "SystemExit: 3"),
    "missing package": ("import no_such_package_anywhere", "No module named 'no_such_package_anywhere'"),
    "misspelt hook": (
        STAGE_PLUGIN.replace(BEFORE, BEFORE[:-1]),
        "no hook is called 'llmsuite_register_stage'; did you mean 'llmsuite_register_stages'?",
    ),
    "hook of nothing": (STAGE_PLUGIN.replace(BEFORE, "def zzz"), "no hook is called 'zzz'; known: llmsuite_"),
    "name is no text": (
        STAGE_PLUGIN.replace('"spin"', "3"),
        "a stage has the name 3; a name has to be a non-empty text",
    ),
    "no function": (
        STAGE_PLUGIN.replace("factory=lambda: object", 'factory="stage"'),
        "factory of stage 'spin' has to be a function, and is a str",
    ),
    "text as tuple": (
        "import llmsuite\nfrom llmsuite.contract.hookspecs import RewardSpec\n\n@llmsuite.hookimpl\n"
        "def llmsuite_register_rewards():\n"
        "    return [RewardSpec(name='r', help='', factory=lambda: None, parts=('agreement'))]\n",
        "parts of reward 'r' is a text; it has to be a tuple: ('agreement',)",
    ),
    "class as factory": (
        STAGE_PLUGIN.replace("factory=lambda: object", "factory=SpinSection"),
        "factory of stage 'spin' is the class SpinSection; it has to be a function that returns the class",
    ),
    "unknown argument": (
        STAGE_PLUGIN + "\n@llmsuite.hookimpl\ndef llmsuite_step_end(run, stepp):\n    print('called')\n",
        "Argument(s) {'stepp'} are declared in the hookimpl but can not be found in the hookspec\n"
        "Its parameters, each of which is optional: run, step, metrics",
    ),
    "async event": (
        STAGE_PLUGIN + "\n@llmsuite.hookimpl\nasync def llmsuite_step_end(run):\n    print('called')\n",
        "llmsuite_step_end is an async function, whose body would never run; make it a plain function",
    ),
    "wrapper": (
        STAGE_PLUGIN + "\n@llmsuite.hookimpl(wrapper=True)\ndef llmsuite_step_end(run):\n    return (yield)\n",
        "llmsuite_step_end is a generator or a wrapper, whose body would never run",
    ),
    "event that yields": (
        STAGE_PLUGIN + "\n@llmsuite.hookimpl\ndef llmsuite_run_end(run):\n    yield run\n",
        "llmsuite_run_end is a generator or a wrapper, whose body would never run",
    ),
    "unmarked": (
        STAGE_PLUGIN.replace("@llmsuite.hookimpl", ""),
        "llmsuite_register_stages: not marked with @llmsuite.hookimpl",
    ),
    "unmarked event": (STAGE_PLUGIN + "\ndef llmsuite_run_end(run): pass\n", "llmsuite_run_end: not marked"),
    "empty": ("import llmsuite", "it has no function marked with @llmsuite.hookimpl"),
    "newer contract": (
        STAGE_PLUGIN.replace(SPEC, f"{SPEC}, api=2"),
        "stage 'spin' needs version 2 of the plugin contract, this llmsuite has 1; install a newer llmsuite or an "
        "older",
    ),
    "raises": (STAGE_PLUGIN.replace("return [", "1 / 0; return ["), "ZeroDivisionError: division by zero"),
    "exits": (STAGE_PLUGIN.replace("return [", "raise SystemExit(4); return ["), "SystemExit: 4"),
    "returns nothing": (STAGE_PLUGIN.replace("return [", "["), "returned a NoneType; it has to return a list of Stage"),
    "returns a spec": (
        STAGE_PLUGIN.replace("return [", "return (").replace(")]", "))"),
        "returned a StageSpec; it has",
    ),
    "returns names": (STAGE_PLUGIN.replace("return [", 'return ["spin", '), "returned a list with a str; it has to"),
    "returns other specs": (
        STAGE_PLUGIN.replace("register_stages", "register_models"),
        "llmsuite_register_models returned a list with a StageSpec; it has to return a list of ModelFamily",
    ),
    "registers twice": (STAGE_PLUGIN.replace("return [", "return 2 * ["), "it registers stage 'spin' twice"),
    "name is a key": (STAGE_PLUGIN.replace('"spin"', '"train"'), "a stage cannot be called 'train'"),
    "name is no key": (STAGE_PLUGIN.replace('"spin"', '"s-pin"'), "a stage cannot be called 's-pin'"),
    "section without its decorator": (
        STAGE_PLUGIN.replace("@dataclasses.dataclass(kw_only=True)\n", ""),
        "config_cls of stage 'spin': SpinSection lacks @dataclasses.dataclass(kw_only=True)",
    ),
    "key of no type": (
        STAGE_PLUGIN.replace("beta: float", 'beta: "Beta"'),
        "config_cls of stage 'spin': SpinSection has a key whose type JSON does not have: ",
    ),
    "default of another type": (
        STAGE_PLUGIN.replace("float = 0.1", 'float = "much"'),
        "config_cls of stage 'spin': a default of SpinSection is not a valid value of its key: 1 validation error for",
    ),
    "rules without keys": (
        STAGE_PLUGIN.replace("@llmsuite", '    def problems(self):\n        return "beta"\n\n@llmsuite'),
        "SpinSection.problems yielded 'b'; it has to yield pairs: (key, message)",
    ),
    "profile of nothing": (
        STAGE_PLUGIN.replace(SPEC, f"{SPEC}, profile=lambda section: None"),
        "profile of stage 'spin' returned a NoneType; it has to return a StageProfile",
    ),
    "another section of its name": (
        STAGE_PLUGIN.replace(SPEC, f"{SPEC}, sections={{'spin': Section}}"),
        "a stage cannot be called 'spin': the name has to be a new key of a recipe",
    ),
    "no such capability": (
        STAGE_PLUGIN.replace(SPEC, f"{SPEC}, capabilities={{'scores'}}"),
        "capabilities of stage 'spin' has to be a set of one of: adapters_only, all_logits, answer_ends, async_rollout",
    ),
    "one capability as a text": (
        STAGE_PLUGIN.replace(SPEC, f"{SPEC}, capabilities='qat'"),
        "capabilities of stage 'spin' is a text; it has to be a set: {'qat'}",
    ),
    "capability of training in a job": (
        STAGE_PLUGIN.replace("StageSpec", "JobSpec").replace(
            SPEC.replace("StageSpec", "JobSpec"), 'JobSpec(capabilities={"qat"}, name="spin"'
        ),
        "capabilities of stage 'spin' has qat, which only stages that train have",
    ),
    "no help": (
        STAGE_PLUGIN.replace('help="a third party\'s stage"', "help=None"),
        "help of stage 'spin' has to be text, and is a NoneType: None",
    ),
    "smoke is no mapping": (
        STAGE_PLUGIN.replace(SPEC, f"{SPEC}, smoke=['data.train']"),
        "smoke of stage 'spin' has to be a mapping of text to value, and is a list: ['data.train']",
    ),
    "version is a text": (
        STAGE_PLUGIN.replace(SPEC, f"{SPEC}, api='1'"),
        "api of stage 'spin' has to be integer, and is a str: '1'",
    ),
    "command of two words": (
        COMMAND_PLUGIN.format("hello there"),
        "a command cannot be called 'hello there': the name has to be one word",
    ),
    "command like an option": (COMMAND_PLUGIN.format("--hello"), "a command cannot be called '--hello'"),
    "command of the parser": (COMMAND_PLUGIN.format("command"), "a command cannot be called 'command'"),
    "suite of two words": (
        SUITE_PLUGIN.format("my suite", "lambda path, registry, options: None"),
        "a suite cannot be called 'my suite': the name has to be one word",
    ),
    "suite that converts nothing": (
        SUITE_PLUGIN.format("mine", "'trl'"),
        "convert of suite 'mine' has to be a function, and is a str: 'trl'",
    ),
    "suite that is bundled": (
        SUITE_PLUGIN.format("trl", "lambda path, registry, options: None"),
        "suite 'trl' is registered by both llmsuite (bundled) and",
    ),
    "section is none": (
        STAGE_PLUGIN.replace("config_cls=SpinSection", "config_cls=dict"),
        "config_cls of stage 'spin' has to be a dataclass derived from llmsuite.contract.schema.section.Section",
    ),
}


FAMILY_PLUGIN = """
import dataclasses
import llmsuite
from llmsuite.models.plain import PlainNames, PlainShape
from llmsuite.contract.hookspecs import ModelFamily

@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape(PlainShape):
    model_type = "mine"

    size: int = 4
    '''Elements.'''

@llmsuite.hookimpl
def llmsuite_register_models():
    return [ModelFamily(
        name="mine", help="", config_cls=Shape, presets={"big": {"size": 8}}, smoke={"size": 2},
        factory=lambda: object, names=lambda: PlainNames(lambda config: []), hf_model_types=("mine",),
    )]
"""
BROKEN_FAMILIES = {
    "shape is none": ("config_cls=Shape", "config_cls=dict", "config_cls of model 'mine' is dict; it has to be a data"),
    "shape is an object": ("config_cls=Shape", "config_cls=Shape()", "config_cls of model 'mine' is a Shape; it has"),
    "shape without methods": ("(PlainShape)", "", "Shape has no method from_hf, to_hf, problems; llmsuite.models"),
    "field of no type": ("size: int", 'size: "Size"', "config_cls of model 'mine': Shape has a key whose type"),
    "preset of another shape": ('{"size": 8}', '{"sise": 8}', "preset 'big' of model 'mine': Shape has no field sise"),
    "smoke of another shape": ('smoke={"size"', 'smoke={"sise"', "smoke of model 'mine': Shape has no field sise"),
    "list of presets": (
        '{"big": {"size": 8}}',
        '["big"]',
        "presets of model 'mine' has to be a mapping of text to a m",
    ),
    "no plan": (
        "hf_model",
        "shard_plan={}, hf_model",
        "shard_plan of model 'mine' has to be ShardPlan or None, and is",
    ),
}


def test_built_in_specs_pass_the_checks() -> None:
    registry = registry_with()
    for kind in REGISTRATIONS:
        assert registry.specs(kind)
        for name, spec in registry.specs(kind).items():
            if kind == "kernels":
                check_kernels(spec)
            elif kind != "adapter method":
                check_fields(kind, spec)
            elif not spec.is_init:
                check_adapter_method(spec, BUILT_IN)
            if kind == "model":
                check_family(spec)
            elif kind == "stage" and name not in ("sft", "lora"):  # whose section is shared
                check_stage(spec)


@pytest.mark.parametrize("case", BROKEN_FAMILIES)
def test_broken_family(site: PluginSite, write_recipe: Callable[..., Any], case: str) -> None:
    right, wrong, error = BROKEN_FAMILIES[case]
    site.install("good-package", FAMILY_PLUGIN.replace('"mine"', '"other"'), "good = {module}")
    site.install("broken-package", FAMILY_PLUGIN.replace(right, wrong), "aaa = {module}")
    registry, plugins = load(site)
    assert error in str(plugins["aaa"].error)
    assert plugins["good"].error is None
    assert "mine" not in registry.models
    plan_run(write_recipe(), [], registry)


@pytest.mark.parametrize("case", BROKEN)
def test_broken_plugin(site: PluginSite, write_recipe: Callable[..., Any], case: str) -> None:
    code, error = BROKEN[case]
    site.install("broken-package", code, "aaa = {module}")  # comes first, as names are sorted
    site.install("good-package", STAGE_PLUGIN.replace('"spin"', '"orpo"'), "good = {module}")
    registry, plugins = load(site)
    info = plugins["aaa"]
    assert info.error is not None
    assert error in info.error
    assert (info.distribution, info.provides, info.hooks) == ("broken-package 1.0", [], [])
    # nothing of it stays, nothing else suffers
    assert implementations(registry) & site.modules == {"good_package"}
    assert plugins["good"].error is None
    assert set(registry.stages) >= {"dpo", "orpo"}
    assert "spin" not in registry.stages
    plan_run(write_recipe(), [], registry)
    recipe_schema(registry, "orpo")
    # a user who requests what it may have registered gets the reason
    message = registry.unknown("stage", "spin")
    assert message.startswith(f"no stage is called 'spin'; registered: {', '.join(sorted([*STAGES, 'orpo']))}")
    assert f"It may be in a plugin that failed to load: aaa ({info.error.strip().splitlines()[-1]})" in message


def test_refused_plugin_hears_no_events(site: PluginSite, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("broken-package", BROKEN["unknown argument"][0])
    registry, _ = load(site)
    registry.emit("llmsuite_step_end", run=None, step=1, metrics={})
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("value", ["{module}:nothing", "no_such_module", "not a module!", "{module}:none"])
def test_entry_point_that_names_nothing(site: PluginSite, value: str) -> None:
    site.install("third-party", "none = None", f"aaa = {value}")
    registry = load_plugins()
    (info,) = [info for info in registry.plugins if info.distribution == "third-party 1.0"]
    assert info.error
    assert "dpo" in registry.stages


def test_allow_list(site: PluginSite, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("spin", "orpo", "simpo"):
        site.install(f"{name}-package", STAGE_PLUGIN.replace('"spin"', f'"{name}"'), f"{name} = {{module}}")
    for allowed, expected in {
        "orpo": {"orpo"},
        "spin, simpo": {"spin", "simpo"},
        "spin,unheard_of": {"spin"},
        "": set(),
        " ": set(),
    }.items():
        monkeypatch.setenv(ALLOW_LIST, allowed)
        registry, plugins = load(site)
        assert set(plugins) == expected
        assert set(registry.stages) == {*STAGES, *expected}
        assert [info.distribution for info in registry.plugins[:2]] == [BUILTIN, BUILTIN]
    assert registry.unknown("stage", "spin").endswith(f". {ALLOW_LIST} allows no plugins")
    monkeypatch.setenv(ALLOW_LIST, "orpo")
    assert registry.unknown("stage", "spin").endswith(f". {ALLOW_LIST} allows only orpo")
    monkeypatch.delenv(ALLOW_LIST)
    assert set(load(site)[1]) == {"spin", "orpo", "simpo"}
    assert "allows" not in registry.unknown("stage", "spin")


def test_notes_on_the_allow_list(
    site: PluginSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("spin", "orpo"):
        site.install(f"{name}-package", STAGE_PLUGIN.replace('"spin"', f'"{name}"'), f"{name} = {{module}}")
    assert left_out_notes() == []
    monkeypatch.setenv(ALLOW_LIST, "spin")
    (said,) = left_out_notes()
    assert said.startswith(f"{ALLOW_LIST} leaves out: ")
    assert "orpo" in said
    assert "spin" not in said
    monkeypatch.setenv(ALLOW_LIST, "spin, orpoo,")
    assert left_out_notes()[1].startswith(f"{ALLOW_LIST} names orpoo; installed: ")
    assert main(["plugins", "list"]) == 0
    assert f"{ALLOW_LIST} names orpoo; installed: " in " ".join(capsys.readouterr().out.split())


def test_plugin_that_is_not_allowed_is_not_imported(site: PluginSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("third-party", "raise RuntimeError('imported')")
    monkeypatch.setenv(ALLOW_LIST, "other")
    assert load(site)[1] == {}


def test_built_in_plugins_come_by_the_same_way() -> None:
    registry = registry_with()
    assert [info.name for info in registry.plugins] == ["builtin", "commands", *BUNDLED_PLUGINS]
    assert {name for info in registry.plugins for name in info.hooks} <= set(hookspecs.hook_names())
    for kind, name in (("stage", "dpo"), ("model", "llama"), ("device", "cpu"), ("command", "run")):
        assert registry.owner(kind, name).distribution == BUILTIN


def test_own_plugins_pass_the_checks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_PLUGINS, "1")
    registry = load_plugins()
    for name in BUNDLED_PLUGINS:
        module = importlib.import_module(f"llmsuite.plugins.{name}")
        registry.add(PluginInfo(name, "package 1.0", module.__name__, plugin=module))
        assert registry.plugins[-1].error is None
        assert registry.plugins[-1].provides


def test_specs_of_llmsuite_are_made_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_LIST, "")
    registry = load_plugins(complete=False)
    assert all(not info.provides for info in registry.plugins)
    assert "dpo" in registry.stages
    provided = [thing for info in registry.plugins for thing in info.provides]
    assert {thing.partition(" ")[0] for thing in provided} == {"stage"}
    registry.complete()
    complete = load_plugins()
    for kind in REGISTRATIONS:
        assert list(registry.specs(kind)) == list(complete.specs(kind))


def test_a_name_of_llmsuite_is_taken_before_its_spec_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plugin:
        @llmsuite.hookimpl
        def llmsuite_register_loggers(self) -> list[LoggerSpec]:
            return [LoggerSpec(name="tensorboard", help="", factory=lambda run_dir: NotImplemented)]

    monkeypatch.setenv(ALLOW_LIST, "")
    registry = load_plugins(complete=False)
    registry.add(PluginInfo("late", "late-package 1.0", "late", plugin=Plugin()))
    assert "a plugin cannot replace a built-in name" in str(registry.plugins[-1].error)


def test_specs_of_every_kind_reach_the_registry() -> None:
    class Plugin:
        @llmsuite.hookimpl
        def llmsuite_register_loggers(self) -> list[LoggerSpec]:
            return [LoggerSpec(name="mine", help="", factory=lambda run_dir: NotImplemented)]

        @llmsuite.hookimpl
        def llmsuite_register_stages(self) -> list[StageSpec]:
            return [StageSpec(name="mine", help="", config_cls=Section, factory=lambda: object)]

    registry = registry_with(plugin=Plugin())
    assert registry.plugins[-1].provides == ["stage mine", "logger mine"]
    assert registry.loggers["mine"] is registry.specs("logger")["mine"]
