"""The report of a run, or of several side by side: one self-contained HTML page, and its charts as PNGs."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.observe.runs import Record, Run, differing, flat
from llmsuite.planning.plot import schedule_figure
from llmsuite.planning.schedule import Timeline, orders, simulate

_TEMPLATE = Path(__file__).with_name("report.html")
_SHOWN_EVENTS = 200
_SHOWN_ROUNDS = 4
_NEEDS = "report: needs the package matplotlib; install it with: pip install matplotlib"


@dataclasses.dataclass(frozen=True)
class Chart:
    """Curves over steps."""

    name: str
    """The name of its PNG."""
    title: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    """(metric, label) of each curve."""
    scale: float = 1.0
    """Factor that values are multiplied by."""
    log: bool = False


CHARTS = (
    Chart("loss", "Loss", "", (("loss", "train"), ("eval/loss", "eval"))),
    Chart("reward", "Reward", "", (("reward", "train"), ("eval/reward", "eval"))),
    Chart("completions", "Length of completions", "tokens", (("completions/length", "mean"),)),
    Chart(
        "without_signal",
        "Groups without a signal, truncated completions",
        "share",
        (("groups/without_signal", "groups"), ("completions/truncated", "completions")),
    ),
    Chart("entropy", "Entropy of a token", "nats", (("entropy", ""),)),
    Chart("kl", "KL from the reference", "nats", (("kl", ""),)),
    Chart("learning_rate", "Learning rate", "", (("learning_rate", ""),)),
    Chart("grad_norm", "Gradient norm", "", (("grad_norm", ""),), log=True),
    Chart("throughput", "Throughput", "tokens/s", (("ips_total", ""),)),
    Chart("memory", "Peak memory of rank 0", "GB", (("peak_memory_bytes", ""),), scale=1e-9),
    Chart("data_wait", "Time of a step", "s", (("avg_batch_cost", "whole"), ("avg_reader_cost", "reading data"))),
)


def write_report(runs: Sequence[Run]) -> list[Path]:
    """Write `report.html` and `report/NAME.png` into the directory of the first run; returns the files.

    Raises:
        UserError: matplotlib is missing, no step is recorded yet, or the directory cannot be written to.
    """
    if not runs[0].steps:
        raise UserError(f"{runs[0].directory}: no step is recorded yet")
    directory = runs[0].directory
    written = [directory / "report.html"]
    try:
        (directory / "report").mkdir(exist_ok=True)
        for name, _, figure in figures(runs):
            path = directory / "report" / f"{name}.png"
            figure.savefig(path, format="png", dpi=110)
            written.append(path)
        written[0].write_text(page(runs), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{error.filename or directory}: cannot be written: {error.strerror}") from error
    return written


def page(runs: Sequence[Run], live: bool = False) -> str:
    """The whole page. A live page starts empty and polls its server for `content`."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(title=runs[0].directory.name, content=Markup("" if live else content(runs)), live=live)


def content(runs: Sequence[Run]) -> str:
    """The part of the page that changes during a run: status, charts, tables."""
    first = runs[0]
    parts = [_summary(runs), '<div class="charts">']
    for name, title, figure in figures(runs):
        parts.append(f'<figure id="{name}" aria-label="{html.escape(title)}">{_svg(figure, name)}</figure>')
    parts.append("</div>")
    rows: Any
    if len(runs) > 1:
        rows = [(key, *map(_text, values)) for key, values in differing(*(run.recipe for run in runs))]
        parts += ["<h2>Recipes differ in</h2>", _table(("key", *(run.directory.name for run in runs)), rows)]
    if first.completions:
        parts += [f"<h2>Completions of step {first.completions[0]['step']}</h2>", _completions(first.completions)]
    events = [(e.get("time", ""), e.get("event", ""), _text(_rest(e))) for e in first.events[-_SHOWN_EVENTS:]]
    parts += ["<h2>Events</h2>", _table(("time", "event", ""), events)]
    recipe = [(key, _text(value)) for key, value in flat(first.recipe)]
    parts += ["<details><summary>Recipe</summary>", _table(("key", "value"), recipe), "</details>"]
    machine = [(key, _text(value)) for key, value in flat(first.environment)]
    parts += ["<details><summary>Environment</summary>", _table(("", ""), machine), "</details>"]
    return "\n".join(parts)


def figures(runs: Sequence[Run]) -> Iterator[tuple[str, str, Any]]:
    """Name, title and Matplotlib figure of every chart that has data."""
    for chart in CHARTS:
        drawn = [
            (_label(run, label, runs), *run.series(metric)) for run in runs for metric, label in chart.metrics
        ]  # fmt: skip
        curves = [(label, steps, [v * chart.scale for v in values]) for label, steps, values in drawn if steps]
        if curves:
            yield chart.name, chart.title, _figure(chart, curves)
    if runs[0].ranks:
        numbers = [(int(r["step"]), r["busy_seconds"]) for r in runs[0].ranks]
        chart = Chart("ranks", "Time each rank does not wait for others", "s a step", ())
        count = min(len(values) for _, values in numbers)
        steps = [step for step, _ in numbers]
        curves = [(f"rank {rank}", steps, [values[rank] for _, values in numbers]) for rank in range(count)]
        yield chart.name, chart.title, _figure(chart, curves)
    if (passes := _passes(runs[0].recipe)) is not None:
        try:
            figure = schedule_figure(passes, "forward passes of a part, if all take as long", 6)
        except ImportError as error:
            raise UserError(_NEEDS) from error
        yield "schedule", "Passes of the pipeline", figure


def _passes(recipe: Record) -> Timeline | None:
    """The passes of a step in the engine's order, for a few rounds at most; None without a pipeline, or if their
    number depends on lengths."""
    parallel, engine, train, launch = (recipe.get(name) or {} for name in ("parallel", "engine", "train", "launch"))
    stages, tp = parallel.get("pipeline_parallel_degree", 1), parallel.get("tensor_parallel_degree", 1)
    if stages == 1 or not train.get("global_batch_size") or train.get("micro_batch_tokens") is not None:
        return None
    kind = parallel.get("pipeline_schedule", "1F1B")
    chunks = parallel.get("virtual_pipeline_degree") or (2 if kind == "interleaved" else 1)
    data = max(1, launch.get("num_devices", 1) * launch.get("nnodes", 1) // (stages * tp))
    count = train["global_batch_size"] // (train.get("micro_batch_size", 1) * data)
    drawn = min(count, _SHOWN_ROUNDS * stages + count % stages)
    # backward passes have twice the products, or as many if only adapters are trained; plus recompute
    backward = 1.0 if (recipe.get("lora") or {}).get("rank") is not None else 2.0
    backward += engine.get("recompute") == "full"
    parts = stages * chunks
    return simulate(orders(kind, stages, drawn, chunks), [1.0] * parts, [backward] * parts)


def _label(run: Run, label: str, runs: Sequence[Run]) -> str:
    return " ".join(part for part in (run.directory.name if len(runs) > 1 else "", label) if part)


def _figure(chart: Chart, curves: Sequence[tuple[str, Sequence[int], Sequence[float]]]) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise UserError(_NEEDS) from error
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for label, steps, values in curves:
        axes.plot(steps, values, label=label, linewidth=1.2, marker="." if len(steps) < 30 else "")
    if chart.log and all(value > 0 for _, _, values in curves for value in values):
        axes.set_yscale("log")
    axes.set(title=chart.title, xlabel="step", ylabel=chart.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if len(curves) > 1 and len(curves) <= 16:
        axes.legend(fontsize="small")
    return figure


def _svg(figure: Any, name: str) -> str:
    """A figure as an SVG element: text stays text, and its ids are unique in the page."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)


def _summary(runs: Sequence[Run]) -> str:
    names = ("loss", "eval/loss", "grad_norm", "learning_rate", "ips_total", "straggler/rank", "straggler/over_median")
    rows: list[tuple[str, ...]] = [("status", *(run.status for run in runs))]
    asks: list[tuple[str, Callable[[Run], Any]]] = [
        ("stage", lambda run: run.recipe.get("stage")),
        ("mesh", lambda run: run.environment.get("mesh")),
        ("last step", lambda run: run.steps[-1]["step"] if run.steps else None),
    ]
    rows += [(name, *(_text(ask(run)) for run in runs)) for name, ask in asks]
    for name in names:
        values = [run.series(name)[1][-1:] for run in runs]
        if any(values):
            rows.append((name, *(f"{value[0]:.4g}" if value else "" for value in values)))
    return _table(("", *(str(run.directory) for run in runs)), rows, "summary")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str = "") -> str:
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )  # fmt: skip
    return f'<table id="{name}"><tr>{cells}</tr>{body}</table>' if name else f"<table><tr>{cells}</tr>{body}</table>"


def _completions(rows: Sequence[Record]) -> str:
    """A table of completions; each prompt stands before the first of its own."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("rewards", {})))
    lines, before = [], None
    for row in rows:
        prompt = row.get("prompt", "") if row.get("group") != before else ""
        before = row.get("group")
        scores = [row.get("reward"), *(row.get("rewards", {}).get(name) for name in names), row.get("advantage")]
        numbers = ["missing" if score is None else f"{score:.4g}" for score in scores]
        lines.append((prompt, _written(row), *numbers, str(row.get("num_tokens", "")), row.get("finish_reason", "")))
    head = ("prompt", "completion", "reward", *names, "advantage", "tokens", "end")
    return _table(head, lines, "completions-table")


def _written(row: Record) -> str:
    """What a completion says: the turns of an episode each with its role, a line for each."""
    turns = row.get("turns")
    if not turns:
        return str(row.get("text", ""))
    said = [f"{turn['role']}: {turn['content']}" for turn in turns]
    return "\n".join([*said, f"(failed: {row['failure']})"] if row.get("failure") else said)


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _rest(event: dict[str, Any]) -> dict[str, Any] | None:
    return {key: value for key, value in event.items() if key not in ("time", "event")} or None
