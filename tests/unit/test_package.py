"""The wheel and the sdist of a release have what the package reads, and the wheel works away from the checkout."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.version import Version

from llmsuite import __version__
from tests.support.paths import ROOT

PACKED = "llmsuite/_bundled"
"""Where the wheel has what lies beside the package in a checkout."""


def tracked(*directories: str) -> set[str]:
    """The files of the checkout that git knows, or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *directories]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return {name for name in listed.stdout.decode("utf-8").split("\0") if (ROOT / name).is_file()}


def in_wheel(names: Iterable[str]) -> set[str]:
    """The names that files of the checkout have in a wheel."""
    return {name if name.startswith("llmsuite/") else f"{PACKED}/{name}" for name in names}


def build(directory: Path, source: Path, *kinds: str) -> None:
    """Build distributions, by the build backend alone, which `pip install` and `python -m build` call too."""
    command = [sys.executable, "-m", "hatchling", "build", *kinds, "-d", str(directory)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def checksums(wheel: Path) -> dict[str, int]:
    """The files of a wheel, but the list of them, whose order is free."""
    with zipfile.ZipFile(wheel) as file:
        return {info.filename: info.CRC for info in file.infolist() if not info.filename.endswith("/RECORD")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a wheel and an sdist of the checkout."""
    directory = tmp_path_factory.mktemp("dist")
    build(directory, ROOT)
    return directory


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the content of the wheel, as an installation has it."""
    directory = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(directory)
    return directory


def test_the_wheel_has_every_file_and_no_other(wheel: Path) -> None:
    names = {name for name in checksums(wheel) if ".dist-info/" not in name}
    assert names == in_wheel(tracked("llmsuite", "recipes", "data")) | {f"{PACKED}/commit"}


def test_the_sdist_makes_the_same_wheel(built: Path, wheel: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    build(tmp_path / "again", source, "-t", "wheel")
    assert checksums(tmp_path / "again" / wheel.name) == checksums(wheel)


def test_the_metadata_is_what_an_index_accepts(site: Path) -> None:
    (directory,) = site.glob("*.dist-info")
    metadata = Metadata.from_email((directory / "METADATA").read_bytes(), validate=True)
    assert metadata.version == Version(__version__)
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text(encoding="utf-8")
    assert (directory / "licenses" / "LICENSE").read_text("utf-8") == (ROOT / "LICENSE").read_text("utf-8")


def test_the_wheel_works_away_from_the_checkout(site: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "llmsuite", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    commit = (site / PACKED / "commit").read_text().strip()
    paddle = importlib.metadata.version("paddlepaddle")
    assert run("--version") == f"llmsuite {__version__}, commit {commit}, Paddle {paddle} (paddlepaddle)\n"
    run("plugins", "new", "brief", "--kind=reward")
    one_rank = ["--launch.num_devices=1", "--parallel={}", "--train.max_steps=2", "--output_dir=first"]
    run("run", "recipes/llama/sft.json", "--smoke", *one_rank)
    run("report", "first")
    assert json.loads((tmp_path / "first" / "recipe.json").read_text())["data"]["train"] == "data/sft/train.jsonl"
    assert {path.name for path in tmp_path.iterdir()} == {"first", "llmsuite-brief"}
    assert (tmp_path / "first" / "report.html").is_file()


def test_a_release_is_named_alike_everywhere() -> None:
    """`__version__` is the only place of the version; the pages for people follow it."""
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest, *_ = re.findall(r"^## \[(\d\S*)\] - \d{4}-\d\d-\d\d$", log, re.MULTILINE)
    version = Version(__version__)
    if version.is_devrelease:
        assert f"## [Unreleased]\n\nWhat will be {version.base_version}." in log
        assert Version(newest) < version
    else:
        assert newest == __version__
    series = ".".join(newest.split(".")[:2])
    assert f"Fixes go to the newest release ({series}.x)" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
