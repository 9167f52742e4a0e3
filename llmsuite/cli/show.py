"""`llmsuite show RECIPE`: every value as a run would see it, and where it came from."""

from __future__ import annotations

import json
from typing import Any

from llmsuite.plugins.manager import Registry
from llmsuite.recipe.load import LoadedRecipe
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.source import Key
from llmsuite.schema.keys import walk
from llmsuite.schema.section import as_plain
from llmsuite.shown import redacted
from llmsuite.specs import Command


def add_arguments(parser: Any) -> None:
    parser.add_argument("recipe", type=str, help="recipe file (.json, .jsonc or .yaml)")
    parser.add_argument("--smoke", action="store_true", help="show the recipe of a --smoke run")
    parser.add_argument("--json", action="store_true", help="print only the resolved recipe, as JSON")


def run(args: Any, registry: Registry) -> int:
    plan = plan_run(args.recipe, args.overrides, registry, args.smoke)
    data = as_plain(plan.recipe)
    if args.json:
        print(json.dumps(data, indent=2, ensure_ascii=False))
        return 0
    rows = []
    for info in walk(type(plan.recipe)):
        if info.key[:2] == ("model", "config"):
            continue
        value: Any = data
        for part in info.key:
            value = value[part]
        rows.append((info.dotted, json.dumps(value, ensure_ascii=False), _origin(plan.loaded, info.key, "default")))
    for name, value in sorted(plan.model_config.to_hf().items()):
        origin = _origin(plan.loaded, ("model", "config", name), "model shape")
        rows.append((f"model.config.{name}", json.dumps(value), origin))
    for name, value in (
        ("data_parallel_degree", plan.degrees.dp),
        ("accumulate_steps", plan.accumulate_steps),
        ("data.train file" if plan.stage.trains else "data.prompts file", plan.train_file),
        ("data.eval file", plan.eval_file),
        ("tokenizer directory", plan.tokenizer),
        ("weights directory", plan.weights),
    ):
        rows.append((name, str(value), "derived"))
    widths = [min(60, max(len(row[i]) for row in rows)) for i in (0, 1)]
    for name, value, origin in rows:
        print(f"{name:{widths[0]}}  {redacted(value):{widths[1]}}  {redacted(origin)}")
    return 0


def _origin(loaded: LoadedRecipe, key: Key, otherwise: str) -> str:
    """Where a key was written, perhaps as part of a section that was written as a whole."""
    return loaded.origin(key) if any(given[: len(key)] == key for given in loaded.given) else otherwise


COMMAND = Command(
    name="show",
    help="print a resolved recipe, with the origin of each value",
    add_arguments=add_arguments,
    run=run,
    takes_overrides=True,
)
