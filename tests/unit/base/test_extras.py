"""Hints at packages that are missing work before and after a release."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with the tools that read pyproject.toml

import pytest
from packaging.requirements import Requirement

from llmsuite.base.extras import install_command
from llmsuite.devices.cpu import CpuBackend
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def built(extra: str) -> list[str]:
    """The requirements of an extra as the metadata of a wheel has them."""
    parted = [(Requirement(text), text.partition(";")[0]) for text in PROJECT["optional-dependencies"][extra]]
    return [
        f'{package}; ({wanted.marker}) and extra == "{extra}"' if wanted.marker else f'{package}; extra == "{extra}"'
        for wanted, package in parted
    ]


def wanted_here(extra: str) -> list[Requirement]:
    """The packages of an extra for this version of Python."""
    parted = [(Requirement(text), text.partition(";")[0]) for text in PROJECT["optional-dependencies"][extra]]
    return [Requirement(package) for wanted, package in parted if not wanted.marker or wanted.marker.evaluate()]


@pytest.mark.parametrize(
    "extra", ["serve", "eval", "gguf", "ms", "math", "verifiers", "plot", "pandas", "cpu", "paddlenlp"]
)
def test_the_packages_of_an_extra_are_named(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every = ["numpy<2,>=1.26", *built("serve"), *(built(extra) if extra != "serve" else [])]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: every if name == "llmsuite" else None)
    pip, install, *packages = shlex.split(install_command(extra))
    assert (pip, install) == ("pip", "install")
    assert [Requirement(package) for package in packages] == wanted_here(extra)


def test_a_package_of_other_versions_of_python_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["a[b]<2; extra == 'x'", "old; python_version < '3' and extra == 'x'", "always>=1"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    assert install_command("x") == "pip install 'a[b]<2'"


def test_a_package_comes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: built("cpu"))
    (scipy,) = (text for text in PROJECT["optional-dependencies"]["cpu"] if text.startswith("scipy"))
    pip, install, option, package = shlex.split(install_command("cpu", alone="scipy"))
    assert (pip, install, option, Requirement(package)) == ("pip", "install", "--no-deps", Requirement(scipy))


def test_a_clone_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert install_command("serve") == "pip install -e '.[serve]'"


def test_no_message_asks_an_index_for_llmsuite() -> None:
    """The package is on no index before a release."""
    pattern = re.compile(r"pip install[^\n]*llmsuite\[")
    found = [path for path in (ROOT / "llmsuite").rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_the_paddle_of_the_cpu_is_the_tested_one() -> None:
    assert CpuBackend.install.removeprefix("pip install ") in PROJECT["optional-dependencies"]["cpu"]
