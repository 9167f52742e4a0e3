"""Every recipe of the repository is planned for the virtual device, or refused by name. Some of them are rehearsed in
tests/multi/test_rehearse_recipes.py."""

from __future__ import annotations

import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import PluginInfo, Registry, load_plugins
from llmsuite.plugins.rehearse import device
from llmsuite.plugins.rehearse.command import plan_to_rehearse
from tests.support.paths import ROOT

RECIPES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").rglob("*.json"))
FAMILIES = sorted({recipe.split("/")[1] for recipe in RECIPES})
REFUSED = {
    "infer.json": "does not train",
    "-program.json": "engine.program: is step, which cannot be rehearsed yet",
}
"""Ends of names of recipes, and what is wrong with them."""


@pytest.fixture(scope="module")
def registry() -> Registry:
    found = load_plugins()
    found.require(PluginInfo("virtual_gpu", "llmsuite", device.__name__, plugin=device))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_recipes_are_planned_or_refused_by_name(family: str, registry: Registry) -> None:
    for recipe in [recipe for recipe in RECIPES if recipe.split("/")[1] == family]:
        reason = next((why for end, why in REFUSED.items() if recipe.endswith(end)), None)
        if reason is not None:
            with pytest.raises(UserError, match=reason):
                plan_to_rehearse(str(ROOT / recipe), [], registry)
            continue
        plan = plan_to_rehearse(str(ROOT / recipe), [], registry)
        assert plan.parallel.device.name == "virtual_gpu", recipe
        assert plan.train.section.max_steps == 3 * max(1, plan.train.profile.updates), recipe
        assert not plan.data.eval_paths, recipe
