"""What matplotlib draws of a run, and the passes of its pipeline, in SVG for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.observe.charts import Drawn
from llmsuite.observe.runs import Record
from llmsuite.planning.plot import schedule_figure
from llmsuite.planning.schedule import Timeline, orders, simulate

_SHOWN_ROUNDS = 4
_NEEDS = "report --png: needs the package matplotlib; install it with: pip install matplotlib"
_WIDTH, _ROW = 1000, 30
"""Size of the picture of a pipeline, and of a row in it, in its own units."""


def write_pictures(charts: Sequence[Drawn], timeline: Timeline | None, directory: Path) -> list[Path]:
    """Write `NAME.png` for each chart, and `schedule.png` for a pipeline; returns the files.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        figures = [(drawn.chart.name, _figure(drawn)) for drawn in charts]
        if timeline is not None:
            unit = "forward passes of a part, if all take as long"
            figures.append(("schedule", schedule_figure(timeline, unit, 6)))
    except ImportError as error:
        raise UserError(_NEEDS) from error
    for name, figure in figures:
        figure.savefig(directory / f"{name}.png", format="png", dpi=110)
    return [directory / f"{name}.png" for name, _ in figures]


def _figure(drawn: Drawn) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for curve in drawn.curves:
        colour, style = f"C{curve.colour % 10}", "--" if curve.dashed else "-"
        line: dict[str, Any] = {"linewidth": 1.2, "linestyle": style, "color": colour}
        axes.plot(curve.steps, curve.values, label=curve.label, marker="." if len(curve.steps) < 30 else "", **line)
    values = [value for curve in drawn.curves for value in curve.values]
    if drawn.chart.log and min(values) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, at: f"{value:.4g}"))
        if math.log10(max(values) / min(values)) > 1:
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, at: f"{value:.4g}"))
    axes.set(title=drawn.chart.title, xlabel="step", ylabel=drawn.chart.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if 1 < len(drawn.curves) <= 16:
        axes.legend(fontsize="small")
    return figure


def passes(recipe: Record) -> Timeline | None:
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
    # backward passes have twice the products, or as many if the model is frozen; plus recompute
    kinds = (("lora", "rank"), ("reft", "rank"), ("prefix", "tokens"))
    backward = 1.0 if any((recipe.get(name) or {}).get(size) is not None for name, size in kinds) else 2.0
    backward += engine.get("recompute") == "full"
    parts = stages * chunks
    return simulate(orders(kind, stages, drawn, chunks), [1.0] * parts, [backward] * parts)


def passes_svg(timeline: Timeline) -> str:
    """A row a stage of the pipeline: `forward` and `backward` are classes of its bars, as is the chunk."""
    height = _ROW * len(timeline.ranks)
    scale = _WIDTH / timeline.length
    bars = []
    for stage, timed in enumerate(timeline.ranks):
        for one in timed:
            kind = "forward" if one.action.forward else "backward"
            place = f'x="{one.start * scale:.2f}" y="{stage * _ROW + 3}"'
            size = f'width="{(one.end - one.start) * scale:.2f}" height="{_ROW - 6}"'
            bars.append(f'<rect class="{kind} chunk{min(one.action.chunk, 3)}" {place} {size}/>')
    label = f"{len(timeline.ranks)} stages of a pipeline and their passes in time"
    head = (
        f'<svg id="passes" viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none" role="img" aria-label="{label}">'
    )
    return head + "".join(bars) + "</svg>"
