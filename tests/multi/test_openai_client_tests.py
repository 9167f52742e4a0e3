"""The openai client's own tests of what is served here pass, but for those that ask for what is refused.

`LLMSUITE_OPENAI` names a checkout of openai-python at the commit of `openai_client.json`, with the environment that its
scripts/bootstrap makes in .venv. Its tests are generated: each calls a method with what is needed, or with every
parameter at once. As the latter are refused whole, their parameters are also sent one by one.
"""

from __future__ import annotations

import ast
import collections
import json
import os
import re
import subprocess
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.support.paths import ROOT
from tests.support.server import Server
from tests.support.written_family import write_family

LIST: dict[str, Any] = json.loads(Path(__file__).with_name("openai_client.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def checkout() -> Path:
    if "LLMSUITE_OPENAI" not in os.environ:
        pytest.skip("LLMSUITE_OPENAI names no checkout")
    root = Path(os.environ["LLMSUITE_OPENAI"]).resolve()
    assert f'"{LIST["version"]}"' in (root / "src/openai/_version.py").read_text(encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def server(runner: Runner) -> Iterator[Server]:
    names = [word for name in (*LIST["models"], "gpt-5.1", "model") for word in ("--name", name)]
    started = Server(
        runner, write_family(runner.directory / "served", "llama"), *names, "--chat_template", "chatml",
        "--max_new_tokens", "16", "--batch_size", "16",
    )  # fmt: skip
    yield started
    assert started.stop() == 0


def outcomes(checkout: Path, server: Server, report: Path) -> dict[str, str]:
    """What was wrong in each test that reaches the server; empty for one that passed."""
    folder = checkout / "tests/api_resources"
    command = [checkout / ".venv/bin/python", "-m", "pytest", "-q", "-o", "addopts=", "-k", "not path_params"]
    subprocess.run(
        [*map(str, command), f"--junitxml={report}", *(str(folder / name) for name in LIST["files"])],
        cwd=checkout,
        env={**os.environ, "TEST_API_BASE_URL": f"{server.url}/v1", "PYTHONPATH": ""},
        stdout=subprocess.DEVNULL,
        timeout=600,
    )
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        *module, group = case.attrib["classname"].removeprefix("tests.api_resources.").split(".")
        kind = "async" if group.startswith("TestAsync") else "sync"
        wrong = case.find("failure") if case.find("error") is None else case.find("error")
        message = "" if wrong is None else f"{wrong.attrib['message']}\n{wrong.text}"
        assert case.find("skipped") is None
        found[f"{'/'.join(module)}.py::{case.attrib['name']} {kind}"] = message
    return found


def refusals(name: str) -> list[dict[str, str]]:
    """What the list says of a test that is refused."""
    return [entry for entry in LIST["refused"] if re.search(entry["tests"], name)]


def test_the_clients_own_tests(checkout: Path, server: Server, tmp_path: Path) -> None:
    found = outcomes(checkout, server, tmp_path / "report.xml")
    wrong = {}
    for name, message in found.items():
        refused = refusals(name)
        is_told = bool(message) and len(refused) == 1 and re.search(refused[0]["says"], message) is not None
        if not (is_told if refused else message == ""):
            wrong[name] = message[-500:]
    assert wrong == {}
    counts = collections.Counter(entry["what"] for name in found for entry in refusals(name) or [{"what": "passed"}])
    assert counts == LIST["counts"]


def sent(path: Path, method: str) -> dict[str, Any]:
    """What the test of every parameter gives a method."""
    found = [
        {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg is not None}
        for test in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(test, ast.FunctionDef) and "_with_all_params" in test.name
        for call in ast.walk(test)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == method
    ]
    return found[0]


def fault(server: Server, path: str, asked: dict[str, Any]) -> str | None:
    """What the server says is wrong with a request; None for one that it answers, whole or as a stream."""
    try:
        body = json.dumps(asked).encode()
        kind = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(server.url + path, body, kind), timeout=60) as response:
            response.read()
    except urllib.error.HTTPError as error:
        message: str = json.load(error)["error"]["message"]
        return message
    return None


@pytest.mark.parametrize("method", LIST["parameters"])
def test_each_parameter_is_taken_or_refused_by_name(checkout: Path, server: Server, method: str) -> None:
    how = LIST["parameters"][method]
    given = sent(checkout / "tests/api_resources" / how["file"], method)
    needed = {key: given[key] for key in how["needed"]}
    wrong = {}
    for key in given:
        asked = {**needed, key: given[key]}
        if key == "stream_options":
            asked["stream"] = True
        message = fault(server, how["path"], asked)
        is_named = message is not None and message.startswith((f"{key}:", f"{key}."))
        if not (is_named if key in how["refused"] else message is None):
            wrong[key] = message
    assert wrong == {}
    assert set(how["refused"]) <= set(given)


def test_the_documentation_has_the_counts() -> None:
    text = (ROOT / "docs/guide/serve-answers.md").read_text(encoding="utf-8")
    counts = LIST["counts"]
    total = sum(counts.values())
    told = f"openai-python {LIST['version']}: of {total} tests {counts['passed']} pass"
    assert told in " ".join(text.split())
    assert {
        what: f"| {what}: {count} |" in text for what, count in counts.items() if what != "passed"
    } == dict.fromkeys({entry["what"] for entry in LIST["refused"]}, True)
    chinese = (ROOT / "docs/zh/guide/inference.md").read_text(encoding="utf-8")
    assert f"openai-python {LIST['version']} 的 {total} 个测试通过 {counts['passed']} 个" in chinese
