"""Fixtures that convert arguments of other suites to recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.contract.specs import ConvertedRecipe
from llmsuite.plugins.suites.convert import convert
from llmsuite.plugins.suites.known import SUITES
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.write import recipe_text

Converted = Callable[..., ConvertedRecipe]


@pytest.fixture
def converted(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Converted:
    """Converts, and checks that the recipe is valid and that every argument is in the report once."""
    monkeypatch.chdir(tmp_path)

    def run(action: str, values: dict[str, Any], name: str = "x.yaml", **options: Any) -> ConvertedRecipe:
        found = convert(SUITES[action], values, name, registry, **options)
        path = tmp_path / "recipe.json"
        path.write_text(recipe_text(found.recipe), encoding="utf-8")
        plan_run(path, [], registry)
        reported = [key for key, *_ in (*found.same, *found.translated, *found.left_out, *found.refused)]
        flat = SUITES[action].flatten(dict(values))
        given = {key for key, value in flat.items() if value is not None}
        assert {key for key in reported if flat.get(key) is not None} == given
        assert [where for _, _, where in found.translated if where == "see the notes"] == []
        return found

    return run
