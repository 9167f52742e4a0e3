"""Reading the directory of a run, and its report page."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
import platform
import re
import socket
import struct
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.base.locks import lock_directory
from llmsuite.base.web.document import VENDORED
from llmsuite.cli.main import main
from llmsuite.observe.charts import Curve, plotted_charts
from llmsuite.observe.events import add_event, environment, read_events
from llmsuite.observe.plots import pipeline_timeline, timeline_svg
from llmsuite.observe.report import content, page, write_report
from llmsuite.observe.runs import differing_keys, find_runs, has_records, read_run
from llmsuite.observe.summary import cards, event_line, format_duration
from llmsuite.observe.watch import make_server
from llmsuite.parallel.timeline import orders, simulate
from tests.support.paths import ROOT
from tests.support.report_charts import CHARTS
from tests.support.run_folder import PIPELINE, make_preferences, make_run, record

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
def test_the_status_is_that_of_the_last_event(tmp_path: Path, event: str) -> None:
    path = make_run(tmp_path / "a", end=None)
    add_event(path, event, exit_code=3)
    assert read_run(path).status == event
    assert read_events(path)[-1]["exit_code"] == 3
    add_event(path, "resumed", step=2)
    assert read_run(path).status == "running"


def test_a_run_that_did_not_record_its_end_has_died(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", end=None)
    environment = {"host": platform.node()}
    (path / "environment.json").write_text(json.dumps(environment))
    with lock_directory(path):
        assert read_run(path).status == "running"
    died = read_run(path)
    assert died.status == "died"
    assert died.last_record_time is not None
    found = {card.label: (card.value, card.note) for card in cards(died, died.last_record_time + 90)}
    assert found["Status"] == ("died", "last record 1 min 30 s ago")
    (path / "environment.json").write_text(json.dumps({"host": "another"}))
    assert read_run(path).status == "running", "whose locks are not seen from here"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the directory of a run"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "recipe.json").write_text("{")
    with pytest.raises(UserError, match=r"recipe\.json: is not JSON"):
        read_run(tmp_path)


def test_recipes_are_compared_key_by_key() -> None:
    a = {"train": {"lr": 1, "steps": 5}, "loggers": []}
    b = {"train": {"lr": 2, "steps": 5}, "loggers": [], "seed": 1}
    assert differing_keys(a, b) == [("train.lr", [1, 2]), ("seed", [None, 1])]


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
    document = page([read_run(make_run(tmp_path / "a"))])
    found = Page(document.html)
    assert all(address.startswith(("#", "data:")) for address in found.addresses)
    assert len(set(found.ids)) == len(found.ids), "an id is there twice"
    assert "&lt;host&gt;" in content([read_run(tmp_path / "a")])["html"]
    assert "<host>" not in document.html
    allowed = set(re.findall(r"'sha256-([^']+)'", document.policy))
    written = re.findall(r"<(script|style)>(.*?)</\1>", document.html, re.DOTALL)
    digests = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for _, text in written}
    assert digests == allowed, "the policy allows what is written into the page, and nothing else"


def test_libraries_are_those_that_are_recorded() -> None:
    for folder in (VENDORED, ROOT / "tests" / "vendored"):
        recorded = json.loads((folder / "vendored.json").read_text())
        assert {path.name for path in folder.iterdir() if path.suffix in (".js", ".css")} == {
            one["file"] for one in recorded
        }
        for one in recorded:
            data = (folder / one["file"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == one["sha256"], one["file"]
            assert (folder / one["file"]).with_suffix(".LICENSE").is_file()
            assert b"</script" not in data


def curves_by_chart(*runs: Path) -> dict[str, list[Curve]]:
    return {one.chart.name: one.curves for one in plotted_charts([read_run(run) for run in runs])}


def test_the_metrics_of_each_stage_have_charts(tmp_path: Path) -> None:
    run = make_preferences(tmp_path / "a", num_steps=4)
    more = {"rewards/exact": 0.5, "rewards/form": 0.25, "rewards/exact/std": 0.1, "reward": 0.75, "reward/std": 0.2,
            "rewards/missing": 0.0, "kl": 0.01, "entropy": 1.5, "pass@4": 0.5, "of/a_plugin": 3.0,
            "tokens": 9.0}  # fmt: skip
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record(5, 0.1, **more)) + "\n")
        file.write(json.dumps({"step": 5, "eval/of/a_plugin": 4.0, "eval/kl": None}) + "\n")
    found = curves_by_chart(run)
    assert [name for name in found if name not in CHARTS] == [
        *("accuracy", "margin", "pairs", "logps", "reward", "passes", "components", "spread", "kl", "entropy"),
        *("without_signal", "of-a_plugin"),
    ]
    assert [(c.label, c.steps, c.dashed) for c in found["accuracy"]] == [
        ("train", [1, 2, 3, 4], False), ("eval", [4], True)
    ]  # fmt: skip
    assert [c.label for c in found["pairs"]] == ["chosen", "rejected"]
    assert [(c.label, c.values) for c in found["components"]] == [("exact", [0.5]), ("form", [0.25])]
    assert [c.label for c in found["spread"]] == ["all", "exact"]
    assert [(c.label, c.values) for c in found["of-a_plugin"]] == [("train", [3.0]), ("eval", [4.0])]
    assert found["memory"][0].values[0] == 2.5


def test_values_that_are_no_numbers_are_not_plotted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", num_steps=2)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "loss": NaN, "grad_norm": Infinity}\n')
    assert curves_by_chart(run)["loss"][0].steps == [1, 2]
    json.dumps(content([read_run(run)]), allow_nan=False)


def test_every_peak_of_a_long_run_is_plotted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", num_steps=1)
    values = [1.0 + 1e-9 * step for step in range(30000)]
    values[17321] = 50.0
    values[23456] = -3.0
    lines = [json.dumps({"step": step, "loss": value}) + "\n" for step, value in enumerate(values)]
    (run / "metrics.jsonl").write_text("".join(lines))
    chart = next(plotted_charts([read_run(run)])).data()
    (curve,) = chart["curves"]
    assert len(curve["steps"]) <= 2001
    pairs = dict(zip(curve["steps"], curve["values"]))
    assert (pairs[17321], pairs[23456], max(pairs)) == (50.0, -3.0, 29999)
    assert list(pairs) == sorted(pairs)


def test_many_ranks_are_three_curves(tmp_path: Path) -> None:
    curves = curves_by_chart(make_run(tmp_path / "a", num_steps=1, num_ranks=64))["ranks"]
    assert [(c.label, round(c.values[0], 6)) for c in curves] == [
        ("least busy", 0.1),
        ("median", 3.3),
        ("busiest", 6.4),
    ]


def test_the_schedule_of_a_pipeline_is_plotted(tmp_path: Path) -> None:
    """The order of `llmsuite.parallel.timeline`: two ranks with two chunks each, 8 samples of two data ranks."""
    run = read_run(make_run(tmp_path / "a", sections=PIPELINE, global_batch_size=8))
    timeline = pipeline_timeline(run.recipe)
    assert timeline is not None
    bars = re.findall(r'<rect class="(\w+) chunk(\d)" x="([\d.]+)".*?width="([\d.]+)"', timeline_svg(timeline))
    assert len(bars) == 2 * 4 * 2 * 2
    assert {kind for kind, *_ in bars} == {"forward", "backward"}
    assert max(float(x) + float(width) for *_, x, width in bars) == pytest.approx(1000, abs=0.1)
    played = simulate(orders("interleaved", 2, 4, 2), [1.0] * 4, [2.0] * 4)
    assert f"Ranks wait {played.bubble:.1%} of" in content([run])["html"]
    long = read_run(make_run(tmp_path / "b", sections=PIPELINE, global_batch_size=2000))
    assert f"of {4 * 2 * 2 * 2} passes each" in content([long])["html"]


@pytest.mark.parametrize("what", [{"lora": {"rank": 8}}, {"reft": {"rank": 4}}, {"prefix": {"tokens": 16}}])
def test_passes_back_through_a_frozen_model_are_as_long(what: dict[str, Any], tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", sections=PIPELINE | what, global_batch_size=8))
    found = pipeline_timeline(run.recipe)
    assert found is not None
    assert {one.end - one.start for rank in found.ranks for one in rank} == {1.0}


def test_no_picture_of_passes_whose_number_depends_on_lengths(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", sections=PIPELINE, global_batch_size=8, micro_batch_tokens=512))
    assert pipeline_timeline(run.recipe) is None
    assert "Passes of the pipeline" not in content([run])["html"]


def test_two_runs_are_plotted_together(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "one"), make_run(tmp_path / "two", learning_rate=0.5)]
    text = content([read_run(run) for run in runs])["html"]
    assert "Recipes differ in" in text
    assert '<th scope="row">train.learning_rate</th><td>0.001</td><td>0.5</td>' in text
    assert '<th scope="row">Status</th>' in text
    curves = curves_by_chart(*runs)["loss"]
    assert [c.label for c in curves] == ["one train", "one eval", "two train", "two eval"]
    assert [c.colour for c in curves] == [0, 0, 1, 1]


def test_cards_say_how_far_a_run_is(tmp_path: Path) -> None:
    path = make_preferences(tmp_path / "a", num_steps=100)
    events = [{"time": "2026-01-01T00:00:00+00:00", "event": "started", "step": 0, "of": 500},
              {"time": "2026-01-01T00:10:00+00:00", "event": "saved", "step": 50},
              {"time": "2026-01-01T05:00:00+00:00", "event": "resumed", "step": 50, "of": 500}]  # fmt: skip
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    now = events_seconds("2026-01-01T05:05:00+00:00")
    os.utime(path / "metrics.jsonl", (now - 90, now - 90))
    found = {card.label: (card.value, card.note) for card in cards(read_run(path), now)}
    assert found["Steps"] == ("100 of 500", "15 min 00 s so far, about 3 min 20 s left")  # 400 steps of 0.5 s
    assert found["Status"] == ("running", "last record 1 min 30 s ago: is it still running?")
    assert found["Preference accuracy"] == ("75.0%", "87.5% in the evaluation of step 100")
    assert found["Model"] == ("smollm2-135m", "weights models/smollm2-135m-instruct")
    assert found["Data"] == ("preference/train.jsonl", "evaluated on data/preference/eval.jsonl")
    assert found["Stage"] == ("dpo", "lora of rank 8, batches of 8")
    assert found["Mesh"] == ("pp1 dp2 sharding1 tp1", "2 ranks on cpu host")
    assert found["Tokens per second"][1] == "1.83 device seconds per 1,000 tokens"
    add_event(path, "stopped", step=100)
    ended = {card.label: card for card in cards(read_run(path), now)}
    assert ended["Status"].value == "stopped"
    assert "left" not in ended["Steps"].note


def events_seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.25, "0.2 s"), (59, "59 s"), (125, "2 min 05 s"), (3 * 3600 + 20 * 60, "3 h 20 min"), (200000, "2 d 7 h")],
)
def test_times_are_for_people(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"event": "started", "step": 0, "of": 500}, "Started, 500 steps to go"),
        ({"event": "skipped", "step": 7, "loss": 12.5, "grad_norm": 99.0},
         "Skipped the bad step 7 (loss 12.5, gradient norm 99)"),
        ({"event": "rolled back", "step": 9, "to": 5}, "Rolled back from step 9 to the checkpoint of step 5"),
        ({"event": "restarting", "step": 8, "restart": 1, "of": 3, "why": "rank 1 was killed"},
         "Restart 1 of 3 from step 8: rank 1 was killed"),
        ({"event": "failed", "error": "UserError: no"}, "Failed: UserError: no"),
        ({"event": "failed", "exit_code": 1}, "Failed with exit code 1; see logs/workerlog.0"),
        ({"event": "of a plugin", "x": 1}, "of a plugin: x 1"),
    ],
    ids=lambda value: value["event"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_events_are_described_in_words(event: dict[str, Any], words: str) -> None:
    assert event_line({"time": "2026-01-01T00:01:00.000+00:00", **event}) == ("2026-01-01 00:01:00 UTC", words)


def test_a_report_is_a_page_and_pictures_on_demand(tmp_path: Path, capsys: Capsys) -> None:
    path = make_run(tmp_path / "a", sections=PIPELINE, global_batch_size=8)
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(path / "report.html")]
    assert main(["report", str(path), "--png"]) == 0
    names = [*CHARTS, "schedule"]
    assert capsys.readouterr().out.splitlines() == [
        str(path / "report.html"), *(str(path / "report" / f"{name}.png") for name in names)
    ]  # fmt: skip
    for name in names:
        assert (path / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_no_step_no_report(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a")
    (path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no step is recorded yet"):
        write_report([read_run(path)])


def test_without_matplotlib_there_is_a_page_and_no_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    runs = [read_run(make_run(tmp_path / "a"))]
    assert write_report(runs) == [tmp_path / "a" / "report.html"]
    with pytest.raises(UserError, match="pip install matplotlib"):
        write_report(runs, pictures=True)


def test_runs_are_listed_shown_and_compared(tmp_path: Path, capsys: Capsys) -> None:
    one = make_run(tmp_path / "x/one")
    two = make_run(tmp_path / "two", end="hung", learning_rate=0.5)
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
    (tmp_path / "empty").mkdir()
    assert main(["runs", "list", str(tmp_path / "empty")]) == 0
    assert capsys.readouterr().out == "no runs\n"
    assert main(["runs", "list", str(tmp_path / "nowhere"), str(tmp_path)]) == 2
    assert f"there is no directory {tmp_path / 'nowhere'}; name one" in capsys.readouterr().err
    assert main(["runs", "compare", str(one)]) == 2
    assert main(["runs", "show"]) == 2


def test_a_run_whose_ranks_died_before_they_recorded_anything_is_listed(tmp_path: Path, capsys: Capsys) -> None:
    dead = tmp_path / "dead"
    dead.mkdir()
    add_event(dead, "failed", exit_code=1)
    assert find_runs(tmp_path) == [dead]
    assert main(["runs", "list", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [str(dead), "failed"]
    assert main(["runs", "show", str(dead)]) == 0
    assert "exit_code 1" in capsys.readouterr().out
    assert not has_records(dead)  # so that the next run may take its place


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, Callable[..., str]]]:
    """A running run, and the address of its page."""
    path = make_run(tmp_path / "a", end=None)
    server = make_server([path], 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()

    def at(path: str, token: str | None = server.token) -> str:
        return f"http://127.0.0.1:{server.server_port}{path}{'' if token is None else f'?token={token}'}"

    assert server.address == at("/")
    yield path, at
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_served_page_changes_with_the_run(served: tuple[Path, Callable[..., str]]) -> None:
    path, at = served
    with urllib.request.urlopen(at("/")) as answer:
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; ")
        assert "fetch(" in answer.read().decode()
    with urllib.request.urlopen(at("/content")) as answer:
        tag = answer.headers["ETag"]
        assert json.load(answer)["charts"][0]["curves"][0]["steps"] == [1, 2, 3, 4, 5]
    same = urllib.request.Request(at("/content"), headers={"If-None-Match": tag})
    with pytest.raises(urllib.error.HTTPError, match="304"):
        urllib.request.urlopen(same)
    with open(path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record(6, 0.4)) + "\n")
    with urllib.request.urlopen(same) as answer:
        assert json.load(answer)["charts"][0]["curves"][0]["values"][-1] == 0.4


def test_the_served_page_reports_a_silent_run(served: tuple[Path, Callable[..., str]]) -> None:
    """No file changes when a process is killed or hangs."""
    path, at = served
    (path / "environment.json").write_text(json.dumps({"host": platform.node()}))

    def response(tag: str) -> tuple[str, str]:
        with urllib.request.urlopen(urllib.request.Request(at("/content"), headers={"If-None-Match": tag})) as answer:
            return json.load(answer)["html"], answer.headers["ETag"]

    with lock_directory(path):
        html, tag = response("")
        assert "is it still running?" not in html
        for file in path.iterdir():
            os.utime(file, (time.time() - 90,) * 2)
        html, tag = response(tag)
        assert "last record 1 min 30 s ago: is it still running?" in html
        with pytest.raises(urllib.error.HTTPError, match="304"):
            response(tag)
    assert "died" in response(tag)[0]


@pytest.mark.parametrize(("path", "host", "code"), [("/", "evil.example:80", 403), ("/recipe.json", None, 404)])
def test_nothing_else_is_served(
    served: tuple[Path, Callable[..., str]], path: str, host: str | None, code: int
) -> None:
    with pytest.raises(urllib.error.HTTPError, match=str(code)):
        urllib.request.urlopen(urllib.request.Request(served[1](path), headers={"Host": host} if host else {}))


@pytest.mark.parametrize("path", ["/", "/content"])
@pytest.mark.parametrize("token", [None, "", "0", "é"])
def test_without_the_token_nothing_is_served(
    served: tuple[Path, Callable[..., str]], path: str, token: str | None
) -> None:
    """Other users of the machine reach the port too."""
    address = served[1](path, token if token is None else urllib.parse.quote(token))
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(address)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(urllib.request.Request(served[1](path), headers={"Origin": "http://evil.example"}))


def test_a_page_that_is_closed_is_no_error(
    served: tuple[Path, Callable[..., str]], capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is printed when a browser disconnects in the middle of an answer."""
    path, at = served
    lines = "".join(json.dumps(record(step, 1.0, **{f"m{i}": step / 7 for i in range(40)})) + "\n"
                    for step in range(6, 2000))  # fmt: skip
    (path / "metrics.jsonl").write_text(lines)
    where = urllib.parse.urlsplit(at("/content"))
    for _ in range(3):
        with socket.create_connection((where.hostname, where.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, not closed
            connection.sendall(f"GET {where.path}?{where.query} HTTP/1.0\r\nHost: {where.netloc}\r\n\r\n".encode())
            connection.recv(100)
    with urllib.request.urlopen(at("/content")) as answer:
        assert len(answer.read()) > 100000
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_is_reported(served: tuple[Path, Callable[..., str]]) -> None:
    port = urllib.parse.urlsplit(served[1]("/")).port
    with pytest.raises(UserError, match=f"--port {port}: "):
        make_server([served[0]], port)
