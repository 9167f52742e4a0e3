"""Rollout engines without the required methods are refused before the first step."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.cpu import CpuBackend
from llmsuite.engine.rollouts import rollout_engine
from llmsuite.parallel.mesh import Mesh
from llmsuite.recipe.resolve import plan_run
from tests.support.paths import ROOT


class Halfway:
    def begin(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("made", "missing"), [(None, "returned None, without refresh, begin, close"), (Halfway(), "without refresh$")]
)
def test_a_factory_without_a_complete_engine_is_refused(registry: Registry, made: Any, missing: str) -> None:
    plan = plan_run(ROOT / "recipes" / "llama" / "grpo.json", [], registry, smoke=True)
    assert plan.train.rollout_engine is not None
    spec = dataclasses.replace(plan.train.rollout_engine, name="mine", factory=lambda context: made, remote=False)
    mesh = Mesh(Degrees(pp=1, dp=1, sharding=1, tp=1), 0)
    unused = cast("Any", SimpleNamespace())
    stage = cast("Any", SimpleNamespace(context=SimpleNamespace(tokenizer=None)))
    train_plan = dataclasses.replace(plan.train, rollout_engine=spec)
    with pytest.raises(UserError, match=f"rollout engine mine: its factory .*{missing}"):
        rollout_engine(plan.model, train_plan, "fp32", plan.output_dir, CpuBackend(), mesh, unused, stage)
