"""The command `llmsuite schema`: prints the JSON Schema of recipes, with which an editor completes and checks them."""

from __future__ import annotations

import json
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.recipe.schema_json import recipe_schema


def add_arguments(parser: Any) -> None:
    parser.add_argument("--stage", type=str | None, help="only recipes of this stage")
    parser.epilog = (
        'Save it and name it in a recipe\'s editor settings, such as "json.schemas" of VS Code. A recipe in YAML '
        "names it in its first line: # yaml-language-server: $schema=FILE"
    )


def run(args: Any, registry: Registry) -> int:
    if args.stage is not None and args.stage not in registry.stages:
        raise UserError(registry.unknown("stage", args.stage))
    print(json.dumps(recipe_schema(registry, args.stage), indent=2, ensure_ascii=False))
    return 0
