"""A pipeline's schedule as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.planning.schedule import Timeline


def plot_schedule(timeline: Timeline, path: Path) -> None:
    """Draw a row a rank into a file that `extras.check_plot` knows; see `schedule_figure`. Raises UserError when it
    cannot be written."""
    figure = schedule_figure(timeline, "FLOPs of a rank", 14)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"--plot: {path} cannot be written: {error.strerror}") from error


def schedule_figure(timeline: Timeline, unit: str, width: float) -> Any:
    """A row a rank: forward passes blue, darker in later chunks, backward ones orange.

    Args:
        timeline: what is drawn.
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
