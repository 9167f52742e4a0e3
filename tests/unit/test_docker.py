"""docker/*.Dockerfile: their instructions, and what they take from here. No image is built: that takes an engine."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.devices.gpu import GpuBackend
from llmsuite.devices.xpu import XpuBackend
from tests.support.paths import ROOT
from tests.support.toml import tomllib

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
KNOWN = {"FROM", "ARG", "RUN", "COPY", "WORKDIR", "ENV", "EXPOSE", "ENTRYPOINT", "CMD"}
"""The instructions that are used here, of https://docs.docker.com/reference/dockerfile/."""


def instructions(path: Path) -> list[tuple[str, str]]:
    """Names and arguments, with comments left out and lines that go on joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    lines = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
    return [(name, argument) for name, argument in lines]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_instructions_are_well_formed(path: Path, registry: Registry) -> None:
    found = instructions(path)
    assert {name for name, _ in found} <= KNOWN
    assert next(name for name, _ in found if name != "ARG") == "FROM"
    start = {name: json.loads(argument) for name, argument in found if name in ("ENTRYPOINT", "CMD")}
    assert start["ENTRYPOINT"] == ["llmsuite"]
    assert start["CMD"][0] in registry.commands
    for name, argument in found:
        if name == "RUN":
            shlex.split(argument)  # quotes that do not end raise


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_enough(path: Path) -> None:
    sources = [word for name, argument in instructions(path) if name == "COPY" for word in argument.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == set(sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {project["project"]["readme"], *wheel["packages"], *wheel["force-include"]} <= set(sources)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_extras_exist_and_fit_the_device(path: Path) -> None:
    device = path.name.partition(".")[0]
    (extras,) = re.findall(r"/opt/llmsuite\[([\w,-]+)\]", path.read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert {"cpu", "gpu", "xpu"} & set(extras.split(",")) == {device}
    assert ["doctor"] + (["--device", device] if device != "cpu" else []) == json.loads(dict(instructions(path))["CMD"])


@pytest.mark.parametrize(("name", "backend"), [("gpu", GpuBackend), ("xpu", XpuBackend)])
def test_wheels_come_from_the_index_that_is_named_elsewhere(name: str, backend: type) -> None:
    (index,) = re.findall(r"--extra-index-url (\S+)", (ROOT / "docker" / f"{name}.Dockerfile").read_text("utf-8"))
    source = (ROOT / "llmsuite" / "devices" / f"{name}.py").read_text(encoding="utf-8")
    assert f"-i {index}" in source
    assert backend().name == name
