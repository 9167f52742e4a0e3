"""Display of a comparison: the first difference, a table of modules, a plot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.observe.activations.compare import Difference, Report, Row

_WHAT = {
    "parameter": "the parameter {name}",
    "output": "the output of {name}",
    "loss": "the loss, although all outputs agree",
    "output gradient": "the gradient by the output of {name}",
    "parameter gradient": "the gradient of the parameter {name}",
}


def summary_lines(report: Report) -> Iterator[str]:
    """Lines about the first differences."""
    a, b = report.names
    common, only_a, only_b = report.num_tokens
    if report.missing:
        yield f"not on both sides, or of another shape: {', '.join(report.missing)}"
    forward = report.first_forward
    backward = report.first_backward
    if forward is not None and forward.kind == "tokens":
        yield (
            f"first difference: the tokens. {common} contexts are in both, {only_a} in {a} only, {only_b} in {b} only: "
            "the sides do not train on the same samples"
        )
    elif forward is not None:
        yield f"first difference in the forward pass: {_say(forward)}"
    if backward is not None:
        follows = ""
        if forward is not None:
            follows = " (it may follow from that)"
        yield f"first difference in the backward pass: {_say(backward)}{follows}"
    if report.scale is not None:
        yield f"every gradient of a parameter in {b} is {report.scale:.6g} times that in {a}"
    if report.is_equal:
        yield f"no difference above {report.tolerance:.0e} (relative)"


def _say(difference: Difference) -> str:
    name = f"{difference.name} ({difference.of})" if difference.of else difference.name
    return f"{_WHAT[difference.kind].format(name=name)}, by {difference.relative:.1e} (relative)"


def shown_rows(report: Report, every: bool) -> list[Row]:
    """The rows of a table: all, or the outermost modules, and the modules inside those with a first difference."""
    if every:
        return list(report.rows)
    firsts = [found.name for found in (report.first_forward, report.first_backward) if found is not None]
    names = {row.module for row in report.rows}
    outermost = {name: _outermost(name, names) for name in names}
    opened = {outermost.get(name) or outermost.get(name.rpartition(".")[0]) for name in firsts}
    result = []
    for row in report.rows:
        around = outermost[row.module]
        if around in opened:
            result.append(row)
        elif around == row.module:
            inside = [other for other in report.rows if outermost[other.module] == around]
            result.append(_folded(row, inside))
    return result


def _outermost(name: str, names: set[str]) -> str:
    parts = name.split(".")
    around = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((prefix for prefix in around if prefix in names), name)


def _folded(row: Row, inside: Sequence[Row]) -> Row:
    """A row with the parameters of all modules inside it."""
    parameters: dict[str, float] = {}
    gradients: dict[str, float] = {}
    for other in inside:
        parameters.update(other.parameters)
        gradients.update(other.parameter_gradients)
    return Row(row.module, row.output, row.gradient, parameters, gradients)


def table(report: Report, every: bool = False) -> Any:
    """A `rich` table of the differences of modules. Those above the tolerance are red and marked by a star."""
    from rich.table import Table

    def cell(value: float | None) -> str:
        if value is None:
            return ""
        text = "inf" if math.isinf(value) else f"{value:.1e}"
        return f"[red]{text} *[/red]" if value > report.tolerance else text

    result = Table("module", box=None, pad_edge=False)
    for title in ("output", "gradient", "parameters", "their gradients"):
        result.add_column(title, justify="right")
    for row in shown_rows(report, every):
        parameters, gradients = (max(v.values(), default=None) for v in (row.parameters, row.parameter_gradients))
        result.add_row(row.module, *map(cell, (row.output, row.gradient, parameters, gradients)))
    return result


def plot(report: Report, path: Path) -> None:
    """Plot the differences of modules, in the order of the forward pass, into a file that `extras.check_plot` has
    checked. Raises UserError when it cannot be written."""
    from matplotlib.figure import Figure

    rows = report.rows
    figure = Figure(figsize=(max(8.0, 0.16 * len(rows)), 5.5), layout="constrained")
    axes = figure.subplots()
    series = {
        "output": [row.output for row in rows],
        "gradient by the output": [row.gradient for row in rows],
        "parameters": [max(row.parameters.values(), default=None) for row in rows],
        "their gradients": [max(row.parameter_gradients.values(), default=None) for row in rows],
    }
    for (label, values), mark in zip(series.items(), "o^sv"):
        points = [(i, max(v, 1e-9)) for i, v in enumerate(values) if v is not None and math.isfinite(v)]
        axes.plot([i for i, _ in points], [v for _, v in points], mark, label=label, markersize=4, alpha=0.7)
    axes.axhline(report.tolerance, color="grey", linestyle="--", linewidth=1, label="tolerance")
    index = {row.module: i for i, row in enumerate(rows)}
    for found, color in ((report.first_forward, "tab:red"), (report.first_backward, "tab:purple")):
        if found is None:
            continue
        module = found.name if found.name in index else found.name.rpartition(".")[0]
        if module in index:
            axes.axvline(index[module], color=color, linewidth=1, label=f"first: {found.kind} {found.name}")
    axes.set(yscale="log", ylabel="relative difference", xlim=(-1, len(rows)))
    axes.set_xticks(range(len(rows)), [row.module for row in rows], rotation=90, fontsize=6)
    axes.set_title(f"{report.names[0]} and {report.names[1]}")
    axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"--plot: {path} cannot be written: {error.strerror}") from error
