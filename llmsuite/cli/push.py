"""`llmsuite push MODEL hf:ORG/NAME`: put a model or adapters on a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.plugins.manager import Registry
from llmsuite.specs import Command


def add_arguments(parser: Any) -> None:
    parser.add_argument("source", type=str, help="a run (its newest checkpoint), a model directory, or adapters")
    parser.add_argument("target", type=str, help="hf:ORG/NAME, or hf:ORG/NAME@BRANCH; made if it is not there")
    parser.add_argument("--private", action="store_true", help="a new repository is to be seen by its owner only")
    parser.add_argument("--message", type=str, default="Upload by llmsuite", help="of the commit")


def run(args: Any, registry: Registry) -> int:
    from llmsuite.checkpoint.directory import find_adapter, find_model
    from llmsuite.hub.names import hub_name
    from llmsuite.hub.push import push

    target = hub_name(args.target)
    if target is None:
        raise UserError(f"{args.target}: is no name on a hub; write hf:ORG/NAME")
    source = Path(args.source)
    directory = find_adapter(source) or find_model(source)
    found = push(directory, target, args.private, args.message, lambda text: print(text, flush=True))
    print(f"pushed {directory}: {found}")
    return 0


COMMAND = Command(name="push", help="put a model or adapters on a hub", add_arguments=add_arguments, run=run)
