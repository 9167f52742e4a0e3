"""What draws completions is asked for its methods before the first step."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmsuite.devices.cpu import CpuBackend
from llmsuite.errors import UserError
from llmsuite.parallel.mesh import Mesh
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import plan_run
from llmsuite.schema.degrees import Degrees
from llmsuite.train.rollouts import rollout_engine
from tests.paths import ROOT


class Halfway:
    def begin(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("made", "missing"), [(None, "returned None, without refresh, begin, close"), (Halfway(), "without refresh$")]
)
def test_a_factory_that_gives_no_engine(registry: Registry, made: Any, missing: str) -> None:
    plan = plan_run(ROOT / "recipes" / "llama" / "grpo.json", [], registry, smoke=True)
    assert plan.rollout_engine is not None
    spec = dataclasses.replace(plan.rollout_engine, name="mine", factory=lambda context: made, remote=False)
    mesh, unused = Mesh(Degrees(pp=1, dp=1, sharding=1, tp=1), 0), cast("Any", SimpleNamespace())
    stage = cast("Any", SimpleNamespace(context=SimpleNamespace(tokenizer=None)))
    with pytest.raises(UserError, match=f"rollout engine mine: its factory .*{missing}"):
        rollout_engine(dataclasses.replace(plan, rollout_engine=spec), CpuBackend(), mesh, unused, stage)
