"""`generations/step-N.jsonl`: what is there after a run goes back, and what the page of a run shows of it."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path

import pytest

from llmsuite.base.errors import UserError
from llmsuite.observe.generations import GENERATIONS, drop_generations, sampled_generations, write_generations
from llmsuite.observe.report import content
from llmsuite.observe.runs import read_run
from llmsuite.observe.watch import make_server
from tests.support.run_folder import make_run


def answer(step: int, number: int = 0) -> dict[str, str]:
    return {"prompt": f"prompt {number}", "output": f"answer {number} of {step}", "tgt": f"reference <{number}>"}


def write(run: Path, *steps: int, count: int = 1) -> None:
    for step in steps:
        write_generations(run, step, [answer(step, number) for number in range(count)])


def steps(run: Path, most: int = 99) -> list[int]:
    return [step for step, _ in sampled_generations(run, most, 1)]


def test_a_run_that_rolls_back_drops_repeated_steps(tmp_path: Path) -> None:
    write(tmp_path, 2, 10, 9)
    (tmp_path / GENERATIONS / "step-best.jsonl").write_text("not ours")
    assert steps(tmp_path) == [2, 9, 10]
    drop_generations(tmp_path, 9)
    assert steps(tmp_path) == [2, 9]
    drop_generations(tmp_path, 0)
    assert [path.name for path in (tmp_path / GENERATIONS).iterdir()] == ["step-best.jsonl"]
    drop_generations(tmp_path / "no run yet", 0)


def test_of_many_evaluations_some_are_shown_and_always_the_last(tmp_path: Path) -> None:
    write(tmp_path, *range(10, 210, 10), count=3)
    assert steps(tmp_path, 4) == [50, 100, 150, 200]
    assert steps(tmp_path, 1) == [200]
    ((_, rows),) = sampled_generations(tmp_path, 1, 2)
    assert rows == [answer(200, 0), answer(200, 1)]


def test_the_page_of_a_run_shows_answers_by_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "Answers at evaluations" not in content([read_run(run)])["html"]
    write(run, 2, 5, count=2)
    write_generations(run, 7, [{**answer(7), "output": " "}])
    html = content([read_run(run)])["html"]
    places = [html.index(f"Answers after step {step}<") for step in (2, 5, 7)]
    shown = [
        html.index(text) for text in ("answer 0 of 2<", "answer 1 of 2<", "answer 0 of 5<", "The answer is empty.")
    ]
    assert sorted([*places, *shown]) == [places[0], *shown[:2], places[1], shown[2], places[2], shown[3]]
    assert "reference &lt;0&gt;" in html
    assert "prompt 1" in html


def test_a_run_that_is_watched_shows_new_answers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", end=None)
    write(run, 1)
    server = make_server([run], 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:

        def get(tag: str = "") -> tuple[str, str]:
            query = urllib.request.Request(server.address.replace("/?", "/content?"))
            query.add_header("If-None-Match", tag)
            with urllib.request.urlopen(query) as answered:
                return json.load(answered)["html"], answered.headers["ETag"]

        before, tag = get()
        assert "answer 0 of 1" in before
        write(run, 2)
        assert "answer 0 of 2" in get(tag)[0]
    finally:
        server.shutdown()
        server.server_close()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / GENERATIONS).write_text("")
    with pytest.raises(UserError, match=r"step-3\.jsonl: cannot be written: (Not a directory|File exists)"):
        write(tmp_path, 3)
