"""The report of a run, or of several side by side: one page that needs nothing else, and its charts as PNGs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.observe.charts import drawn_charts
from llmsuite.observe.pictures import passes, passes_svg, write_pictures
from llmsuite.observe.runs import Record, Run, differing, flat
from llmsuite.observe.summary import cards, event_line
from llmsuite.web.document import Document, json_for_page, make_document, render, vendored

_HERE = Path(__file__).parent
_SHOWN_EVENTS = 200


def write_report(runs: Sequence[Run], pictures: bool = False) -> list[Path]:
    """Write `report.html` into the directory of the first run; returns the files.

    Args:
        runs: drawn beside each other.
        pictures: write each chart as `report/NAME.png` too, with matplotlib.

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
            written += write_pictures(list(drawn_charts(runs)), passes(runs[0].recipe), directory / "report")
    except OSError as error:
        raise UserError(f"{error.filename or directory}: cannot be written: {error.strerror}") from error
    return written


def page(runs: Sequence[Run], live: bool = False) -> Document:
    """The whole page. A live page starts empty and polls its server for `content`."""
    empty: Record = {"html": "", "charts": []}
    return make_document(
        _HERE / "report.html",
        [vendored("uplot.css"), _HERE / "report.css"],
        [vendored("uplot.js"), _HERE / "charts.js", _HERE / "report.js"],
        title=" and ".join(run.directory.name or str(run.directory) for run in runs),
        live=live,
        data=json_for_page(empty if live else content(runs)),
    )


def content(runs: Sequence[Run]) -> Record:
    """The part of the page that changes during a run: `html` of all that is written, `charts` of what is drawn."""
    first = runs[0]
    written = render(
        _HERE / "content.html",
        names=[run.directory.name for run in runs],
        cards=cards(first) if len(runs) == 1 else [],
        summary=_summary(runs) if len(runs) > 1 else [],
        differing=[
            (key, [_text(value) for value in values]) for key, values in differing(*(run.recipe for run in runs))
        ],
        samples=[[_said(row, before) for before, row in zip([None, *rows], rows)] for rows in first.samples],
        steps=[rows[0]["step"] for rows in first.samples],
        answers=[(step, [_answer(row) for row in rows]) for step, rows in first.answers if rows],
        schedule=_schedule(first.recipe),
        events=[event_line(event) for event in reversed(first.events[-_SHOWN_EVENTS:])],
        recipe=[(key, _text(value)) for key, value in flat(first.recipe)],
        environment=[(key, _text(value)) for key, value in flat(first.environment)],
    )
    return {"html": written, "charts": [drawn.data() for drawn in drawn_charts(runs)]}


def _schedule(recipe: Record) -> Any:
    from markupsafe import Markup

    timeline = passes(recipe)
    return (
        None if timeline is None else (f"{timeline.bubble:.1%}", len(timeline.ranks[0]), Markup(passes_svg(timeline)))
    )


def _summary(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """What the cards say of several runs, as rows."""
    made = [{card.label: card for card in cards(run)} for run in runs]
    labels = dict.fromkeys(label for one in made for label in one)
    shown = [[one.get(label) for one in made] for label in labels]
    return [
        (label, [f"{card.value} ({card.note})" if card and card.note else card.value if card else "" for card in row])
        for label, row in zip(labels, shown)
    ]


def _said(row: Record, before: Record | None) -> Record:
    """A completion for the page: its prompt where that is another one than before, what it says, and its numbers."""
    names = row.get("rewards") or {}
    scores = [("reward", row.get("reward")), *names.items(), ("advantage", row.get("advantage"))]
    numbers = [(name, "missing" if score is None else f"{score:.4g}") for name, score in scores]
    more = [(key, str(row[key])) for key in ("num_tokens", "finish_reason") if key in row]
    same = before is not None and before.get("group") == row.get("group")
    return {"prompt": None if same else str(row.get("prompt", "")), "text": _written(row), "numbers": [*numbers, *more]}


def _answer(row: Record) -> Record:
    """An answer of an evaluation for the page."""
    return {name: str(row.get(key, "")) for name, key in (("prompt", "prompt"), ("text", "output"), ("tgt", "tgt"))}


def _written(row: Record) -> str:
    """What a completion says: the turns of an episode each with its role, a line for each."""
    turns = row.get("turns")
    if not turns:
        return str(row.get("text", ""))
    said = [f"{turn['role']}: {turn['content']}" for turn in turns]
    return "\n".join([*said, f"(failed: {row['failure']})"] if row.get("failure") else said)


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
