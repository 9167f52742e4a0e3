"""Lists of stages, recipes, keys and plugins on the command line, and commands of plugins."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.resources import bundled
from llmsuite.cli.main import main
from llmsuite.contract.registry import ALLOW_LIST, BUNDLED_PLUGINS, NO_PLUGINS, Registry
from llmsuite.contract.schema.keys import walk
from llmsuite.devices.vendors import VENDORS
from llmsuite.recipe.recipe_class import recipe_type
from tests.conftest import STAGE_PLUGIN, STAGES, PluginSite

Run = Callable[..., tuple[int, str, str]]

COMMAND_PLUGIN = """
import llmsuite
from llmsuite.contract.hookspecs import Command

def add_arguments(parser):
    parser.add_argument("who", type=str)
    parser.add_argument("--loud", action="store_true")

def run(args, registry):
    print("hello", args.who, args.loud, args.overrides, sorted(registry.stages))
    return 7

@llmsuite.hookimpl
def llmsuite_register_commands():
    return [Command(name="hello", help="says it", add_arguments=add_arguments, run=run, takes_overrides=True)]
"""


@pytest.fixture
def run_with_plugins(capsys: pytest.CaptureFixture[str], site: PluginSite) -> Run:
    """Runs a command in this process, with the packages of this test; returns exit code, stdout and stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        try:
            code: Any = main(words)
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def run(run_with_plugins: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv(ALLOW_LIST, "")
    return run_with_plugins


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("stages", "stage"),
        ("models", "model"),
        ("devices", "device"),
        ("formats", "data format"),
        ("loggers", "logger"),
        ("layouts", "exporter"),
    ],
)
def test_a_list_has_a_row_for_each_name(run: Run, registry: Registry, what: str, kind: str) -> None:
    code, out, err = run("list", what)
    assert (code, err) == (0, "")
    rows = [line.split("  ") for line in out.splitlines()]
    vendors = [vendor.name for vendor in VENDORS] if what == "devices" else []
    assert [row[0].strip() for row in rows] == [*registry.specs(kind), *vendors]
    owners = {row[-1].strip() for row in rows}
    assert "llmsuite (built in)" in owners
    assert owners <= {"llmsuite (built in)", "llmsuite (bundled)"}
    for row, spec in zip(rows, registry.specs(kind).values()):
        assert spec.help in [part.strip() for part in row]


def test_list_recipes(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, out, _ = run("list", "recipes")
    root = bundled("recipes")
    names = [line.split()[0] for line in out.splitlines()]
    assert names == [f"recipes/{path.relative_to(root)}" for path in sorted(root.glob("*/*.json"))]
    assert "recipes/llama/dpo.json  " in out
    assert "dpo of meta-llama/Llama-3.1-8B-Instruct " in out
    assert "  2048 x gpu  DeepSeek-V3, arXiv 2412.19437, " in out  # devices, and where the numbers are from


def test_list_keys(run: Run, registry: Registry) -> None:
    code, out, _ = run("list", "keys", "--stage", "dpo")
    assert code == 0
    cls, _ = recipe_type({"stage": "dpo", "model": {"family": "llama"}}, registry)
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == [info.dotted for info in walk(cls)]
    for line, info in zip(lines, walk(cls)):
        assert f"  {info.type_text}  " in line
        assert info.doc in line
    by_key = {line.split()[0]: line for line in lines}
    assert by_key["train.learning_rate"].endswith("Peak learning rate. [required]")
    assert by_key["dpo.loss"].endswith('[default "sigmoid"]')
    assert by_key["dpo.loss"].split(maxsplit=1)[1].startswith("one of: sigmoid, ipo, ipo_mean, hinge")
    assert by_key["model.config.hidden_size"].endswith("Width of the residual stream.")
    assert "dpo." not in run("list", "keys")[1]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--stage", "dppo", "stage: no stage is called 'dppo'"), ("--family", "lama", "model.family: no model is called")],
)
def test_list_keys_of_something_unknown(run: Run, option: str, value: str, message: str) -> None:
    code, out, err = run("list", "keys", option, value)
    assert (code, out) == (2, "")
    assert err.startswith(message)


def test_plugins_list_and_info(run: Run, registry: Registry) -> None:
    code, out, _ = run("plugins", "list")
    assert code == 0
    assert [line.split("  ")[:3] for line in out.splitlines() if not line.startswith(" ")] == [
        ["builtin", "llmsuite (built in)", "ok"],
        ["commands", "llmsuite (built in)", "ok"],
        *([name, "llmsuite (bundled)", "ok"] for name in BUNDLED_PLUGINS),
    ]
    assert max(map(len, out.splitlines())) <= 100
    assert f"ok  {len(registry.stages)} stages, {len(registry.models)} models, " in out
    stages = (
        "stage pretrain, stage sft, stage lora, stage gkd, stage dpo, stage rm, stage kto, stage grpo, stage online_dpo"
    )
    stages += ", stage ppo, stage infer"
    models = "model llama, model mixtral, model qwen, model qwen_moe, model qwen_hybrid, model qwen_hybrid_moe"
    models += ", model ernie, model gemma, model phi"
    models += ", model granite, model smollm3, model olmo, model seed_oss, model hunyuan, model glm, model cohere"
    models += ", model starcoder, model internlm, model ministral, model granite_moe, model minimax, model gpt_oss"
    models += ", model glm_moe, model ernie_moe, model gpt, model deepseek"
    code, out, _ = run("plugins", "info", "builtin")
    assert code == 0
    assert "entry point   llmsuite.builtin\n" in out
    assert f"provides      {stages}, {models}, device cpu" in out
    assert "llmsuite_register_stages" in out
    assert out.endswith("status        ok\n")
    names = ", ".join(["builtin", "commands", *BUNDLED_PLUGINS])
    assert run("plugins", "info", "x") == (2, "", f"no plugin is called 'x'; there are: {names}\n")
    assert run("plugins", "info") == (2, "", f"plugins info: name one of {names}\n")


def test_third_party_stage(run_with_plugins: Run, site: PluginSite, write_recipe: Callable[..., Path]) -> None:
    site.install("third-party")
    path = str(write_recipe({"stage": "spin", "spin": {"beta": 0.2}}))
    assert re.search("^spin +a third party's stage ", run_with_plugins("list", "stages")[1], re.MULTILINE)
    assert "third-party 1.0\n" in run_with_plugins("list", "stages")[1]
    assert "third_party  third-party 1.0  ok  stage spin\n" in run_with_plugins("plugins", "list")[1]
    assert run_with_plugins("validate", path)[0] == 0
    assert "spin.beta" in run_with_plugins("list", "keys", "--stage", "spin")[1]
    assert "beta" in json.loads(run_with_plugins("schema", "--stage", "spin")[1])["$defs"]["spin"]["properties"]


def test_no_plugins(
    run_with_plugins: Run, site: PluginSite, write_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("third-party")
    monkeypatch.setenv(ALLOW_LIST, "third_party")
    path = str(write_recipe({"stage": "spin"}))
    assert run_with_plugins("validate", path)[0] == 0
    for words in (["--no-plugins", "validate", path], ["validate", path, "--no-plugins"]):
        monkeypatch.delenv(NO_PLUGINS, raising=False)
        code, out, err = run_with_plugins(*words)
        assert (code, out) == (2, "")
        registered = ", ".join(STAGES)
        assert f"stage: no stage is called 'spin'; registered: {registered}. --no-plugins leaves out all plugins" in err


def test_broken_plugin(run_with_plugins: Run, site: PluginSite, write_recipe: Callable[..., Path]) -> None:
    site.install("broken-package", "raise RuntimeError('no licence')")
    code, out, err = run_with_plugins("plugins", "list")
    assert (code, err) == (0, "")
    assert "broken_package  broken-package 1.0  broken\n" in out
    assert "    RuntimeError: no licence\n" in out
    assert "RuntimeError: no licence" in run_with_plugins("plugins", "info", "broken_package")[1]
    assert run_with_plugins("validate", str(write_recipe()))[0] == 0
    code, _, err = run_with_plugins("validate", str(write_recipe({"stage": "spin"})))
    assert code == 2
    assert "It may be in a plugin that failed to load: broken_package (RuntimeError: no licence)" in err


def test_two_plugins_of_one_name(run_with_plugins: Run, site: PluginSite) -> None:
    site.install("first-package", entry_points="same = {module}")
    site.install("second-package", STAGE_PLUGIN.replace('"spin"', '"orpo"'), "same = {module}")
    out = run_with_plugins("plugins", "info", "same")[1]
    assert "distribution  first-package 1.0\n" in out
    assert "distribution  second-package 1.0\n" in out


def test_third_party_command(run_with_plugins: Run, site: PluginSite) -> None:
    site.install("third-party", COMMAND_PLUGIN)
    code, out, _ = run_with_plugins("hello", "you", "--loud", "--seed=1", "--a.b", "c")
    assert code == 7
    assert out.startswith("hello you True ['--seed=1', '--a.b=c'] ['dpo'")
    assert "says it" in run_with_plugins("--help")[1]
    code, out, err = run_with_plugins("hello", "you", "--lod")
    assert (code, out, err) == (2, "", "--lod: this command has no such option; did you mean --loud?\n")


def test_command_that_cannot_be_set_up_breaks_no_other(run_with_plugins: Run, site: PluginSite) -> None:
    site.install("third-party", COMMAND_PLUGIN.replace("parser.add_argument", "parser.no_such_method", 1))
    assert run_with_plugins("list", "stages")[0] == 0
    assert "hello" not in run_with_plugins("--help")[1]
    code, out, err = run_with_plugins("hello", "you")
    assert (code, out) == (2, "")
    assert err.startswith("command 'hello' of third-party 1.0 does not work: ")
    assert "third_party  third-party 1.0  broken" in run_with_plugins("plugins", "list")[1]


def test_interrupted_command(run_with_plugins: Run, site: PluginSite) -> None:
    site.install("third-party", COMMAND_PLUGIN.replace("return 7", "raise KeyboardInterrupt"))
    code, _, err = run_with_plugins("hello", "you")
    assert (code, err) == (130, "")


def test_help_has_no_types_of_python(run: Run, registry: Registry) -> None:
    for command in registry.commands:
        code, out, _ = run(command, "--help")
        assert code == 0
        assert not re.search(r"type:|null|Literal\[|default: (None|False)", out), command
    assert "(default: 8000)" in run("serve", "--help")[1]
