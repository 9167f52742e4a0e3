"""`llmsuite studio`: a page on this machine to fill in recipes, start runs, watch them and talk to their models."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from llmsuite.cli.parser import Port
from llmsuite.plugins.manager import Registry
from llmsuite.specs import Command


def add_arguments(parser: Any) -> None:
    parser.add_argument("--port", type=Port, default=8090, help="on the loopback address; 0 for any that is free")
    parser.add_argument("--runs", type=str, default="runs", help="where runs are looked for")


def run(args: Any, registry: Registry) -> int:
    from llmsuite.studio.server import Studio

    with Studio(registry, Path(args.runs), args.port) as server:
        print(f"the studio is on {server.address}", flush=True)
        print("who has this address can start runs as you; Ctrl-C ends the page, runs go on", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):  # jobs in the background begin with SIGINT ignored
            signal.signal(number, signal.default_int_handler)
        try:
            server.serve_forever()
        finally:
            for name in server.close():
                print(f"{name} goes on; see: llmsuite watch {name}", flush=True)
    return 0


COMMAND = Command(
    name="studio",
    help="a page to fill in a recipe, start it, watch it and talk to the result",
    add_arguments=add_arguments,
    run=run,
)
