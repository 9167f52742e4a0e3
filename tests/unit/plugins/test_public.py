"""The plugins that come with llmsuite use only what every author of plugins may use, and the core uses none of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from llmsuite.cli.main import main
from llmsuite.contract.registry import ALLOW_LIST, BUNDLED, BUNDLED_PLUGINS, NO_PLUGINS, load_plugins
from tests.support.house import Trees, house, parse
from tests.support.paths import ROOT

GUIDE = ROOT / "docs" / "guide" / "plugins.md"
CONTRACT = ROOT / "docs" / "guide" / "plugin-contract.md"
PLUGINS = "llmsuite.plugins"
LOADER = "llmsuite.contract.registry"
"""The only module of the core that names the plugins."""


def guide() -> str:
    return CONTRACT.read_text(encoding="utf-8").partition("## What a plugin may import\n")[2]


def public_packages() -> set[str]:
    """Packages all of whose modules a plugin may import, as the guide names them."""
    sentence = guide().strip().partition(", and the names")[0]
    return set(re.findall(r"`(llmsuite[\w.]*)`", sentence)) - {"llmsuite"}


def public_names() -> dict[str, set[str]]:
    """Names that a plugin may import besides, by module, as the guide lists them."""
    rows = re.findall(r"^\| `(llmsuite[\w.]*)` \| ([^|]*) \|", guide(), re.MULTILINE)
    return {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows}


def imported(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Each import of a module: the module, the name imported from it or "", and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((module, alias.name, node.lineno) for alias in node.names)


def not_public(trees: Trees, own: str) -> list[str]:
    """Imports that a plugin may not make.

    Args:
        trees: modules of the plugin.
        own: name of its package, which it may import.
    """
    packages = {own, *public_packages()}
    names = public_names()
    exported = set(re.findall(r'"(\w+)"', (ROOT / "llmsuite" / "__init__.pyi").read_text(encoding="utf-8")))
    found = []
    for place, tree in trees.items():
        for module, name, line in imported(tree):
            whole = f"{module}.{name}"
            is_ours = module.split(".")[0] == "llmsuite" or module.startswith(".")
            is_public = any(f"{whole}.".startswith(f"{package}.") for package in packages)
            is_exported = module == "llmsuite" and (name in exported or not name)
            if is_ours and not is_public and not is_exported and name not in names.get(module, ()):
                found.append(f"{place}:{line} imports {name or 'all'} of {module}")
    return found


def uses_of_plugins(trees: Trees) -> list[str]:
    """Places in the core that import or name a bundled plugin."""
    found = []
    for place, tree in trees.items():
        if place.startswith(PLUGINS):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = PLUGINS in node.value
            else:
                named = isinstance(node, (ast.Import, ast.ImportFrom)) and PLUGINS in ast.unparse(node)
            if named and place != LOADER:
                found.append(f"{place}:{node.lineno}")  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("name", BUNDLED_PLUGINS)
def test_bundled_plugin_imports_what_is_public(name: str) -> None:
    package = f"{PLUGINS}.{name}"
    trees = {place: tree for place, tree in house().items() if f"{place}.".startswith(f"{package}.")}
    assert trees
    assert not_public(trees, package) == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").iterdir()), ids=lambda path: path.name)
def test_example_imports_what_is_public(path: Path) -> None:
    trees = parse(path)
    assert trees
    assert not_public(trees, path.name) == []


def test_core_knows_no_bundled_plugin() -> None:
    assert uses_of_plugins(house()) == []


def test_every_bundled_plugin_is_loaded() -> None:
    assert sorted(BUNDLED_PLUGINS) == sorted(
        path.parent.name for path in (ROOT / "llmsuite/plugins").glob("*/__init__.py")
    )
    plugins = [info for info in load_plugins().plugins if info.distribution == BUNDLED]
    assert {info.name: info.error for info in plugins} == dict.fromkeys(BUNDLED_PLUGINS)
    assert all(info.provides for info in plugins)


def test_the_allow_list_is_about_installed_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_LIST, "")
    assert [info.distribution for info in load_plugins().plugins[2:]] == [BUNDLED] * len(BUNDLED_PLUGINS)


def test_every_bundled_plugin_is_in_the_guide() -> None:
    section = (
        GUIDE.read_text(encoding="utf-8").partition("## Plugins that come with llmsuite\n")[2].partition("\n## ")[0]
    )
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(BUNDLED_PLUGINS)


def test_public_names_exist() -> None:
    trees = house()
    for module, names in public_names().items():
        defined = {name for node in trees[module].body for name in _defined(node)}
        assert names <= defined, module
    assert all(package in trees for package in public_packages())


def _defined(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module defines, or imports for those who import the module."""
    if isinstance(node, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


CROOKED: Mapping[str, str] = {
    "from llmsuite.engine.trainer import Trainer": "imports Trainer of llmsuite.engine.trainer",
    "from llmsuite.engine.stage import Stage, Context": "imports Context of llmsuite.engine.stage",
    "import llmsuite.engine.stage": "imports all of llmsuite.engine.stage",
    "from llmsuite import builtin": "imports builtin of llmsuite",
    "from llmsuite.plugins.other import thing": "imports thing of llmsuite.plugins.other",
    "def late():\n    from ..other import thing": "imports thing of ..other",
}


@pytest.mark.parametrize("code", CROOKED)
def test_import_that_is_not_public_is_found(code: str) -> None:
    (found,) = not_public({"mine": ast.parse(code)}, "llmsuite.plugins.mine")
    assert found.endswith(CROOKED[code])


def test_import_of_a_bundled_plugin_is_found() -> None:
    codes = {
        "llmsuite.cli.a": "def f():\n    from llmsuite.plugins.studio import server",
        "llmsuite.cli.b": "import importlib\nimportlib.import_module('llmsuite.plugins.studio')",
        "llmsuite.plugins.studio.c": "import llmsuite.plugins.studio.server",
        LOADER: "PACKAGE = 'llmsuite.plugins'",
    }
    trees = {name: ast.parse(code) for name, code in codes.items()}
    assert uses_of_plugins(trees) == ["llmsuite.cli.a:2", "llmsuite.cli.b:2"]


def test_no_plugins_names_the_plugin_that_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(NO_PLUGINS, "1")
    registry = load_plugins()
    assert {info.name for info in registry.plugins} == {"builtin", "commands"}
    assert main(["studio"]) == 2
    assert capsys.readouterr().err == "command 'studio' is in the plugin studio, which --no-plugins leaves out\n"
    assert main(["studioo"]) == 2
    assert capsys.readouterr().err.endswith(". --no-plugins leaves out all plugins\n")
    assert main(["plugins", "list"]) == 0
    assert "--no-plugins leaves out: " + ", ".join(BUNDLED_PLUGINS) in " ".join(capsys.readouterr().out.split())


def test_no_plugin_takes_the_name_of_a_bundled_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my_studio.py"
    path.write_text(
        "import llmsuite\nfrom llmsuite.contract.hookspecs import Command\n\n@llmsuite.hookimpl\n"
        "def llmsuite_register_commands():\n"
        "    return [Command(name='studio', help='mine', add_arguments=print, run=lambda args, registry: 0)]\n"
    )
    assert main(["--plugin", str(path), "plugins", "list"]) == 2
    assert "a plugin cannot replace a built-in name" in capsys.readouterr().err
    assert main(["--no-plugins", "--plugin", str(path), "studio"]) == 0
