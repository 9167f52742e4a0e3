"""Every JSON file in PaddleNLP's llm/config and llm/auto_parallel: the same job, valid, or refused with the reason.

The list has names, digests and what becomes of each file, not their text. `LLMSUITE_PADDLENLP_LLM` names the directory
`llm` of a checkout at the commit of the list.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.contract.registry import Registry
from llmsuite.plugins.suites.conversion.arguments import read_arguments
from llmsuite.plugins.suites.paddlenlp.convert import convert
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.write import recipe_text
from tests.support.paths import ROOT

VARIABLE = "LLMSUITE_PADDLENLP_LLM"
LISTED: dict[str, Any] = json.loads((Path(__file__).parent / "paddlenlp_files.json").read_text(encoding="utf-8"))
FILES: dict[str, dict[str, str]] = LISTED["files"]


def digest(path: Path) -> str:
    """sha256 of the content, however it is laid out."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def outcome(path: Path, registry: Registry, recipe: Path) -> str:
    """ "same", the key that keeps the recipe from being valid, or the reason of the refusal."""
    try:
        made = convert(read_arguments(path), path.name, registry).recipe
    except UserError as error:
        return str(error)
    recipe.write_text(recipe_text(made), encoding="utf-8")
    try:
        plan_run(recipe, [], registry)
    except RecipeError as error:
        return ", ".join(problem.key for problem in error.problems)
    return "same"


def test_the_documentation_has_the_counts() -> None:
    counts = collections.Counter(found["becomes"] for found in FILES.values())
    text = " ".join((ROOT / "docs/guide/from-paddlenlp.md").read_text(encoding="utf-8").split())
    refused = len(FILES) - counts["same"] - counts["model.weights"]
    assert f"Of the {len(FILES)} files" in text
    assert f"{counts['same']} become the same job" in text
    assert f"{counts['model.weights']} more" in text or not counts["model.weights"]
    assert f"{refused} are refused" in text


@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no checkout of PaddleNLP")
def test_files_of_the_suite_are_converted(registry: Registry, tmp_path: Path) -> None:
    root = Path(os.environ[VARIABLE])
    found = {str(p.relative_to(root)) for part in ("config", "auto_parallel") for p in (root / part).rglob("*.json")}
    assert found == set(FILES)
    assert {name for name in FILES if digest(root / name) != FILES[name]["sha256"]} == set(), LISTED["commit"]
    results = {name: outcome(root / name, registry, tmp_path / "recipe.json") for name in FILES}
    wrong = {name: result for name, result in results.items() if FILES[name]["becomes"] not in result}
    assert wrong == {}
