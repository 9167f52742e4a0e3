"""`make demo`: its data, and the questions that it asks before and after."""

from __future__ import annotations

import csv
import importlib.util
import json

from tests.support.paths import DATA, ROOT


def test_the_questions_of_the_demo_are_not_in_its_data() -> None:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "style" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    recipe = json.loads(demo.RECIPE.read_text(encoding="utf-8"))
    with open(ROOT / recipe["data"]["train"], encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = recipe["data"]["columns"]
    questions = [row[columns["instruction"]] for row in rows]
    assert len(rows) == len({*questions}) == 50
    assert not {*questions} & {*demo.QUESTIONS}


def test_each_answer_has_the_style() -> None:
    with open(DATA / "style" / "harbour.csv", encoding="ascii", newline="") as file:
        answers = [row["Our answer"] for row in csv.DictReader(file)]
    assert [a for a in answers if not a.startswith("Ahoy, matey! ") or not a.endswith(" Fair winds to ye!")] == []
