"""Every built-in stage keeps the contract that third parties test theirs by; stages that break it are found out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llmsuite.models.families.llama import SMOKE
from llmsuite.recipe.resolve import plan_run
from llmsuite.testing import assert_stage_contract
from tests.conftest import TRAINING_STAGES, PluginSite, registry_with
from tests.support.paths import ROOT

# keys that make a short run of a stage whose embedded data are many, or that has no teacher
SMALLER: Mapping[str, Mapping[str, Any]] = {
    "pretrain": {"pretrain.max_eval_samples": 64, "pretrain.mix": {}},
    "gkd": {"gkd.teacher_config": {**SMOKE, "num_hidden_layers": 1}, "gkd.sft_weight": 0.2},
}


@pytest.mark.parametrize("stage", TRAINING_STAGES)
def test_a_built_in_stage_keeps_the_contract(stage: str, tmp_path: Path) -> None:
    assert_stage_contract(stage, tmp_path, SMALLER.get(stage))
    assert_best_metrics(tmp_path)


def assert_best_metrics(runs: Path) -> None:
    """What evaluations report may be `checkpoint.best_metric`: the rule about it knows every name."""
    evaluated = 0
    for recipe in runs.glob("*/**/recipe.json"):
        records = map(json.loads, (recipe.parent / "metrics.jsonl").read_text().splitlines())
        names = {name for record in records for name in record if name.startswith("eval/")}
        for name in names:
            plan_run(recipe, [f"--checkpoint.best_metric={name}"], registry_with())
        evaluated += bool(names)
    assert evaluated


BROKEN = '''
import dataclasses
import llmsuite
from llmsuite.contract.hookspecs import StageSpec
from llmsuite.contract.schema.section import Section

@dataclasses.dataclass(kw_only=True)
class BrokenSection(Section):
    weight: float = 1.0
    """DOC"""

def stage():
    from llmsuite.engine.stage import LossTerms
    from llmsuite.stages.sft import SftStage

    class Broken(SftStage):
        row_kind = "conversation"

        def __init__(self, section, context):
            from llmsuite.stages.sections import SftSection
            super().__init__(SftSection(), context)
            self._weight = section.weight

        def loss(self, model, batch):
            terms = super().loss(model, batch)
            return FAULT

    return Broken

@llmsuite.hookimpl
def llmsuite_register_stages():
    smoke = {"data.train": "data/sft/train.jsonl", "data.ignore_columns": ["tasks"]}
    return [StageSpec(name="broken", help="for tests", config_cls=BrokenSection, factory=stage, smoke=smoke)]
'''


@pytest.mark.parametrize(
    ("doc", "fault", "message"),
    [
        ("", "terms", "write a docstring under weight"),
        ("Of all.", "LossTerms(2 * terms.total.detach() - self._weight * terms.total, terms.weight)", "rise from"),
        ("Of all.", "LossTerms(self._weight * terms.total / terms.weight, 1.0)", "on two ranks"),
    ],
    ids=["undocumented", "climbing", "mean of means"],
)
def test_a_broken_stage_is_found_out(
    doc: str, fault: str, message: str, tmp_path: Path, site: PluginSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("broken", BROKEN.replace("DOC", doc).replace("FAULT", fault))
    monkeypatch.setenv("PYTHONPATH", f"{site.directory}:{ROOT}")
    monkeypatch.setenv("LLMSUITE_PLUGINS", "broken")
    directory = tmp_path / "runs"
    directory.mkdir()
    with pytest.raises(AssertionError, match=message):
        assert_stage_contract("broken", directory)
