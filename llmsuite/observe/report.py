"""The report of a run, or of several side by side: one self-contained HTML page, and its charts as PNG files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.web.document import Document, json_for_page, make_document, render, vendored
from llmsuite.observe.charts import plotted_charts
from llmsuite.observe.plots import pipeline_timeline, timeline_svg, write_plots
from llmsuite.observe.runs import Record, Run, differing_keys, flatten
from llmsuite.observe.summary import cards, event_line

_HERE = Path(__file__).parent
_SHOWN_EVENTS = 200


def write_report(runs: Sequence[Run], pictures: bool = False) -> list[Path]:
    """Write `report.html` into the directory of the first run; returns the files.

    Args:
        runs: shown side by side.
        pictures: also write each chart as `report/NAME.png`, with matplotlib.

    Raises:
        UserError: no step is recorded yet, matplotlib is needed and missing, or the directory cannot be written to.
    """
    directory = runs[0].directory
    if not runs[0].steps:
        raise UserError(f"{directory}: no step is recorded yet")
    written = [directory / "report.html"]
    try:
        written[0].write_text(page(runs).html, encoding="utf-8")
        if pictures:
            (directory / "report").mkdir(exist_ok=True)
            written += write_plots(list(plotted_charts(runs)), pipeline_timeline(runs[0].recipe), directory / "report")
    except OSError as error:
        raise UserError(f"{error.filename or directory}: cannot be written: {error.strerror}") from error
    return written


def page(runs: Sequence[Run], live: bool = False) -> Document:
    """The HTML page. A live page starts empty and polls its server for `content`."""
    data: Record = {"html": "", "charts": []}
    if not live:
        data = content(runs)
    return make_document(
        _HERE / "report.html",
        [vendored("uplot.css"), _HERE / "report.css"],
        [vendored("uplot.js"), _HERE / "charts.js", _HERE / "report.js"],
        title=" and ".join(run.directory.name or str(run.directory) for run in runs),
        live=live,
        data=json_for_page(data),
    )


def content(runs: Sequence[Run]) -> Record:
    """The part of the page that changes during a run: `html` of the text, and data of the `charts`."""
    first = runs[0]
    has_several = len(runs) > 1
    recipes = [run.recipe for run in runs]
    differing = [(key, list(map(_text, values))) for key, values in differing_keys(*recipes)]
    samples = []
    for rows in first.samples:
        samples.append([_completion(row, before) for before, row in zip([None, *rows], rows)])
    answers = [(step, list(map(_answer, rows))) for step, rows in first.answers if rows]
    written = render(
        _HERE / "content.html",
        names=[run.directory.name for run in runs],
        cards=[] if has_several else cards(first),
        summary=_summary(runs) if has_several else [],
        differing=differing,
        samples=samples,
        steps=[rows[0]["step"] for rows in first.samples],
        answers=answers,
        schedule=_schedule(first.recipe),
        events=[event_line(event) for event in reversed(first.events[-_SHOWN_EVENTS:])],
        recipe=[(key, _text(value)) for key, value in flatten(first.recipe)],
        environment=[(key, _text(value)) for key, value in flatten(first.environment)],
    )
    return {"html": written, "charts": [plotted.data() for plotted in plotted_charts(runs)]}


def _schedule(recipe: Record) -> Any:
    from markupsafe import Markup

    timeline = pipeline_timeline(recipe)
    if timeline is None:
        return None
    return f"{timeline.bubble:.1%}", len(timeline.ranks[0]), Markup(timeline_svg(timeline))


def _summary(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The texts of the cards of several runs, as rows of a table."""
    texts = []
    for run in runs:
        texts.append({card.label: f"{card.value} ({card.note})" if card.note else card.value for card in cards(run)})
    rows = []
    for label in dict.fromkeys(label for of_run in texts for label in of_run):
        rows.append((label, [of_run.get(label, "") for of_run in texts]))
    return rows


def _completion(row: Record, before: Record | None) -> Record:
    """A completion for the page: its prompt where that differs from the one before, its text, and its numbers."""
    names = row.get("rewards") or {}
    scores = [("reward", row.get("reward")), *names.items(), ("advantage", row.get("advantage"))]
    numbers = [(name, "missing" if score is None else f"{score:.4g}") for name, score in scores]
    more = [(key, str(row[key])) for key in ("num_tokens", "finish_reason") if key in row]
    same = before is not None and before.get("group") == row.get("group")
    return {
        "prompt": None if same else str(row.get("prompt", "")),
        "text": _completion_text(row),
        "numbers": [*numbers, *more],
    }


def _answer(row: Record) -> Record:
    """An answer of an evaluation for the page."""
    return {name: str(row.get(key, "")) for name, key in (("prompt", "prompt"), ("text", "output"), ("tgt", "tgt"))}


def _completion_text(row: Record) -> str:
    """The text of a completion; of an episode the turns with their roles, one per line."""
    turns = row.get("turns")
    if not turns:
        return str(row.get("text", ""))
    lines = [f"{turn['role']}: {turn['content']}" for turn in turns]
    if row.get("failure"):
        lines.append(f"(failed: {row['failure']})")
    return "\n".join(lines)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
