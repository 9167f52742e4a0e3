"""The command `llmsuite list WHAT`: lists registered things, bundled recipes, or the keys of a recipe. It imports only
what it lists."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.base.resources import bundled
from llmsuite.cli.tables import JSON_HELP, print_json, print_table
from llmsuite.contract.registry import BUILTIN, Registry

_WHAT = Literal[
    "stages", "models", "recipes", "devices", "adapters", "formats", "loggers", "rewards", "environments", "engines",
    "layouts", "suites", "templates", "keys",
]  # fmt: skip
_COLUMNS = {
    "keys": ("key", "type", "doc"),
    "recipes": ("recipe", "what", "devices", "source"),
    "templates": ("name", "help"),
}
"""Names of the columns in JSON, where they are not those of registered things."""


def add_arguments(parser: Any) -> None:
    parser.add_argument("what", type=_WHAT, help="what to list")
    parser.add_argument("--stage", type=str | None, help="with keys: also list the section of this stage")
    parser.add_argument("--family", type=str, default="llama", help="with keys: list the model.config of this family")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def run(args: Any, registry: Registry) -> int:
    rows: list[tuple[str, ...]]
    if args.what == "keys":
        rows = list(_keys(args.stage, args.family, registry))
    elif args.what == "recipes":
        rows = list(_recipes())
    elif args.what == "templates":
        from llmsuite.contract.schema.chat_templates import NAMES

        rows = list(NAMES.items())
    else:
        kind = {
            "adapters": "adapter method",
            "formats": "data format",
            "layouts": "exporter",
            "engines": "rollout engine",
        }.get(args.what, args.what.removesuffix("s"))
        specs = registry.specs(kind)
        rows = [(name, spec.help, registry.owner(kind, name).distribution) for name, spec in specs.items()]
        if args.what == "devices":
            from llmsuite.devices.vendors import VENDORS

            others = [vendor for vendor in VENDORS if vendor.name not in specs]
            rows += [(vendor.name, f"{vendor.help}, with a plug-in for Paddle", BUILTIN) for vendor in others]
    if args.json:
        print_json([dict(zip(_COLUMNS.get(args.what, ("name", "help", "package")), row)) for row in rows])
        return 0
    print_table((), rows)
    return 0


def _keys(stage: str | None, family: str, registry: Registry) -> Iterator[tuple[str, str, str]]:
    from llmsuite.contract.schema.keys import walk
    from llmsuite.recipe.recipe_class import recipe_type

    tree: dict[str, Any] = {"model": {"family": family}}
    if stage:
        tree["stage"] = stage
    cls, problems = recipe_type(tree, registry)
    if problems:
        raise UserError("\n".join(f"{key}: {message}" for key, message in problems))
    for info in walk(cls):
        default = "required"
        if info.default is not dataclasses.MISSING:
            default = f"default {json.dumps(info.default)}"
        in_shape = info.key[:2] == ("model", "config") and len(info.key) > 2
        yield info.dotted, info.type_text, info.doc if in_shape else f"{info.doc} [{default}]"


def _recipes() -> Iterator[tuple[str, str, str, str]]:
    root = bundled("recipes")
    for path in sorted(root.glob("*/*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            yield f"recipes/{path.relative_to(root)}", "not JSON", "", ""
            continue
        model = data["model"].get("weights") or data["model"].get("preset") or ""
        devices = data.get("launch", {}).get("num_devices", 1) * data.get("launch", {}).get("nnodes", 1)
        yield (
            f"recipes/{path.relative_to(root)}",
            f"{data['stage']} of {model}",
            f"{devices} x {data.get('device', 'cpu')}",
            data.get("source", ""),
        )
