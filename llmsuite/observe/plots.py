"""Charts of a run as PNG files, by matplotlib, and the pipeline schedule as a figure, or as SVG for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.observe.charts import PlottedChart
from llmsuite.observe.runs import Record
from llmsuite.parallel.timeline import Timeline, orders, simulate

_SHOWN_ROUNDS = 4
_NEEDS = "report --png: needs the package matplotlib; install it with: pip install matplotlib"
_WIDTH = 1000
_ROW = 30
"""Width of the SVG of a pipeline and height of a row in it, in its own units."""


def write_plots(charts: Sequence[PlottedChart], timeline: Timeline | None, directory: Path) -> list[Path]:
    """Write `NAME.png` for each chart, and `schedule.png` for a pipeline; returns the files.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        figures = [(plotted.chart.name, charts_figure([plotted])) for plotted in charts]
        if timeline is not None:
            unit = "forward passes of a chunk, if all take equally long"
            figures.append(("schedule", schedule_figure(timeline, unit, 6)))
    except ImportError as error:
        raise UserError(_NEEDS) from error
    for name, figure in figures:
        figure.savefig(directory / f"{name}.png", format="png", dpi=110)
    return [directory / f"{name}.png" for name, _ in figures]


def charts_figure(charts: Sequence[PlottedChart]) -> Any:
    """Figure of matplotlib with one or more charts, two in a row.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    columns = min(2, len(charts))
    rows = math.ceil(len(charts) / columns)
    figure = Figure(figsize=(6 * columns, 3.2 * rows), layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, plotted in zip(places, charts):
        _draw(axes, plotted)
    for axes in places[len(charts) :]:
        axes.remove()
    return figure


def _draw(axes: Any, plotted: PlottedChart) -> None:
    """Plot the curves of a chart into axes of matplotlib."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    for curve in plotted.curves:
        colour = f"C{curve.colour % 10}"
        style = "--" if curve.dashed else "-"
        line: dict[str, Any] = {"linewidth": 1.2, "linestyle": style, "color": colour}
        marker = "." if len(curve.steps) < 30 else ""
        axes.plot(curve.steps, curve.values, label=curve.label, marker=marker, **line)
    values = [value for curve in plotted.curves for value in curve.values]
    if plotted.chart.log and min(values) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, at: f"{value:.4g}"))
        if math.log10(max(values) / min(values)) > 1:
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, at: f"{value:.4g}"))
    axes.set(title=plotted.chart.title, xlabel="step", ylabel=plotted.chart.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if 1 < len(plotted.curves) <= 16:
        axes.legend(fontsize="small")


def pipeline_timeline(recipe: Record) -> Timeline | None:
    """The passes of a step in the engine's order, for a few rounds at most; None without a pipeline, or if their
    number depends on lengths."""
    parallel = recipe.get("parallel") or {}
    engine = recipe.get("engine") or {}
    train = recipe.get("train") or {}
    launch = recipe.get("launch") or {}
    stages = parallel.get("pipeline_parallel_degree", 1)
    tp = parallel.get("tensor_parallel_degree", 1)
    if stages == 1 or not train.get("global_batch_size") or train.get("micro_batch_tokens") is not None:
        return None
    kind = parallel.get("pipeline_schedule", "1F1B")
    chunks = parallel.get("virtual_pipeline_degree") or (2 if kind == "interleaved" else 1)
    data = max(1, launch.get("num_devices", 1) * launch.get("nnodes", 1) // (stages * tp))
    count = train["global_batch_size"] // (train.get("micro_batch_size", 1) * data)
    shown = min(count, _SHOWN_ROUNDS * stages + count % stages)
    # a backward pass has twice the matrix products of a forward pass, or as many if the model is frozen; plus recompute
    kinds = (("lora", "rank"), ("reft", "rank"), ("prefix", "tokens"))
    backward = 2.0
    if any((recipe.get(name) or {}).get(size) is not None for name, size in kinds):
        backward = 1.0
    backward += engine.get("recompute") == "full"
    parts = stages * chunks
    return simulate(orders(kind, stages, shown, chunks), [1.0] * parts, [backward] * parts)


def plot_schedule(timeline: Timeline, path: Path) -> None:
    """Plot a row for each rank into a file of a type that `extras.check_plot` accepts, see `schedule_figure`. Raises
    UserError when the file cannot be written."""
    figure = schedule_figure(timeline, "FLOPs of a rank", 14)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"--plot: {path} cannot be written: {error.strerror}") from error


def schedule_figure(timeline: Timeline, unit: str, width: float) -> Any:
    """Figure with a row for each rank: forward passes blue, darker in later chunks, backward passes orange.

    Args:
        timeline: to plot.
        unit: of its times.
        width: of the figure, in inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, max(2.0, 0.5 * len(timeline.ranks) + 1.2)), layout="constrained")
    axes = figure.subplots()
    for stage, timed in enumerate(timeline.ranks):
        for forward in (True, False):
            passes = [t for t in timed if t.action.forward == forward]
            shades = [min(1.0, 0.45 + 0.2 * t.action.chunk) for t in passes]
            colours = [(0.2, 0.4, 0.8, shade) if forward else (0.9, 0.5, 0.1, shade) for shade in shades]
            spans = [(t.start, t.end - t.start) for t in passes]
            axes.broken_barh(spans, (stage - 0.4, 0.8), facecolors=colours, edgecolor="white", linewidth=0.3)
    axes.set(yticks=range(len(timeline.ranks)), ylabel="pipeline stage", xlabel=unit)
    axes.set_title(f"ranks wait {timeline.bubble:.1%} of {len(timeline.ranks[0])} passes each")
    axes.invert_yaxis()
    return figure


def timeline_svg(timeline: Timeline) -> str:
    """SVG with a row per pipeline stage; the CSS classes of its bars are `forward` or `backward`, and the chunk."""
    height = _ROW * len(timeline.ranks)
    scale = _WIDTH / timeline.length
    bars = []
    for stage, timed in enumerate(timeline.ranks):
        for one in timed:
            kind = "forward" if one.action.forward else "backward"
            position = f'x="{one.start * scale:.2f}" y="{stage * _ROW + 3}"'
            size = f'width="{(one.end - one.start) * scale:.2f}" height="{_ROW - 6}"'
            bars.append(f'<rect class="{kind} chunk{min(one.action.chunk, 3)}" {position} {size}/>')
    label = f"{len(timeline.ranks)} stages of a pipeline and their passes in time"
    head = (
        f'<svg id="passes" viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none" role="img" aria-label="{label}">'
    )
    return head + "".join(bars) + "</svg>"
