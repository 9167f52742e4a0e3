"""`completions.jsonl`: what is in it after kills and resumes, and what the report shows of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmsuite.observe.completions import COMPLETIONS, CompletionsFile, sampled_completions
from llmsuite.observe.report import content
from llmsuite.observe.runs import read_run
from llmsuite.rl.completion import Completion
from llmsuite.rl.completion_rows import completion_rows
from tests.support.run_folder import make_run


def write(path: Path, resume_step: int, steps: dict[int, int]) -> None:
    """Write numbered rows, the given number for each step."""
    file = CompletionsFile(path, resume_step)
    for step, count in steps.items():
        file.write(step, [{"number": number, "text": "é\n\ud800"} for number in range(count)])
    file.close()


def read(path: Path) -> list[tuple[int, int]]:
    return [(row["step"], row["number"]) for row in map(json.loads, path.read_text("utf-8", "replace").splitlines())]


def test_a_resumed_run_samples_later_steps_again(tmp_path: Path) -> None:
    path = tmp_path / COMPLETIONS
    write(path, 0, {1: 2, 2: 2, 3: 1})
    write(path, 2, {3: 2})
    assert read(path) == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    write(path, 0, {1: 1})
    assert read(path) == [(1, 0)]


@given(st.integers(0, 400), st.integers(0, 5))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_line_truncated_by_a_kill_is_dropped(tmp_path: Path, cut: int, resume_step: int) -> None:
    path = tmp_path / COMPLETIONS
    path.unlink(missing_ok=True)
    write(path, 0, {1: 2, 2: 1, 4: 3})
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    write(path, resume_step, {9: 1})
    lines = whole[:cut].split(b"\n")[:-1]
    kept = [line for line in lines if json.loads(line)["step"] <= resume_step]
    assert path.read_bytes().split(b"\n")[:-2] == kept
    assert read(path)[-1] == (9, 0)


def shown(path: Path, rollouts: int, most: int) -> list[tuple[int, list[int]]]:
    return [(r[0]["step"], [row["number"] for row in r]) for r in sampled_completions(path, rollouts, most)]


def test_rollouts_are_sampled_over_the_run(tmp_path: Path) -> None:
    assert shown(tmp_path, 3, 5) == []
    write(tmp_path / COMPLETIONS, 0, {1: 2, 5: 4})
    with open(tmp_path / COMPLETIONS, "a") as file:
        file.write('{"step": 6, "num')
    assert shown(tmp_path, 3, 3) == [(1, [0, 1]), (5, [0, 1, 2])]
    assert shown(tmp_path, 1, 1) == [(5, [0])]
    write(tmp_path / COMPLETIONS, 0, dict.fromkeys(range(1, 101), 4))
    found = shown(tmp_path, 5, 2)
    assert [numbers for _, numbers in found] == [[0, 1]] * 5
    assert [abs(step - expected) <= 3 for (step, _), expected in zip(found, (1, 25, 50, 75, 100))] == [True] * 5


def test_of_a_large_file_a_little_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmsuite.observe.completions._TAIL_BYTES", 300)
    write(tmp_path / COMPLETIONS, 0, {1: 50, 2: 50})
    first, last = sampled_completions(tmp_path, 4, 50)
    assert 0 < len(first) < 50
    assert [row["number"] for row in first] == list(range(len(first)))
    assert [row["number"] for row in last] == list(range(50 - len(last), 50)), "the end of the last one"


def completion(text: str, group: int, number: int) -> Completion:
    more: dict[str, Any] = {"columns": {}, "group": group, "number": number, "prompt": f"Prompt {group}?"}
    return Completion(prompt_ids=[1], ids=[2, 3], logprobs=[-1, -1], finish_reason="stop", text=text, **more)


def rows() -> list[dict[str, Any]]:
    groups = [[completion(f"<b>{group}{number}</b>", group, number) for number in range(2)] for group in range(2)]
    scores = np.array([[[1.0, 0.5], [0.0, np.nan]], [[1.0, 0.0], [1.0, 0.0]]])
    rewards = np.array([[1.5, np.nan], [1.0, 1.0]])
    return completion_rows(groups, scores, ("exact", "form"), rewards, np.array([[0.0, 0.0], [0.25, -0.25]]), 7)


def test_rows_have_the_rewarded_completions() -> None:
    found = rows()
    assert found[1] == {
        "version": 7,
        "group": 0,
        "number": 1,
        "prompt": "Prompt 0?",
        "text": "<b>01</b>",
        "finish_reason": "stop",
        "num_tokens": 2,
        "reward": None,
        "rewards": {"exact": 0.0, "form": None},
        "advantage": 0.0,
    }
    assert [row["advantage"] for row in found] == [0.0, 0.0, 0.25, -0.25]


def test_the_report_shows_completions(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", num_steps=3)
    file = CompletionsFile(run / COMPLETIONS, 0)
    file.write(3, rows())
    file.close()
    with open(run / "metrics.jsonl", "a") as metrics:
        metrics.write(
            json.dumps({"step": 4, "loss": 0.0, "reward": 0.5, "completions/length": 3.0, "entropy": 1.5}) + "\n"
        )
    found = content([read_run(run)])
    text = found["html"]
    assert "<summary>Completions of step 3</summary>" in text
    assert "&lt;b&gt;01&lt;/b&gt;" in text
    assert text.count("Prompt 0?") == text.count("Prompt 1?") == 1
    assert "<span>reward <b>missing</b></span>" in text
    assert "<span>advantage <b>0.25</b></span>" in text
    names = [chart["name"] for chart in found["charts"]]
    assert [name for name in ("reward", "completions", "entropy", "kl") if name in names] == [
        "reward",
        "completions",
        "entropy",
    ]


def test_the_report_shows_the_turns_of_episodes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", num_steps=1)
    turns = [{"role": r, "content": c} for r, c in (("assistant", "5"), ("user", "higher"), ("assistant", "7"))]
    file = CompletionsFile(run / COMPLETIONS, 0)
    file.write(1, [{**rows()[0], "text": "7", "turns": turns}, {**rows()[1], "turns": turns[:1], "failure": "it hung"}])
    file.close()
    text = content([read_run(run)])["html"]
    assert "<pre>assistant: 5\nuser: higher\nassistant: 7</pre>" in text
    assert "<pre>assistant: 5\n(failed: it hung)</pre>" in text
