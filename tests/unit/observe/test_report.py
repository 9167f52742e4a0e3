"""What is read from the directory of a run, and the page that is made of it."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from llmsuite.cli.main import main
from llmsuite.errors import UserError
from llmsuite.observe.events import add_event, environment, read_events
from llmsuite.observe.report import figures, page, write_report
from llmsuite.observe.runs import differing, find_runs, read_run
from llmsuite.observe.watch import make_server
from llmsuite.planning.schedule import orders, simulate
from tests.unit.observe.run_folder import PIPELINE, make_run, record

CHARTS = ["loss", "learning_rate", "grad_norm", "throughput", "memory", "data_wait", "ranks"]
Capsys = pytest.CaptureFixture[str]


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", num_steps=3))
    assert run.series("loss") == ([1, 2, 3], [3.0, 1.5, 1.0])
    assert run.series("eval/loss") == ([3], [0.75])
    assert [r["busy_seconds"] for r in run.ranks] == [[0.1, 0.2]] * 3
    assert run.status == "ended"


def test_a_run_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", num_steps=2, end=None)
    for name in ("metrics.jsonl", "events.jsonl"):
        with open(path / name, "a") as file:
            file.write('{"step": 3, "lo')
    run = read_run(path)
    assert run.series("loss")[0] == [1, 2]
    assert run.status == "running"


@pytest.mark.parametrize("event", ["ended", "stopped", "failed", "hung"])
def test_the_last_event_is_how_a_run_stands(tmp_path: Path, event: str) -> None:
    path = make_run(tmp_path / "a", end=None)
    add_event(path, event, exit_code=3)
    assert read_run(path).status == event
    assert read_events(path)[-1]["exit_code"] == 3
    add_event(path, "resumed", step=2)
    assert read_run(path).status == "running"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the directory of a run"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "recipe.json").write_text("{")
    with pytest.raises(UserError, match=r"recipe\.json: is not JSON"):
        read_run(tmp_path)


def test_recipes_are_compared_key_by_key() -> None:
    a, b = {"train": {"lr": 1, "steps": 5}, "loggers": []}, {"train": {"lr": 2, "steps": 5}, "loggers": [], "seed": 1}
    assert differing(a, b) == [("train.lr", [1, 2]), ("seed", [None, 1])]


def test_the_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hush")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    found = environment("cpu", "pp1", 1)
    assert "hush" not in json.dumps(found)
    assert found["variables"]["OMP_NUM_THREADS"] == "7"


class Page(HTMLParser):
    """Ids, what is referred to, and addresses in a page."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "xlink:href", "action"):
                self.addresses.append(str(value))


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text = page([read_run(make_run(tmp_path / "a"))])
    found = Page(text)
    assert found.tags.count("svg") == len(CHARTS)
    assert "script" not in found.tags
    assert all(address.startswith("#") for address in found.addresses)
    used = {a[1:] for a in found.addresses} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert used <= set(found.ids)
    assert len(set(found.ids)) == len(found.ids), "an id is there twice"
    assert "&lt;host&gt;" in text
    assert "<host>" not in text


def test_the_schedule_of_a_pipeline_is_drawn(tmp_path: Path) -> None:
    """As `llmsuite.parallel.schedule` orders it: two ranks with two chunks each, 8 samples of two data ranks."""
    run = read_run(make_run(tmp_path / "a", sections=PIPELINE, global_batch_size=8))
    drawn = {name: figure for name, _, figure in figures([run])}
    assert list(drawn) == [*CHARTS, "schedule"]
    bars = [bar for bars in drawn["schedule"].axes[0].collections for bar in bars.get_paths()]
    assert len(bars) == 2 * 4 * 2 * 2
    played = simulate(orders("interleaved", 2, 4, 2), [1.0] * 4, [2.0] * 4)
    assert max(bar.vertices[:, 0].max() for bar in bars) == played.length
    assert f"ranks wait {played.bubble:.1%}" in page([run])
    long = read_run(make_run(tmp_path / "b", sections=PIPELINE, global_batch_size=2000))
    assert f"of {4 * 2 * 2 * 2} passes each" in page([long])


def test_no_picture_of_passes_whose_number_depends_on_lengths(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", sections=PIPELINE, global_batch_size=8, micro_batch_tokens=512))
    assert [name for name, _, _ in figures([run])] == CHARTS


def test_two_runs_are_drawn_side_by_side(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / "one")), read_run(make_run(tmp_path / "two", learning_rate=0.5))]
    text = page(runs)
    assert "Recipes differ in" in text
    assert "<td>train.learning_rate</td><td>0.001</td><td>0.5</td>" in text
    assert ">two train</text>" in text


def test_a_report_is_a_page_and_pictures(tmp_path: Path, capsys: Capsys) -> None:
    path = make_run(tmp_path / "a")
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(path / "report.html"), *(str(path / "report" / f"{name}.png") for name in CHARTS)
    ]  # fmt: skip
    for name in CHARTS:
        assert (path / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_no_step_no_report(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a")
    (path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no step is recorded yet"):
        write_report([read_run(path)])


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        write_report([read_run(make_run(tmp_path / "a"))])


def test_runs_are_listed_shown_and_compared(tmp_path: Path, capsys: Capsys) -> None:
    one, two = make_run(tmp_path / "x/one"), make_run(tmp_path / "two", end="hung", learning_rate=0.5)
    assert find_runs(tmp_path) == [two, one]
    assert main(["runs", "list", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [[str(two), "sft", "hung", "5", "0.6", "1005"], [str(one), "sft", "ended", "5", "0.6", "1005"]]
    assert main(["runs", "show", str(two)]) == 0
    out = capsys.readouterr().out
    assert "status" in out
    assert "2026-01-01T00:01:00.000+00:00  hung  step 5" in out
    assert main(["runs", "compare", str(one), str(two)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["status", "ended", "hung"] in rows
    assert ["train.learning_rate", "0.001", "0.5"] in rows
    assert main(["runs", "list", str(tmp_path / "nowhere")]) == 0
    assert capsys.readouterr().out == "no runs\n"
    assert main(["runs", "compare", str(one)]) == 2
    assert main(["runs", "show"]) == 2


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A run that goes on, and the address it is served at."""
    path = make_run(tmp_path / "a", end=None)
    server = make_server(path, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield path, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_served_page_changes_with_the_run(served: tuple[Path, str]) -> None:
    path, url = served
    with urllib.request.urlopen(url + "/") as answer:
        assert "fetch(" in answer.read().decode()
    with urllib.request.urlopen(url + "/content") as answer:
        tag = answer.headers["ETag"]
        assert "<td>last step</td><td>5</td>" in answer.read().decode()
    same = urllib.request.Request(url + "/content", headers={"If-None-Match": tag})
    with pytest.raises(urllib.error.HTTPError, match="304"):
        urllib.request.urlopen(same)
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record(6, 0.4)) + "\n")
    with urllib.request.urlopen(same) as answer:
        assert "<td>last step</td><td>6</td>" in answer.read().decode()


@pytest.mark.parametrize(("path", "host", "code"), [("/", "evil.example:80", 403), ("/recipe.json", None, 404)])
def test_nothing_else_is_served(served: tuple[Path, str], path: str, host: str | None, code: int) -> None:
    with pytest.raises(urllib.error.HTTPError, match=str(code)):
        urllib.request.urlopen(urllib.request.Request(served[1] + path, headers={"Host": host} if host else {}))


def test_a_port_that_is_taken_is_told(served: tuple[Path, str]) -> None:
    port = int(served[1].rpartition(":")[2])
    with pytest.raises(UserError, match=f"--port {port}: "):
        make_server(served[0], port)
