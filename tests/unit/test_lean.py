"""Packages that may be missing: no command fails because of a package that it does not use."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmsuite.adapters.paddlenlp_peft import import_alone
from llmsuite.base.errors import UserError
from llmsuite.base.extras import install_command
from llmsuite.data.token_cache import encode_cached
from llmsuite.data.tokenizer import TextTokenizer
from tests.support.house import house
from tests.support.paths import DATA, ROOT
from tests.support.toml import tomllib

NAMES = {"pyyaml": "yaml", "paddlepaddle": "paddle"}
"""Packages whose module is called otherwise."""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
(PINNED,) = (text for text in EXTRAS["paddlenlp"] if text.startswith("paddlenlp=="))
"""PaddleNLP in the version whose adapters are tested."""
OF_THEIR_OWN = {
    "llmsuite.serving": {"fastapi", "uvicorn", "prometheus_client"},
    "llmsuite.inference.harness": {"lm_eval"},
    "llmsuite.rl.verifiers_environment": {"verifiers"},
    "llmsuite.base.hub.limited": {"urllib3"},  # huggingface_hub before version 1 needs it
}
"""Modules that are imported when somebody asks for what they do, and what they need."""


def needed() -> set[str]:
    """Modules of the packages that every installation has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["cpu"]]
    names = [re.match(r"[\w.-]+", text)[0].lower() for text in texts]  # type: ignore[index]
    return {NAMES.get(name, name.replace("-", "_")) for name in names}


def imported(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """First words of the modules that a file imports, and whether that is done in a function or for types only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0], inside
        later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        )
        yield from imported(node, inside or later)


def test_modules_import_what_every_installation_has() -> None:
    known = needed() | {"llmsuite"} | set(sys.stdlib_module_names)
    found = {
        (name, module)
        for name, tree in house().items()
        for module, later in imported(tree)
        if not later and module not in known
    }
    allowed = {
        (name, module)
        for name, module in found
        for own, modules in OF_THEIR_OWN.items()
        if name.startswith(own) and module in modules
    }
    assert found - allowed == set()
    assert {module for _, module in allowed} == set().union(*OF_THEIR_OWN.values())


def test_paddlenlp_is_imported_in_two_places() -> None:
    places = {name for name, tree in house().items() if "paddlenlp" in {module for module, _ in imported(tree)}}
    assert places == {"llmsuite.data.tokenizer", "llmsuite.data.tokenizer_probe"}


@pytest.fixture
def without_paddlenlp(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name == "paddlenlp":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    for name in [name for name in sys.modules if name.partition(".")[0] == "paddlenlp"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "paddlenlp", None)


@pytest.mark.usefixtures("without_paddlenlp")
def test_rows_are_tokenised_without_paddlenlp(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(DATA / "tokenizer")
    assert encode_cached(["ab"], tokenizer, tmp_path) == tokenizer.encode_batch(["ab"])


@pytest.mark.usefixtures("without_paddlenlp")
def test_what_paddlenlp_reads_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}')
    with pytest.raises(
        UserError,
        match=r"has no tokenizer\.json, and what it has is read by paddlenlp, which is not installed with all",
    ):
        TextTokenizer(tmp_path)


@pytest.mark.usefixtures("without_paddlenlp")
def test_adapters_say_what_they_need() -> None:
    with pytest.raises(UserError, match=r"lora\.rank: adapters are layers of paddlenlp, which is not installed"):
        import_alone("paddlenlp.peft.lora.lora_layers")


def test_the_command_for_adapters_leaves_out_what_paddlenlp_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    built = [f'{text.partition(";")[0]}; extra == "{extra}"' for extra, texts in EXTRAS.items() for text in texts]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: built)
    command = install_command("paddlenlp", alone="paddlenlp")
    assert command == f"pip install --no-deps {PINNED}"


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "README.zh.md", *(ROOT / "docs" / "guide").glob("*.md"),
    *(ROOT / "docs" / "zh" / "guide").glob("*.md"), *(ROOT / "docker").glob("*.Dockerfile"), ROOT / "CHANGELOG.md"],
    ids=lambda path: path.name)  # fmt: skip
def test_pages_name_the_version_of_paddlenlp_that_is_tested(path: Path) -> None:
    named = re.findall(r"--no-deps (paddlenlp\S*[\w])", path.read_text(encoding="utf-8"))
    assert set(named) <= {PINNED}


def test_adapters_say_which_package_their_layers_lack(tmp_path: Path) -> None:
    package = tmp_path / "paddlenlp"
    (package / "peft").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "peft" / "in_vain.py").write_text("import a_package_that_nobody_has\n")
    code = "from llmsuite.adapters.paddlenlp_peft import import_alone; import_alone('paddlenlp.peft.in_vain')"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "which need the package a_package_that_nobody_has; install it with: pip install" in process.stderr
