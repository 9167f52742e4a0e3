"""The command `llmsuite show RECIPE`: prints every value of a resolved recipe, and its origin."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llmsuite.base.redaction import redacted
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.section import as_plain

if TYPE_CHECKING:
    from llmsuite.recipe.load import LoadedRecipe
    from llmsuite.recipe.source import Key


def add_arguments(parser: Any) -> None:
    parser.add_argument("recipe", type=str, help="recipe file (.json, .jsonc or .yaml)")
    parser.add_argument("--smoke", action="store_true", help="show the recipe of a --smoke run")
    parser.add_argument("--json", action="store_true", help="print only the resolved recipe, as JSON")


def run(args: Any, registry: Registry) -> int:
    from llmsuite.contract.schema.keys import walk
    from llmsuite.recipe.resolve import plan_run

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
    for name, value in sorted(plan.model.config.to_hf().items()):
        origin = _origin(plan.loaded, ("model", "config", name), "model shape")
        rows.append((f"model.config.{name}", json.dumps(value), origin))
    for name, value in (
        ("data_parallel_degree", plan.parallel.degrees.dp),
        ("accumulate_steps", plan.parallel.accumulate_steps),
        ("data.train file" if plan.train.stage.trains else "data.prompts file", plan.data.train_file),
        *((f"{key} file", file) for key, _, file in plan.data.files() if key.startswith("data.eval")),
        ("tokenizer directory", plan.model.tokenizer),
        ("weights directory", plan.model.weights),
    ):
        rows.append((name, str(value), "derived"))
    name_width = min(60, max(len(name) for name, _, _ in rows))
    value_width = min(60, max(len(value) for _, value, _ in rows))
    for name, value, origin in rows:
        print(f"{name:{name_width}}  {redacted(value):{value_width}}  {redacted(origin)}")
    return 0


def _origin(loaded: LoadedRecipe, key: Key, otherwise: str) -> str:
    """The place where a key was set, perhaps through its section."""
    if any(given[: len(key)] == key for given in loaded.given):
        return loaded.origin(key)
    return otherwise
