"""The commands `llmsuite runs list|show|compare`, `llmsuite report RUN…` and `llmsuite watch RUN`: inspect runs."""

from __future__ import annotations

import operator
import os
import re
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llmsuite.base.arguments import Port
from llmsuite.base.errors import UserError
from llmsuite.base.redaction import printable
from llmsuite.base.safe_files import listed
from llmsuite.base.strict_json import parse_json
from llmsuite.base.suggestions import suggestion
from llmsuite.cli.tables import JSON_HELP, print_json, print_table
from llmsuite.contract.registry import Registry

if TYPE_CHECKING:
    from llmsuite.observe.runs import Run

_COMPARED = ("loss", "eval/loss", "grad_norm", "ips_total", "avg_batch_cost", "avg_reader_cost", "peak_memory_bytes")
_LISTED = "stage,status,step,loss,ips_total"
_HEADS = {"ips_total": "tokens/s"}
_CONDITION = re.compile(r"\s*([^=!<>\s]+)\s*(!=|<=|>=|=|<|>)\s*(.*?)\s*")
_IS_MET: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Condition(NamedTuple):
    """A condition on a column of a run, such as train.learning_rate<1e-3."""

    column: str
    operator: str
    """A key of `_IS_MET`."""
    value: Any
    """The value as JSON, else as a text."""

    def is_met(self, facts: Mapping[str, Any]) -> bool:
        """Return True where the columns of a run meet it. Numbers have an order; a run without a number has none."""
        found = facts.get(self.column)
        if self.operator not in ("=", "!=") and not _is_number(found):
            return False
        return _IS_MET[self.operator](found, self.value)


def parse_conditions(text: str) -> list[Condition]:
    """Parse conditions that are separated by commas.

    Raises:
        UserError: a part is no condition, or compares the order of something else than a number.
    """
    conditions = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise UserError(
                f"--where: {part.strip()!r} is no condition; write a column, one of = != < <= > >=, and a value, as in "
                "stage=sft,train.learning_rate<1e-3"
            )
        column, sign, written = match.groups()
        try:
            value = parse_json(written)
        except ValueError:
            value = written
        if sign not in ("=", "!=") and not _is_number(value):
            raise UserError(f"--where: {part.strip()!r} compares with {written!r}, which is no number; use = or !=")
        conditions.append(Condition(column, sign, value))
    return conditions


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def add_arguments(parser: Any) -> None:
    parser.add_argument(
        "action",
        type=Literal["list", "show", "compare"],
        help="list: all runs below a directory; show: one run; compare: several runs",
    )
    parser.add_argument(
        "runs", type=str, nargs="*", help="directories of runs; with list, directories to search (default: runs)"
    )
    parser.add_argument(
        "--columns",
        type=str,
        default=_LISTED,
        help="with list: what to show of each run, as A,B: status, step, started, keys of the recipe such as "
        "train.learning_rate, and metrics such as eval/loss, whose last values are shown",
    )
    parser.add_argument("--sort", type=str | None, default=None, help="with list: the column to sort by, least first")
    parser.add_argument(
        "--where",
        type=str | None,
        default=None,
        help="with list: only runs that meet all conditions, as A=1,B<2: a column, one of = != < <= > >=, and a value",
    )
    parser.add_argument("--descending", action="store_true", help="with --sort: greatest first")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def run(args: Any, registry: Registry) -> int:
    from llmsuite.observe.runs import find_runs, read_run

    paths = [Path(path) for path in args.runs]
    if args.action == "list":
        if odd := [name for name in args.runs if not os.path.isdir(name)]:
            raise UserError(f"runs list: there is no directory {odd[0]}; name one that runs are in or below")
        found = [read_run(run) for path in paths or [Path("runs")] for run in find_runs(path)]
        columns = [name.strip() for name in args.columns.split(",")]
        conditions = [] if args.where is None else parse_conditions(args.where)
        return list_runs(found, columns, args.sort, args.descending, args.json, conditions)
    if args.action == "show" and len(paths) != 1:
        raise UserError("runs show: takes the directory of one run")
    if args.action == "compare" and len(paths) < 2:
        raise UserError("runs compare: takes the directories of two runs or more")
    runs = [read_run(path) for path in paths]
    return _show(runs[0], args.json) if args.action == "show" else _compare(runs, args.json)


def list_runs(
    runs: Sequence[Run],
    columns: Sequence[str],
    sort: str | None,
    descending: bool = False,
    as_json: bool = False,
    conditions: Sequence[Condition] = (),
) -> int:
    """Print a row for each run. Returns the exit code.

    Args:
        runs: in the order to print them without `sort`.
        columns: keys of recipes, metrics, and "status", "step" and "started".
        sort: the column to sort by; runs without it come last.
        descending: True for the greatest first.
        as_json: True for JSON in place of a table.
        conditions: what a run has to meet to be listed.

    Raises:
        UserError: no run has a column.
    """
    rows = {run.directory: _facts(run) for run in runs}
    known = {name for facts in rows.values() for name in facts}
    if runs:
        _check_columns("--columns", columns, known)
        _check_columns("--sort", [sort] if sort else [], known)
        _check_columns("--where", [condition.column for condition in conditions], known)
    for condition in conditions:
        rows = {path: facts for path, facts in rows.items() if condition.is_met(facts)}
    if sort:
        present = [path for path, facts in rows.items() if facts.get(sort) is not None]
        missing = [path for path in rows if path not in present]
        order = sorted(present, key=lambda path: _order(rows[path][sort]), reverse=descending)
        rows = {path: rows[path] for path in [*order, *missing]}
    chosen = [(str(path), list(map(facts.get, columns))) for path, facts in rows.items()]
    if as_json:
        print_json([{"run": path, **dict(zip(columns, values))} for path, values in chosen])
        return 0
    if not rows:
        print("no runs")
        return 0
    print_table(
        ("run", *(_HEADS.get(name, name) for name in columns)), [(path, *map(_text, values)) for path, values in chosen]
    )
    return 0


def _check_columns(option: str, names: Sequence[str], known: Collection[str]) -> None:
    """Raise UserError for a column that no run has."""
    unknown = [name for name in names if name not in known]
    if unknown:
        hint = suggestion(unknown[0], sorted(known))
        raise UserError(f"{option}: no run has {unknown[0]!r}; {hint}name a key of a recipe or a metric")


def _facts(run: Run) -> dict[str, Any]:
    """The columns that a run has: its recipe, the last values of its metrics, and its status."""
    from llmsuite.observe.runs import flatten

    facts: dict[str, Any] = dict(flatten(run.recipe))
    for record in [*run.steps, *run.evaluations]:
        facts |= {name: value for name, value in record.items() if value is not None}
    last = run.steps[-1]["step"] if run.steps else None
    own = {"status": run.status, "step": last, "started": run.environment.get("started")}
    return dict.fromkeys(_LISTED.split(",")) | facts | own


def _order(value: Any) -> tuple[bool, float, str]:
    """The place of a value among others: numbers before texts."""
    is_number = isinstance(value, (int, float))
    return not is_number, value if is_number else 0.0, str(value)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _show(run: Run, as_json: bool) -> int:
    if as_json:
        last = run.steps[-1] if run.steps else {}
        facts = {"directory": str(run.directory), "status": run.status, "last_step": last, "events": run.events}
        print_json({**facts, "environment": run.environment, "recipe": run.recipe})
        return 0
    rows = [("directory", str(run.directory)), ("status", _status(run)), ("stage", str(run.recipe.get("stage", "")))]
    shown = ("started", "host", "mesh", "device")
    rows += [(name, str(run.environment[name])) for name in shown if name in run.environment]
    if run.steps:
        rows += [(name, f"{value:.6g}") for name, value in run.steps[-1].items() if isinstance(value, (int, float))]
    print_table((), [(name, printable(value)) for name, value in rows])
    for event in run.events:
        rest = "  ".join(f"{key} {value}" for key, value in event.items() if key not in ("time", "event"))
        print(printable(f"{event.get('time', '')}  {event.get('event', '')}  {rest}".rstrip()))
    return 0


def _status(run: Run) -> str:
    """The status of a run, with the cause of a failure, and how to continue it."""
    error = run.events[-1].get("error") if run.events else None
    status = f"{run.status}: {error}" if error else run.status
    if run.status in ("stopped", "failed", "hung", "died") and listed(run.directory / "checkpoints", "step-*"):
        return f"{status}; the same command with --resume continues it"
    return status


def _last_values(runs: Sequence[Run], metric: str) -> list[float | None]:
    """Return the last value of a metric in each run; None where a run has none."""
    series = [run.series(metric)[1] for run in runs]
    return [values[-1] if values else None for values in series]


def _compare(runs: Sequence[Run], as_json: bool) -> int:
    from llmsuite.observe.runs import differing_keys

    last = {name: _last_values(runs, name) for name in _COMPARED}
    steps = [run.steps[-1]["step"] if run.steps else None for run in runs]
    differing = differing_keys(*(run.recipe for run in runs))
    if as_json:
        facts: dict[str, Any] = {"runs": [str(run.directory) for run in runs], "status": [run.status for run in runs]}
        print_json({**facts, "step": steps, "metrics": last, "recipe": dict(differing)})
        return 0
    rows: list[tuple[str, ...]] = [("status", *(run.status for run in runs)), ("step", *map(_text, steps))]
    for name, values in last.items():
        if any(value is not None for value in values):
            rows.append((name, *("" if value is None else f"{value:.6g}" for value in values)))
    rows += [(key, *map(str, values)) for key, values in differing]
    print_table(("", *(str(run.directory) for run in runs)), rows)
    return 0


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
