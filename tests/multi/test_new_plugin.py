"""Packages that `llmsuite plugins new` writes are installed by pip, and their own tests pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmsuite.cli.new_plugin import write_plugin
from llmsuite.contract.registry import Registry
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    "kind",
    ["reward", pytest.param("stage", marks=pytest.mark.further), pytest.param("family", marks=pytest.mark.further)],
)
def test_a_new_package_installs_and_passes_its_tests(kind: str, tmp_path: Path, registry: Registry) -> None:
    package = tmp_path / "package"
    write_plugin("brand_new", kind, package, registry)  # type: ignore[arg-type]
    site = tmp_path / "site"
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    install = [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", str(site), "-e", str(package)]
    subprocess.run(install, check=True)
    # an editable install in a directory of its own leaves the code where it is: its directory is on the path too
    path = os.pathsep.join([str(site), str(package), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "LLMSUITE_PLUGINS": "brand_new"}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert f"brand_new  llmsuite-brand-new 0.1.0  ok  {'model' if kind == 'family' else kind} brand_new" in run(
        "llmsuite", "plugins", "list"
    )
    assert "1 passed" in run("pytest", "-q", "-p", "no:cacheprovider", "tests")
