"""`llmsuite plugins new`: names that are refused, and complete packages. tests/multi installs and tests them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from llmsuite.base.errors import UserError
from llmsuite.base.locks import LOCK
from llmsuite.cli.main import main
from llmsuite.cli.new_plugin import KINDS, write_plugin
from llmsuite.contract.registry import Registry
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "next_token_stage"


@pytest.mark.parametrize("name", ["My", "a-b", "1a", "a__b", "_a", "a_", "class", "", "ä", "a" * 41, "../a"])
def test_names_that_are_none_are_refused(name: str, tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(UserError, match=r"is no name for a plugin; use lowercase letters.*such as my_reward$"):
        write_plugin(name, "reward", tmp_path / "new", registry)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("kind", "name"), [("stage", "sft"), ("reward", "exact"), ("family", "llama")])
def test_names_that_exist_are_refused(kind: str, name: str, tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(UserError, match=f"there is a {kind} '{name}' already; choose another name"):
        write_plugin(name, kind, tmp_path / "new", registry)  # type: ignore[arg-type]


def test_a_directory_that_exists_is_left_alone(tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(UserError, match="exists; name another directory with -o"):
        write_plugin("brief", "reward", tmp_path, registry)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("written", [0, 1, 3])
def test_an_interrupt_leaves_nothing(
    written: int, tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = Path.write_text
    seen: list[Path] = []

    def interrupted(path: Path, text: str, encoding: str) -> int:
        if len(seen) == written:
            raise KeyboardInterrupt
        seen.append(path)
        return write_text(path, text, encoding=encoding)

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_plugin("brief", "reward", tmp_path / "new", registry)
    assert list(tmp_path.iterdir()) == []
    assert len(seen) == written


def test_what_a_killed_command_has_left_is_not_in_the_package(tmp_path: Path, registry: Registry) -> None:
    unfinished = tmp_path / "new.tmp"
    (unfinished / "llmsuite_other").mkdir(parents=True)
    (unfinished / LOCK).touch()
    directory = tmp_path / "new"
    written = write_plugin("brief", "reward", directory, registry)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert sorted(written) == sorted(path.relative_to(directory) for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", KINDS)
def test_the_package_is_complete(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "new"
    assert main(["plugins", "new", "two_words", f"--kind={kind}", "-o", str(directory)]) == 0
    files = {
        str(path.relative_to(directory)): path.read_text("utf-8") for path in directory.rglob("*") if path.is_file()
    }
    assert capsys.readouterr().out.count("wrote ") == len(files)
    assert {"pyproject.toml", "README.md", "llmsuite_two_words/__init__.py", "tests/test_contract.py"} <= files.keys()
    for name, text in files.items():
        assert not re.search(r"\{\{|\}\}\w|\{%", text.replace('{"functions": {', "")), (
            f"{name}: a place was not filled in"
        )
        assert max(map(len, text.splitlines())) <= 120, name
        if name.endswith(".py"):
            assert ast.get_docstring(ast.parse(text, name)), name
    assert "import paddle" not in files["llmsuite_two_words/__init__.py"]


def test_the_example_is_what_the_command_writes(tmp_path: Path, registry: Registry) -> None:
    """One text for both: change the templates, and write the example again."""
    directory = tmp_path / "new"
    for path in write_plugin("next_token", "stage", directory, registry):
        assert (EXAMPLE / path).read_text("utf-8") == (directory / path).read_text("utf-8"), path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new"], "plugins new: give a name; --kind is one of stage, reward, family\n"),
        (["list", "--kind=stage"], "plugins list: --kind and -o are options of plugins new\n"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", *words]) == 2
    assert capsys.readouterr().err == message
