"""Recipes, runs and access control of the studio."""

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

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry, load_plugins
from llmsuite.observe.events import add_event
from llmsuite.plugins.studio.jobs import Jobs
from llmsuite.plugins.studio.recipes import FilledRecipe, Recipes
from llmsuite.plugins.studio.server import Studio
from tests.support.run_folder import make_run
from tests.support.written_family import write_family

RECIPE = "recipes/llama/digits-lora.json"


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_plugins()


def form(**changes: str) -> FilledRecipe:
    return FilledRecipe.of(
        {"recipe": RECIPE, "smoke": True, "changes": {k.replace("__", "."): v for k, v in changes.items()}}
    )


def test_every_recipe_is_offered_and_its_keys_explained(registry: Registry) -> None:
    recipes = Recipes(registry)
    assert {"recipe": RECIPE, "stage": "lora", "model": "runs/digits-pretrain", "devices": 1, "device": "cpu"} in (
        recipes.known()
    )
    keys = {key["key"]: key for key in recipes.keys(form())}
    assert keys["lora.rank"]["value"] == "16"
    assert keys["train.learning_rate"]["type"] == "number > 0"
    assert keys["engine.mode"]["options"] == ["dynamic", "to_static"]
    assert [key for key, info in keys.items() if not info["help"] and not key.startswith("model.config.")] == []


def test_an_error_is_reported_at_its_key(registry: Registry) -> None:
    recipes = Recipes(registry)
    reports = recipes.check(form(train__learning_rate="fast", lora__rank="0"))
    assert {problem["key"] for problem in reports["problems"]} == {"train.learning_rate", "lora.rank"}
    right = recipes.check(form(train__max_steps="3"))
    assert right["problems"] == []
    assert right["command"] == f"llmsuite run {RECIPE} --smoke --train.max_steps=3"
    assert right["notes"] == []
    assert right["made"] == "lora, llama, pp1 dp1 sharding1 tp1 on cpu"
    assert "memory of a rank" in recipes.plan(form())
    with pytest.raises(UserError, match="learning_rate"):
        recipes.plan(form(train__learning_rate="-1"))


def test_notes_of_a_recipe_are_reported(registry: Registry, tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"src": "a", "tgt": "b"}\n')
    (note,) = Recipes(registry).check(form(data__train=str(tmp_path)))["notes"]
    assert "the run also trains on test.jsonl" in note


def test_columns_that_fit_no_format_are_reported_with_a_remedy(registry: Registry, tmp_path: Path) -> None:
    rows = tmp_path / "mine.csv"
    recipes = Recipes(registry)
    rows.write_text("Question,Our Answer\nWhy?,Because.\n")
    (problem,) = recipes.check(form(data__train=str(rows)))["problems"]
    assert problem["key"] == "data.train"
    assert "keys ['Our Answer', 'Question'] fit no format with conversation rows" in problem["message"]
    assert problem["remedy"] == {"key": "data.columns", "value": '{"instruction":"Question","output":"Our Answer"}'}
    mended = form(data__train=str(rows), data__columns=problem["remedy"]["value"])
    assert recipes.check(mended)["problems"] == []
    (typo,) = recipes.check(form(data__train=str(rows), data__columns='{"instruction":"Qestion"}'))["problems"]
    assert "did you mean 'Question'?" in typo["message"]


def test_a_text_with_a_source_is_not_taken_for_an_answer(registry: Registry, tmp_path: Path) -> None:
    rows = tmp_path / "mine.jsonl"
    rows.write_text('{"text": "A document.", "source": "web", "id": 1}\n')
    (problem,) = Recipes(registry).check(form(data__train=str(rows)))["problems"]
    assert "To train on 'text' as plain text, add --data.format=text" in problem["message"]
    assert not problem.get("remedy")


@pytest.mark.parametrize(
    "reports",
    [None, [], {}, {"recipe": 1}, {"recipe": "a", "changes": []}, {"recipe": "a", "changes": {"a": 1}},
     {"recipe": "a", "changes": {"x y": "1"}}, {"recipe": "a", "changes": {"--resume": "1"}}],
    ids=str,
)  # fmt: skip
def test_a_malformed_form_is_refused(reports: Any) -> None:
    with pytest.raises(UserError):
        FilledRecipe.of(reports)


def test_only_runs_are_looked_at(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "elsewhere")
    jobs = Jobs(tmp_path / "runs")
    assert jobs.directory(str(run)) == run
    for name in (str(tmp_path / "elsewhere"), str(run / ".." / ".." / "elsewhere"), "", "/etc"):
        with pytest.raises(UserError, match="is no run below"):
            jobs.directory(name)
    (reports,) = jobs.known()
    assert (reports["status"], reports["cards"]["Steps"][0], reports["is_running"], reports["can_talk"]) == (
        "ended",
        "5",
        False,
        False,
    )
    with pytest.raises(UserError, match="there is a run already"):
        jobs.start(FilledRecipe("x", False, {}), run)
    with pytest.raises(UserError, match="was not started here"):
        jobs.stop(str(run))
    assert jobs.close() == []


def test_a_run_whose_ranks_died_early_is_shown(tmp_path: Path) -> None:
    (tmp_path / "dead").mkdir()
    add_event(tmp_path / "dead", "failed", exit_code=1)
    jobs = Jobs(tmp_path)
    (reports,) = jobs.known()
    assert (reports["status"], reports["cards"]["Status"][0], reports["can_talk"]) == ("failed", "failed", False)
    assert jobs.close() == []


def test_a_server_of_the_studio_has_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = "import os, time; print('answers on http://127.0.0.1:1'); print(os.environ['LLMSUITE_API_KEY'], flush=True)"
    monkeypatch.delenv("LLMSUITE_API_KEY", raising=False)
    monkeypatch.setattr("llmsuite.plugins.studio.jobs._LLMSUITE", (sys.executable, "-c", f"{says}; time.sleep(600)"))
    run = make_run(tmp_path / "runs" / "a")
    jobs = Jobs(tmp_path / "runs")
    deadline = time.monotonic() + 60
    while (address := jobs.chat(str(run))["address"]) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    key = address.removeprefix("http://127.0.0.1:1/#key=")
    (log,) = Path(jobs._logs.name).glob("*-serve.log")
    while len(output := log.read_text().split()) < 4:  # the address comes first
        assert time.monotonic() < deadline
    jobs.close()
    assert len(key) > 20
    assert output[-1] == key


def test_starts_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run for each directory, and a log for each run, also after some have ended."""
    code = "import sys, time; print('words of', sys.argv[2], flush=True); time.sleep(600)"
    monkeypatch.setattr("llmsuite.plugins.studio.jobs._LLMSUITE", (sys.executable, "-S", "-c", code))
    jobs = Jobs(tmp_path)
    outcomes = list[str]()

    def start(name: str) -> None:
        try:
            outcomes.append(jobs.start(FilledRecipe(name, False, {}), tmp_path / name))
        except UserError as error:
            outcomes.append(str(error))

    def start_at_once(names: list[str]) -> None:
        threads = [threading.Thread(target=start, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    names = [f"run-{number}" for number in range(4)]
    start_at_once([*names, *names])
    refused = [outcome for outcome in outcomes if "is still running" in outcome]
    assert sorted(set(outcomes) - set(refused)) == [str(tmp_path / name) for name in names]
    assert len(refused) == 4
    jobs._runs[str(tmp_path / "run-0")].process.kill()
    jobs._runs[str(tmp_path / "run-0")].process.wait()
    start_at_once(["run-0", "run-4"])
    started = list(jobs._runs.items())
    assert len({job.log for _, job in started}) == 5
    deadline = time.monotonic() + 60
    for name, job in started:
        while job.tail != f"words of {Path(name).name}\n":
            assert time.monotonic() < deadline, job.tail
            time.sleep(0.02)
        job.process.kill()
        job.process.wait()
    assert jobs.close() == []


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


def test_requests_with_the_token_are_answered(studio: Studio, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    code, text = ask(studio, "/?token=secret")
    assert (code, "llmsuite studio" in text) == (200, True)
    assert "secret" not in text
    assert ask(studio, "/recipes?token=secret")[1][0]["recipe"].startswith("recipes/")
    assert [one["run"] for one in ask(studio, "/runs?token=secret")[1]] == [str(run)]
    assert ask(studio, f"/watch/?token=secret&run={run}")[0] == 200
    assert ask(studio, f"/watch/content?token=secret&run={run}")[1]["charts"][0]["name"] == "loss"
    assert ask(studio, "/watch/?token=secret&run=/etc")[0] == 400
    reports = {"recipe": RECIPE, "smoke": True, "changes": {"lora.rank": "none"}}
    assert ask(studio, "/check", reports, X_Token="secret")[1]["problems"][0]["key"] == "lora.rank"
    assert ask(studio, "/start", reports, X_Token="secret")[0] == 400, "nothing is started that is not valid"


@pytest.mark.parametrize("path", ["/", "/recipes", "/runs", "/watch/", "/watch/content"])
@pytest.mark.parametrize("query", ["", "?token=", "?token=wrong", "?token=secre"])
def test_nothing_is_served_without_the_token(studio: Studio, path: str, query: str) -> None:
    assert ask(studio, path + query)[0] == 403


@pytest.mark.parametrize("path", ["/keys", "/check", "/plan", "/start", "/stop", "/talk", "/new", "/explain"])
@pytest.mark.parametrize(
    "headers",
    [{}, {"X_Token": "wrong"}, {"X_Token": "secret", "Origin": "https://evil.example"},
     {"X_Token": "secret", "Origin": "null"}, {"X_Token": "secret", "Host": "evil.example:80"}],
    ids=["no token", "wrong token", "another page", "a file", "another name"],
)  # fmt: skip
def test_requests_of_other_pages_are_refused(studio: Studio, path: str, headers: dict[str, str]) -> None:
    assert ask(studio, path, {"recipe": RECIPE, "smoke": True, "run": "x"}, **headers)[0] == 403
    assert ask(studio, f"{path}?token=secret", {"recipe": RECIPE}, Cookie="token=secret")[0] == 403


def rows_of_two_turns(path: Path, count: int) -> Path:
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    path.write_text((json.dumps({"messages": turns}) + "\n") * count)
    return path


def test_a_recipe_is_made_from_a_model_and_a_file(
    studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_family(tmp_path / "my model", "llama")
    choices = {
        "weights": f" {model} ",
        "data": str(rows_of_two_turns(tmp_path / "rows.jsonl", 45)),
        "stage": "sft",
        "method": "lora",
    }
    (tmp_path / "my-model-sft.json").write_text("{}")
    code, made = ask(studio, "/new", choices, X_Token="secret")
    assert (code, made["recipe"]) == (200, "my-model-sft-2.json"), made
    assert made["text"].startswith("data: 45 rows, 45 used, of ")
    assert "llmsuite run" not in made["text"]
    recipe = json.loads((tmp_path / made["recipe"]).read_text())
    assert (recipe["stage"], recipe["train"]["num_epochs"]) == ("lora", 3)
    form = {"recipe": made["recipe"], "changes": {"lora.rank": "4"}}
    assert ask(studio, "/check", form, X_Token="secret")[1]["problems"] == []
    given = {key["key"] for key in ask(studio, "/keys", form, X_Token="secret")[1] if key["given"]}
    assert {"data.train", "model.weights", "train.learning_rate"} <= given
    assert len(given) < 30
    code, explained = ask(studio, "/explain", {**form, "row": 45}, X_Token="secret")
    assert "the end of the sequence is supervised" in explained["text"], explained
    assert "is no number" in ask(studio, "/explain", {**form, "row": "1; ls"}, X_Token="secret")[1]["error"]
    assert "numbered from 1 to 45" in ask(studio, "/explain", {**form, "row": 46}, X_Token="secret")[1]["error"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": " "}, "data: is missing"),
        ({"stage": None}, "has sent no choices"),
        ({"weights": "nothing"}, "nothing is not a directory with a model"),
    ],
)
def test_a_recipe_that_cannot_be_made_is_told(
    studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    choices = {"weights": "runs/a", "data": "rows.jsonl", "stage": "sft", "method": "lora", **changes}
    code, found = ask(studio, "/new", choices, X_Token="secret")
    assert code == 400
    assert message in found["error"]


@pytest.mark.parametrize(("body", "code"), [(b"{", 400), (b"[" * 100000, 400), (b"null", 400), (b"a" * 1_000_001, 413)])
def test_malformed_requests_are_refused(studio: Studio, body: bytes, code: int) -> None:
    assert ask(studio, "/start", body, X_Token="secret")[0] == code


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 5000, "PIPE"])
@pytest.mark.parametrize("path", ["/keys", "/check", "/plan", "/start"])
def test_a_name_that_is_no_recipe_does_not_block_requests(studio: Studio, tmp_path: Path, path: str, name: str) -> None:
    if name == "PIPE":
        name = str(tmp_path / "pipe.json")
        os.mkfifo(name)
    code, reports = ask(studio, path, {"recipe": name}, X_Token="secret")
    assert code == (200 if path == "/check" else 400)
    assert "not a path" in str(reports) or "is no file" in str(reports)
    assert ask(studio, "/check", {"recipe": RECIPE, "smoke": True}, X_Token="secret")[0] == 200


@pytest.mark.parametrize(
    ("path", "token", "code"), [("/start", "secret", 413), ("/start", "x", 403), ("/x", "secret", 404)]
)
def test_a_client_that_sends_too_much_sees_the_refusal(studio: Studio, path: str, token: str, code: int) -> None:
    # more than sockets take before the server reads
    assert ask(studio, path, b"a" * 20_000_000, X_Token=token)[0] == code
