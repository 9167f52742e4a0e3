"""The commands `llmsuite runs list|show|compare`, `llmsuite report RUN…` and `llmsuite watch RUN`: inspect runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from llmsuite.base.arguments import Port
from llmsuite.base.errors import UserError
from llmsuite.base.redaction import printable
from llmsuite.contract.registry import Registry

_COMPARED = ("loss", "eval/loss", "grad_norm", "ips_total", "avg_batch_cost", "avg_reader_cost", "peak_memory_bytes")


def add_arguments(parser: Any) -> None:
    parser.add_argument(
        "action",
        type=Literal["list", "show", "compare"],
        help="list: all runs below a directory; show: one run; compare: several runs",
    )
    parser.add_argument(
        "runs", type=str, nargs="*", help="directories of runs; with list, directories to search (default: runs)"
    )


def run(args: Any, registry: Registry) -> int:
    from llmsuite.observe.runs import find_runs, read_run

    paths = [Path(path) for path in args.runs]
    if args.action == "list":
        if odd := [name for name in args.runs if not os.path.isdir(name)]:
            raise UserError(f"runs list: there is no directory {odd[0]}; name one that runs are in or below")
        found = [run for path in paths or [Path("runs")] for run in find_runs(path)]
        _print(("run", "stage", "status", "step", "loss", "tokens/s"), [_line(path) for path in found])
        return 0
    if args.action == "show" and len(paths) != 1:
        raise UserError("runs show: takes the directory of one run")
    if args.action == "compare" and len(paths) < 2:
        raise UserError("runs compare: takes the directories of two runs or more")
    runs = [read_run(path) for path in paths]
    return _show(runs[0]) if args.action == "show" else _compare(runs)


def _line(path: Path) -> tuple[str, ...]:
    from llmsuite.observe.runs import read_run

    run = read_run(path)
    last = run.steps[-1] if run.steps else {}
    numbers = [f"{last[name]:.4g}" if name in last else "" for name in ("loss", "ips_total")]
    return str(path), str(run.recipe.get("stage", "")), run.status, str(last.get("step", "")), *numbers


def _show(run: Any) -> int:
    rows = [("directory", str(run.directory)), ("status", run.status), ("stage", str(run.recipe.get("stage", "")))]
    shown = ("started", "host", "mesh", "device")
    rows += [(name, str(run.environment[name])) for name in shown if name in run.environment]
    if run.steps:
        rows += [(name, f"{value:.6g}") for name, value in run.steps[-1].items() if isinstance(value, (int, float))]
    _print((), rows)
    for event in run.events:
        rest = "  ".join(f"{key} {value}" for key, value in event.items() if key not in ("time", "event"))
        print(printable(f"{event.get('time', '')}  {event.get('event', '')}  {rest}".rstrip()))
    return 0


def _compare(runs: Sequence[Any]) -> int:
    from llmsuite.observe.runs import differing_keys

    head = ("", *(str(run.directory) for run in runs))
    rows: list[tuple[str, ...]] = [("status", *(run.status for run in runs))]
    rows.append(("step", *(str(run.steps[-1]["step"]) if run.steps else "" for run in runs)))
    for name in _COMPARED:
        last = [run.series(name)[1][-1:] for run in runs]
        if any(last):
            rows.append((name, *(f"{value[0]:.6g}" if value else "" for value in last)))
    recipes = [run.recipe for run in runs]
    rows += [(key, *map(str, values)) for key, values in differing_keys(*recipes)]
    _print(head, rows)
    return 0


def _print(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table: list[list[str]] = []
    all_rows = [head, *rows] if head else rows
    for row in all_rows:
        table.append([printable(cell).replace("\n", " ") for cell in row])
    if not rows:
        print("no runs")
        return
    widths = [max(map(len, column)) for column in zip(*table)]
    for row in table:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths)).rstrip())


def report_arguments(parser: Any) -> None:
    parser.add_argument("runs", type=str, nargs="+", help="directories of runs; several are shown together")
    parser.add_argument("--png", action="store_true", help="also write each chart as report/NAME.png; needs matplotlib")


def run_report(args: Any, registry: Registry) -> int:
    from llmsuite.observe.report import write_report
    from llmsuite.observe.runs import read_run

    for path in write_report([read_run(Path(path)) for path in args.runs], args.png):
        print(path)
    return 0


def watch_arguments(parser: Any) -> None:
    parser.add_argument("runs", type=str, nargs="+", help="directories of runs; several are shown together")
    parser.add_argument("--port", type=Port, default=8080, help="port on the loopback address; 0 for any free port")


def run_watch(args: Any, registry: Registry) -> int:
    from llmsuite.observe.watch import make_server

    with make_server([Path(path) for path in args.runs], args.port) as server:
        print(f"watching {', '.join(args.runs)} on {server.address}", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):  # background jobs start with SIGINT ignored
            signal.signal(number, signal.default_int_handler)
        server.serve_forever()
    return 0
