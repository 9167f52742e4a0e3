"""The plugin of docs/guide/auto-parallel.md, as the page has it, and how its runs are compared."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multi.conftest import Runner
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "guide" / "auto-parallel.md").read_text("utf-8")
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
(RECIPE,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


LIMIT = 1e-6


class Page:
    """A directory with the files of the page."""

    def __init__(self, directory: Path, runner: Runner):
        self.directory = directory
        self.runner = runner
        for name, text in FILES.items():
            (directory / name).write_text(f"# {name}\n{text}")
        subprocess.run([sys.executable, "make_vectors.py"], cwd=directory, check=True)
        recipe = json.loads(RECIPE)
        for key in ("train", "eval"):
            recipe["data"][key] = str(directory / recipe["data"][key])
        self.recipe = directory / "mlp.json"
        self.recipe.write_text(json.dumps(recipe))

    def plugin(self, name: str, **meshes: Any) -> Path:
        """The plugin with other meshes, by the number of processes as a word."""
        text = FILES["annotated_mlp.py"]
        path = self.directory / f"{name}.py"
        for count, ranks in meshes.items():
            text = re.sub(rf"^    {count[1:]}: .*$", f"    {count[1:]}: {ranks!r},", text, flags=re.MULTILINE)
        path.write_text(text)
        return path

    def run(self, name: str, plugin: Path, *words: str, expect: int = 0) -> str:
        return self.runner.run(
            "run", str(self.recipe), "--plugin", str(plugin), f"--output_dir={self.runner.directory / name}",
            *words, expect=expect,
        )  # fmt: skip


OPTIMIZERS = {"adamw": (), "sgd": ("--train.optimizer=sgd", "--train.weight_decay=0", "--train.learning_rate=0.5")}
CLIPPED = "--train.max_grad_norm=0.2"


def assert_equal(page: Page, name: str, other: str, records: Sequence[Any]) -> None:
    for record, wanted in zip(page.runner.metrics(name), records, strict=True):
        for key in ("loss", "grad_norm"):
            assert record[key] == pytest.approx(wanted[key], rel=LIMIT), (record["step"], key)
    for stem in ("model", "optimizer"):
        values, expected = (page.runner.weights(run, 8, stem) for run in (name, other))
        assert values.keys() == expected.keys()
        for key, value in values.items():
            np.testing.assert_allclose(value, expected[key], rtol=0, atol=LIMIT, err_msg=key)
