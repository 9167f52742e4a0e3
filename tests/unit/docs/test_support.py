"""docs/reference/support.md says what was tested, of the recipes as they are now."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.contract.registry import Registry
from tests.support.paths import ROOT
from tests.tools import matrix
from tests.tools.matrix import REPORT, Entry, entries


def _generate() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(REPORT.read_text(encoding="utf-8"))
    return loaded


def test_every_recipe_that_was_run_is_still_that_one(report: dict[str, Any], registry: Registry) -> None:
    """Does this fail? Run `make matrix`: recipes have changed since. The page names those that were not run."""
    now = {(entry.recipe, entry.mode): entry for entry in entries()}
    for run in report["runs"]:
        assert now[run["recipe"], run["mode"]].digest(registry) == run["digest"], run["recipe"]


def test_what_passed_is_within_the_limit(report: dict[str, Any]) -> None:
    passed = [run for run in report["runs"] if run["passed"]]
    assert passed
    for run in passed:
        for key in ("loss", "grad_norm") if run["stage"] != "infer" else ():
            limit = matrix.FLIPPED[key] if run.get("rounded") else matrix.LIMIT
            assert run[key] <= run.get(f"{key}_limit", limit), (run["recipe"], key)
    assert all(run["tokens"] > 100 for run in passed if run["stage"] == "infer")
    assert all(run["problem"] for run in report["runs"] if not run["passed"])


def test_log_probabilities_in_float32_move_a_gradient_no_more_than_is_allowed(registry: Registry) -> None:
    """Weights of pairs, in float64, by log-probabilities as they are and rounded to float32."""
    plan = Entry("llama/digits-dpo", "dynamic").plan(registry)
    generator = np.random.default_rng(0)
    sums = -np.array([20.0, 100, 20, 100]) * generator.uniform(0.9, 1, (10000, 4))  # chosen, rejected; the reference's

    def weights(logps: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(plan.train.stage_section.beta * (logps @ [1, -1, -1, 1])))

    moved = abs(weights(sums.astype("float32").astype("float64")) / weights(sums) - 1)
    allowed = matrix.margin_rounding(plan, {"logps/chosen": -20, "logps/rejected": -100})
    assert allowed / 5 < moved.max() <= allowed


def test_every_recipe_is_on_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "support.md").read_text(encoding="utf-8")
    assert [entry.recipe for entry in entries() if entry.recipe not in page] == []


def test_a_digest_changes_with_what_is_run(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes" / "llama").mkdir(parents=True)
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    text = (ROOT / "recipes" / "llama" / "sft.json").read_text(encoding="utf-8")
    digests = {}
    for name, (old, new) in {
        "same": ("", ""),
        "source": ('"source": "', '"source": "not '),
        "sharding": ("stage2", "stage1"),
        "weight decay": ('"max_steps"', '"weight_decay": 0.3, "max_steps"'),
    }.items():
        (tmp_path / "recipes" / "llama" / "sft.json").write_text(text.replace(old, new), encoding="utf-8")
        digests[name] = Entry("llama/sft", "dynamic").digest(registry)
    assert digests["source"] == digests["same"]  # it is not run
    assert len({digests[name] for name in ("same", "sharding", "weight decay")}) == 3


def test_a_cell_is_green_only_if_its_runs_passed(registry: Registry) -> None:
    runs = [
        {"recipe": "llama/a", "mode": "dynamic", "family": "llama", "stage": "sft", "passed": True},
        {"recipe": "llama/b", "mode": "to_static", "family": "llama", "stage": "sft", "passed": True},
        {
            "recipe": "llama/c",
            "mode": "to_static",
            "family": "llama",
            "stage": "sft",
            "passed": False,
            "problem": "bad",
        },
        {"recipe": "llama/d", "mode": "dynamic", "family": "llama", "stage": "dpo", "passed": True},
    ]
    runs = [{"loss": 0.0, "grad_norm": 1e-7, "asked": "x", "mesh": "y", "digest": "", **run} for run in runs]
    page = _generate().support_page({"limit": 1e-6, "steps": 3, "paddle": "3", "runs": runs}, registry)
    rows = [line for line in page.splitlines() if line.startswith("|")]
    header = [cell.strip() for cell in rows[0].split("|")]
    llama = dict(zip(header, (cell.strip() for cell in rows[2].split("|"))))
    assert llama == {"": "", "sft": "dynamic, to_static FAILS", "dpo": "dynamic"}
    qwen = dict(zip(header, (cell.strip() for cell in rows[3].split("|"))))
    assert qwen["sft"] == qwen["dpo"] == "not tested"
    assert "| llama/c | to_static | x | y | bad |  |" in rows
