"""What the studio says of recipes, and whom it answers."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmsuite import builtin
from llmsuite.cli import commands
from llmsuite.errors import UserError
from llmsuite.observe.events import add_event
from llmsuite.plugins.manager import Registry, load_plugins
from llmsuite.studio.jobs import Jobs
from llmsuite.studio.recipes import Filled, Recipes
from llmsuite.studio.server import Studio
from tests.unit.observe.run_folder import make_run

RECIPE = "recipes/llama/digits-lora.json"


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_plugins(builtin, commands)


def filled(**changes: str) -> Filled:
    return Filled.of(
        {"recipe": RECIPE, "smoke": True, "changes": {k.replace("__", "."): v for k, v in changes.items()}}
    )


def test_every_recipe_is_offered_and_its_keys_explained(registry: Registry) -> None:
    recipes = Recipes(registry)
    assert {"recipe": RECIPE, "stage": "lora", "model": "runs/digits-pretrain", "devices": 1, "device": "cpu"} in (
        recipes.known()
    )
    keys = {key["key"]: key for key in recipes.keys(filled())}
    assert keys["lora.rank"]["value"] == "16"
    assert keys["train.learning_rate"]["type"] == "number > 0"
    assert keys["engine.mode"]["options"] == ["dynamic", "to_static"]
    assert [key for key, info in keys.items() if not info["help"] and not key.startswith("model.config.")] == []


def test_what_is_wrong_is_said_at_its_key(registry: Registry) -> None:
    recipes = Recipes(registry)
    told = recipes.check(filled(train__learning_rate="fast", lora__rank="0"))
    assert {problem["key"] for problem in told["problems"]} == {"train.learning_rate", "lora.rank"}
    right = recipes.check(filled(train__max_steps="3"))
    assert right["problems"] == []
    assert right["command"] == f"llmsuite run {RECIPE} --smoke --train.max_steps=3"
    assert right["notes"] == []
    assert right["made"] == "lora, llama, pp1 dp1 sharding1 tp1 on cpu"
    assert "memory of a rank" in recipes.plan(filled())
    with pytest.raises(UserError, match="learning_rate"):
        recipes.plan(filled(train__learning_rate="-1"))


def test_notes_of_a_recipe_are_told(registry: Registry, tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"src": "a", "tgt": "b"}\n')
    (note,) = Recipes(registry).check(filled(data__train=str(tmp_path)))["notes"]
    assert "the run trains on test.jsonl too" in note


def test_columns_that_fit_no_format_are_wrong_and_what_mends_them_is_told(registry: Registry, tmp_path: Path) -> None:
    rows, recipes = tmp_path / "mine.csv", Recipes(registry)
    rows.write_text("Question,Our Answer\nWhy?,Because.\n")
    (problem,) = recipes.check(filled(data__train=str(rows)))["problems"]
    assert problem["key"] == "data.train"
    assert "keys ['Our Answer', 'Question'] fit no format with conversation rows" in problem["message"]
    assert problem["remedy"] == {"key": "data.columns", "value": '{"instruction":"Question","output":"Our Answer"}'}
    mended = filled(data__train=str(rows), data__columns=problem["remedy"]["value"])
    assert recipes.check(mended)["problems"] == []
    (typo,) = recipes.check(filled(data__train=str(rows), data__columns='{"instruction":"Qestion"}'))["problems"]
    assert "did you mean 'Question'?" in typo["message"]


@pytest.mark.parametrize(
    "told",
    [None, [], {}, {"recipe": 1}, {"recipe": "a", "changes": []}, {"recipe": "a", "changes": {"a": 1}},
     {"recipe": "a", "changes": {"x y": "1"}}, {"recipe": "a", "changes": {"--resume": "1"}}],
    ids=str,
)  # fmt: skip
def test_what_no_page_sends_is_refused(told: Any) -> None:
    with pytest.raises(UserError):
        Filled.of(told)


def test_only_runs_are_looked_at(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "elsewhere")
    jobs = Jobs(tmp_path / "runs")
    assert jobs.directory(str(run)) == run
    for name in (str(tmp_path / "elsewhere"), str(run / ".." / ".." / "elsewhere"), "", "/etc"):
        with pytest.raises(UserError, match="is no run below"):
            jobs.directory(name)
    (told,) = jobs.known()
    assert (told["status"], told["cards"]["Steps"][0], told["is_running"], told["can_talk"]) == (
        "ended",
        "5",
        False,
        False,
    )
    with pytest.raises(UserError, match="there is a run already"):
        jobs.start(Filled("x", False, {}), run)
    with pytest.raises(UserError, match="was not started here"):
        jobs.stop(str(run))
    assert jobs.close() == []


def test_a_run_whose_ranks_died_early_is_shown(tmp_path: Path) -> None:
    (tmp_path / "dead").mkdir()
    add_event(tmp_path / "dead", "failed", exit_code=1)
    jobs = Jobs(tmp_path)
    (told,) = jobs.known()
    assert (told["status"], told["cards"]["Status"][0], told["can_talk"]) == ("failed", "failed", False)
    assert jobs.close() == []


def test_a_server_of_the_studio_has_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = "import os, time; print('answers on http://127.0.0.1:1'); print(os.environ['LLMSUITE_API_KEY'], flush=True)"
    monkeypatch.delenv("LLMSUITE_API_KEY", raising=False)
    monkeypatch.setattr("llmsuite.studio.jobs._LLMSUITE", (sys.executable, "-c", f"{says}; time.sleep(600)"))
    run, jobs = make_run(tmp_path / "runs" / "a"), Jobs(tmp_path / "runs")
    deadline = time.monotonic() + 60
    while (address := jobs.talk(str(run))["address"]) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    key = address.removeprefix("http://127.0.0.1:1/#key=")
    (log,) = Path(jobs._logs.name).glob("*-serve-*.log")
    while len(said := log.read_text().split()) < 4:  # the address comes first
        assert time.monotonic() < deadline
    jobs.close()
    assert len(key) > 20
    assert said[-1] == key


@pytest.fixture
def studio(registry: Registry, tmp_path: Path) -> Iterator[Studio]:
    make_run(tmp_path / "runs" / "a", end=None)
    server = Studio(registry, tmp_path / "runs", 0, token="secret")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.close()


def ask(studio: Studio, path: str, body: Any = None, **headers: str) -> Any:
    """Status and JSON or text of an answer. In names of headers, _ is -."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{studio.server_port}{path}", data)
    for name, value in headers.items():
        request.add_header(name.replace("_", "-"), value)
    try:
        with urllib.request.urlopen(request) as answer:
            text = answer.read().decode()
            return answer.status, json.loads(text) if "json" in answer.headers["Content-Type"] else text
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return error.code, json.loads(text) if "json" in error.headers["Content-Type"] else text


def test_it_answers_who_knows_the_token(studio: Studio, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    code, text = ask(studio, "/?token=secret")
    assert (code, "llmsuite studio" in text) == (200, True)
    assert "secret" not in text
    assert ask(studio, "/recipes?token=secret")[1][0]["recipe"].startswith("recipes/")
    assert [one["run"] for one in ask(studio, "/runs?token=secret")[1]] == [str(run)]
    assert ask(studio, f"/watch/?token=secret&run={run}")[0] == 200
    assert ask(studio, f"/watch/content?token=secret&run={run}")[1]["charts"][0]["name"] == "loss"
    assert ask(studio, "/watch/?token=secret&run=/etc")[0] == 400
    told = {"recipe": RECIPE, "smoke": True, "changes": {"lora.rank": "none"}}
    assert ask(studio, "/check", told, X_Token="secret")[1]["problems"][0]["key"] == "lora.rank"
    assert ask(studio, "/start", told, X_Token="secret")[0] == 400, "nothing is started that is not right"


@pytest.mark.parametrize("path", ["/", "/recipes", "/runs", "/watch/", "/watch/content"])
@pytest.mark.parametrize("query", ["", "?token=", "?token=wrong", "?token=secre"])
def test_nobody_reads_without_the_token(studio: Studio, path: str, query: str) -> None:
    assert ask(studio, path + query)[0] == 403


@pytest.mark.parametrize("path", ["/keys", "/check", "/plan", "/start", "/stop", "/talk"])
@pytest.mark.parametrize(
    "headers",
    [{}, {"X_Token": "wrong"}, {"X_Token": "secret", "Origin": "https://evil.example"},
     {"X_Token": "secret", "Origin": "null"}, {"X_Token": "secret", "Host": "evil.example:80"}],
    ids=["no token", "wrong token", "another page", "a file", "another name"],
)  # fmt: skip
def test_no_other_page_does_anything(studio: Studio, path: str, headers: dict[str, str]) -> None:
    assert ask(studio, path, {"recipe": RECIPE, "smoke": True, "run": "x"}, **headers)[0] == 403
    assert ask(studio, f"{path}?token=secret", {"recipe": RECIPE}, Cookie="token=secret")[0] == 403


@pytest.mark.parametrize(("body", "code"), [(b"{", 400), (b"[" * 100000, 400), (b"null", 400), (b"a" * 1_000_001, 413)])
def test_malformed_requests_are_refused(studio: Studio, body: bytes, code: int) -> None:
    assert ask(studio, "/start", body, X_Token="secret")[0] == code


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 5000, "PIPE"])
@pytest.mark.parametrize("path", ["/keys", "/check", "/plan", "/start"])
def test_a_name_that_is_none_of_a_recipe_keeps_nobody_waiting(
    studio: Studio, tmp_path: Path, path: str, name: str
) -> None:
    if name == "PIPE":
        name = str(tmp_path / "pipe.json")
        os.mkfifo(name)
    code, told = ask(studio, path, {"recipe": name}, X_Token="secret")
    assert code == (200 if path == "/check" else 400)
    assert "not a path" in str(told) or "is no file" in str(told)
    assert ask(studio, "/check", {"recipe": RECIPE, "smoke": True}, X_Token="secret")[0] == 200


@pytest.mark.parametrize(
    ("path", "token", "code"), [("/start", "secret", 413), ("/start", "x", 403), ("/x", "secret", 404)]
)
def test_who_sends_much_sees_why_it_is_refused(studio: Studio, path: str, token: str, code: int) -> None:
    # more than sockets take before the server reads
    assert ask(studio, path, b"a" * 20_000_000, X_Token=token)[0] == code
