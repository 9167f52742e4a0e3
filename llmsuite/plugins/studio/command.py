"""The command `llmsuite studio`: serves a local page to edit recipes, start and watch runs, and chat with models."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from llmsuite.base.arguments import Port
from llmsuite.contract.registry import Registry


def add_arguments(parser: Any) -> None:
    parser.add_argument("--port", type=Port, default=8090, help="port on the loopback address; 0 for any free port")
    parser.add_argument("--runs", type=str, default="runs", help="directory to search for runs")


def run(args: Any, registry: Registry) -> int:
    from llmsuite.plugins.studio.server import Studio

    with Studio(registry, Path(args.runs), args.port) as server:
        print(f"the studio is on {server.address}", flush=True)
        print("anyone with this URL can start runs as you; Ctrl-C ends the page, runs continue", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):  # background jobs start with SIGINT ignored
            signal.signal(number, signal.default_int_handler)
        try:
            server.serve_forever()
        finally:
            for name in server.close():
                print(f"{name} continues; see: llmsuite watch {name}", flush=True)
    return 0
