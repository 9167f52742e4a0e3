"""The command `llmsuite push MODEL hf:ORG/NAME`: uploads a model or adapters to a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry


def add_arguments(parser: Any) -> None:
    parser.add_argument("source", type=str, help="a run (its newest checkpoint), a model directory, or adapters")
    parser.add_argument("target", type=str, help="hf:ORG/NAME, or hf:ORG/NAME@BRANCH; created if it does not exist")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--message", type=str, default="Upload by llmsuite", help="commit message")


def run(args: Any, registry: Registry) -> int:
    from llmsuite.base.hub.names import hub_name
    from llmsuite.base.hub.push import push
    from llmsuite.checkpoint.directory import find_adapter, find_model

    target = hub_name(args.target)
    if target is None:
        raise UserError(f"{args.target}: is no name on a hub; write hf:ORG/NAME")
    source = Path(args.source)
    directory = find_adapter(source) or find_model(source)
    found = push(directory, target, args.private, args.message, lambda text: print(text, flush=True))
    print(f"pushed {directory}: {found}")
    return 0
