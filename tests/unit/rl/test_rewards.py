"""Rewards in processes: what they give, what is missing of them, and what ends a run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.errors import UserError
from llmsuite.rl import reward_sections
from llmsuite.rl.completion import Completion
from llmsuite.rl.rewards import Rewards
from llmsuite.schema.reward import RewardSection
from llmsuite.schema.section import Section, unread
from llmsuite.specs import RewardSpec

KNOWN = {spec.name: spec for spec in reward_sections.BUILTIN}


def completion(text: str, number: int = 0, group: int = 0, **more: Any) -> Completion:
    columns = {"answer": "4", **more.pop("columns", {})}
    given: dict[str, Any] = {"ids": [5] * len(text.split()) + [1], "finish_reason": "stop", **more}
    return Completion(
        prompt_ids=[3], logprobs=[-0.5], text=text, columns=columns, group=group, number=number, prompt="2+2?", **given
    )


def section(functions: dict[str, float], own: dict[str, Any] | None = None, **keys: Any) -> Any:
    """The section `reward` with the sections of rewards, as a recipe has it."""
    specs = [spec for spec in KNOWN.values() if spec.config_cls]
    fields = [(spec.name, Any, dataclasses.field(default_factory=spec.config_cls)) for spec in specs]
    cls: Any = dataclasses.make_dataclass("RewardSection", fields, bases=(RewardSection,), kw_only=True)
    return cls(functions=functions, **{"time_limit": 5.0, "workers": 1, "max_failed": 1.0, **keys}, **(own or {}))


class Making:
    """Makes rewards and ends their processes."""

    def __init__(self) -> None:
        self.made: list[Rewards] = []

    def __call__(
        self, functions: dict[str, float], own: dict[str, Any] | None = None, known: Any = KNOWN, **keys: Any
    ) -> Rewards:
        self.made.append(Rewards(section(functions, own, **keys), known))
        return self.made[-1]


@pytest.fixture
def make() -> Iterator[Making]:
    making = Making()
    yield making
    for rewards in making.made:
        rewards.close()


def functions(folder: Path, code: str) -> str:
    """A file with rewards; returns its name."""
    path = folder / "my_rewards.py"
    path.write_text(code)
    return str(path)


# what comes with llmsuite


def test_exact_format_and_length(make: Making) -> None:
    own = {
        "exact": reward_sections.ExactSection(),
        "format": reward_sections.FormatSection(pattern="<a>.*</a>"),
        "length": reward_sections.LengthSection(target=4),
    }
    rewards = make({"exact": 1.0, "format": 0.5, "length": 0.25}, own)
    assert rewards.names == ("exact", "format", "length")
    texts = [" 4\n", "4", "<a>1\n2</a>", "no <a>4</a>", "1 2 3 4 5 6 7 8 9"]
    completions = [completion(text, number) for number, text in enumerate(texts)]
    completions[1] = dataclasses.replace(completions[1], finish_reason="length")
    found = rewards.score(completions)
    assert found[:, 0].tolist() == [1, 0, 0, 0, 0]
    assert found[:, 1].tolist() == [0, 0, 1, 0, 0]
    assert found[:, 2].tolist() == [-0.5, -0.5, -0.25, -0.25, -1.0]
    assert rewards.total(found).tolist() == [0.875, -0.125, 0.4375, -0.0625, -0.25]
    rewards.check(found)


def test_only_longer_ones_are_too_long(make: Making) -> None:
    rewards = make({"length": 1.0}, {"length": reward_sections.LengthSection(target=4, only_longer=True)})
    assert rewards.score([completion("1"), completion("1 2 3 4 5")]).tolist() == [[0.0], [-0.5]]


def test_math_knows_equal_from_alike(make: Making) -> None:
    rewards = make({"math": 1.0})
    columns = {"answer": r"$\frac{1}{2}$"}
    texts = ["so it is $0.5$", r"\boxed{\frac{2}{4}}", "it is $0.4$", "no idea"]
    found = rewards.score([completion(text, columns=columns) for text in texts])
    assert found.ravel().tolist() == [1, 1, 0, 0]
    assert rewards.score([completion("it is 4")]).tolist() == [[1.0]]
    columns = {"answer": r"\frac{1}{3}"}
    assert rewards.score([completion(r"$\frac{2}{6}$", columns=columns)]).tolist() == [[1.0]]
    assert np.isnan(rewards.score([completion("4", columns={"answer": "whatever you like"})])).all()
    assert "is no mathematical expression" in rewards.first_failure


def test_a_missing_package_is_named(make: Making, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('none here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"pip install 'llmsuite\[math\]'"):
        make({"math": 1.0}).score([completion("4")])


def test_a_row_without_the_column_names_its_others(make: Making) -> None:
    rewards = make({"exact": 1.0}, {"exact": reward_sections.ExactSection(column="gold")})
    assert np.isnan(rewards.score([completion("4", columns={"task": "sum"})])).all()
    assert "the row has no 'gold' (reward.exact.column); its other columns: answer, task" in rewards.first_failure


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("8*(3-8/8)", 0.0),  # 16, with one 8 too many
        ("8+8", 0.0),  # 16, without the 3
        ("8+3+8", 0.0),  # each number, another value
        ("8*3-8", 1.0),
        (" -(8-(8*3)) ", 1.0),
        ("8*3+-8", 0.0),  # -8 is no number of the row
        ("8*3-8=16", 0.0),
        ("8*3-8 or so", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_takes_each_number_once_and_the_exact_value(make: Making, text: str, score: float) -> None:
    row = {"columns": {"numbers": [8, 3, "8"], "target": 16}}
    rewards = make({"countdown": 1.0}, {"countdown": reward_sections.CountdownSection()})
    cut = completion(text, 1, **row, finish_reason="length")
    np.testing.assert_array_equal(rewards.score([completion(text, **row), cut], 2), [[score], [0.0]])


def test_countdown_reads_the_last_match_of_a_pattern_and_needs_its_columns(make: Making) -> None:
    own = reward_sections.CountdownSection(numbers="nums", pattern="<answer>(.*?)</answer>")
    rewards = make({"countdown": 1.0}, {"countdown": own})
    row = {"columns": {"nums": [1, 2], "target": "0.5"}}
    texts = ["<answer>2/1</answer>, no: <answer>1/2</answer>", "1/2", "<answer>1/2</answer> <answer>2/1</answer>"]
    told = [completion(text, number, **row) for number, text in enumerate(texts)]
    np.testing.assert_array_equal(rewards.score([*told, completion("1/2", 3)], 4), [[1], [0], [0], [np.nan]])
    assert "the row has no 'nums' (reward.countdown.numbers)" in rewards.first_failure


@pytest.mark.parametrize(("name", "key"), [("format", "pattern"), ("length", "target"), ("http", "url")])
def test_keys_that_a_reward_cannot_do_without(make: Making, name: str, key: str) -> None:
    with pytest.raises(UserError, match=rf"reward\.{name}\.{key}: is required"):
        make({name: 1.0}).score([completion("4")])


def test_keys_are_read_of_rewards_that_are_named_only() -> None:
    found = section({"exact": 1.0})
    Rewards(found, KNOWN)
    idle = {key[0] for key in unread(found)}
    assert idle == {"countdown", "format", "length", "math", "http", "model"}


# functions in files


def test_a_function_in_a_file(make: Making, tmp_path: Path) -> None:
    code = "def words(completions):\n    return [len(c.text.split()) for c in completions]\n"
    file = functions(tmp_path, code + "def one(completions):\n    return (1,)\n")
    rewards = make({f"{file}:words": 0.5, "exact": 1.0, f"{file}:one": 2.0})
    assert rewards.names == ("words", "exact", "one")
    found = rewards.score([completion("a b"), completion("4")])
    assert rewards.total(found).tolist() == [3.0, 3.5]


def test_a_file_called_as_another_module(make: Making, tmp_path: Path) -> None:
    (tmp_path / "pickle.py").write_text("def score(completions):\n    return [1]\n")
    with pytest.raises(UserError, match="a module 'pickle' is imported already; give the file another name"):
        make({f"{tmp_path}/pickle.py:score": 1.0}).score([completion("4")])


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise ImportError('not today')", r"cannot be loaded: ImportError: not today \(my_rewards.py:1\)"),
        ("other = 1", "has no function 'score'"),
        ("score = 1", "is no function"),
        ("import os; os._exit(3)", "its process ended with exit code 3"),
    ],
)
def test_a_function_that_cannot_be_loaded_ends_the_run(make: Making, tmp_path: Path, code: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        make({functions(tmp_path, code) + ":score": 1.0}).score([completion("4")])


CODE = """
import os, time, signal

def score(completions):
    (c,) = completions
    print("on its own output")
    kind = c.text
    if kind == "raises": raise ValueError("no such thing")
    if kind == "hangs": time.sleep(600)
    if kind == "dies": os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "leaves": os._exit(4)
    return {"nan": [float("nan")], "inf": [float("inf")], "none": [None], "short": [], "number": 3.0,
            "text": ["1"], "mapping": [{"score": 1.0, "more": 2.0}], "list": [[1.0]]}.get(kind, [1.0])
"""


FAILURES = {
    "raises": r"ValueError: no such thing \(my_rewards.py:8\)",
    "hangs": r"it took longer than 1.5 s \(reward.time_limit\)",
    "dies": "its process was killed by signal 11",
    "leaves": "its process ended with exit code 4",
    "nan": "it returned nan",
    "inf": "it returned inf",
    "none": "it returned None",
    "short": r"it returned \[\], which is no list of 1 rewards",
    "number": "it returned 3.0, which is no list of 1 rewards",
    "text": "it returned '1', which is no number",
    "mapping": r"it returned the keys \['more', 'score'\], not \['score'\]",
    "list": "TypeError|float",
}


def test_a_reward_that_fails_is_missing_and_the_others_are_not(
    make: Making, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = make({functions(tmp_path, CODE) + ":score": 1.0}, time_limit=1.5, max_failed=0.2, workers=2)
    for kind, why in FAILURES.items():
        rewards.first_failure = ""
        found = rewards.score([completion(kind if i == 3 else "fine", i) for i in range(20)])
        assert np.flatnonzero(np.isnan(found)).tolist() == [3], kind
        assert (found[np.arange(20) != 3] == 1).all(), kind
        assert re.search(why, rewards.first_failure), rewards.first_failure
        assert repr(kind) in rewards.first_failure
        assert rewards.first_failure in capsys.readouterr().err
        rewards.check(found)


def test_too_many_missing_rewards_end_the_run_in_bounded_time(make: Making, tmp_path: Path) -> None:
    rewards = make({functions(tmp_path, CODE) + ":score": 1.0}, time_limit=0.5, max_failed=0.1)
    message = r"reward.max_failed: of 30 completions 4 or more have no reward, .* took longer than 0.5 s"
    with pytest.raises(UserError, match=message):
        rewards.score([completion("hangs", i) for i in range(30)])
    # the same number is no more than a tenth of all ranks'
    found = rewards.score([completion("none", i) for i in range(4)], total=40)
    assert np.isnan(found).all()
    with pytest.raises(UserError, match="of 4 completions 4 or more"):
        rewards.check(found)


def test_processes_end_with_the_rewards(make: Making, tmp_path: Path) -> None:
    file = functions(tmp_path, "import os\ndef pid(completions):\n    return [os.getpid() for c in completions]\n")
    rewards = make({f"{file}:pid": 1.0})
    pids = {int(pid) for pid in rewards.score([completion("4", i) for i in range(16)]).ravel()}
    assert os.getpid() not in pids
    rewards.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# rewards of plugins


def _relative(options: Any) -> Any:
    def score(completions: Sequence[Completion]) -> list[Any]:
        longest = max(len(c.text) for c in completions)
        return [{"score": len(c.text) / longest, "characters": len(c.text)} for c in completions]

    return score


@dataclasses.dataclass(kw_only=True)
class _Options(Section):
    value: float = 2.0
    """What everybody gets."""


def _constant(options: _Options) -> Any:
    return lambda completions: [options.value + os.getpid() * 0 for _ in completions]


def test_a_reward_for_groups_with_parts(make: Making) -> None:
    spec = RewardSpec(name="relative", help="", factory=_relative, level="group", parts=("characters",))
    rewards = make({"relative": 2.0, "exact": 0.0}, known={**KNOWN, "relative": spec})
    assert rewards.names == ("relative", "relative/characters", "exact")
    mixed = [completion("44", 0, group=1), completion("4", 0, group=0), completion("4444", 1, group=1)]
    found = rewards.score([*mixed, completion("44", 1, group=0)])
    assert found.tolist() == [[0.5, 2, 0], [0.5, 1, 1], [1, 4, 0], [1, 2, 0]]
    assert rewards.total(found).tolist() == [1, 1, 2, 2]


def test_a_reward_with_weight_0_is_recorded_only(make: Making, tmp_path: Path) -> None:
    rewards = make({functions(tmp_path, CODE) + ":score": 0.0, "exact": 1.0}, max_failed=0.0)
    found = rewards.score([completion("raises"), completion("4")])
    assert np.isnan(found[0, 0])
    assert rewards.total(found).tolist() == [0.0, 1.0]
    rewards.check(found)


def test_a_reward_in_the_process_that_trains(make: Making) -> None:
    calls: list[int] = []

    def factory(options: Any) -> Any:
        def score(completions: Sequence[Completion]) -> list[float]:
            calls.append(len(completions))
            return [float(c.number) for c in completions]

        return score

    spec = RewardSpec(name="here", help="", factory=factory, runs="main")
    rewards = make({"here": 1.0, "exact": 1.0}, known={**KNOWN, "here": spec})
    found = rewards.score([completion("4", i) for i in range(6)])
    assert rewards.total(found).tolist() == [1, 2, 3, 4, 5, 6]
    assert calls == [6]


def test_a_reward_that_no_other_process_can_load(make: Making) -> None:
    spec = RewardSpec(name="local", help="", factory=lambda options: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match="reward local: its factory cannot be sent to another process"):
        make({"local": 1.0}, known={"local": spec})


# rewards by a server


class Server:
    """Answers every POST by a function of its body: a status, and JSON data or a text."""

    def __init__(self, answer: Any):
        self.asked: list[Any] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:
                body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                self.asked.append(body)
                status, data = answer(body)
                handler.send_response(status)
                handler.end_headers()
                handler.wfile.write((data if isinstance(data, str) else json.dumps(data)).encode())

            def log_message(handler, *given: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def asking(make: Making, server: Server, **keys: Any) -> Rewards:
    return make({"http": 1.0}, {"http": reward_sections.HttpSection(url=server.url, **keys)}, workers=1)


GROUP = [completion("4", 0), completion("five", 1), completion("6", 0, group=1, columns={"answer": ["x"]})]


def test_paddlenlp_servers(make: Making) -> None:
    def answer(body: Any) -> Any:
        scores = [float(a == b) for a, b in zip(body["response"], body["tgt"])]
        return 200, {"error_code": 0, "error_msg": "Success", "score": scores}

    with Server(answer) as server:
        assert asking(make, server).score(GROUP).ravel().tolist() == [1, 0, 0]
        assert server.asked[0] == {"src": ["2+2?", "2+2?"], "tgt": ["4", "4"], "response": ["4", "five"]}
        assert server.asked[1] == {"src": ["2+2?"], "tgt": ['["x"]'], "response": ["6"]}


@pytest.mark.parametrize("wrap", [False, True])
def test_openrlhf_servers(make: Making, wrap: bool) -> None:
    def answer(body: Any) -> Any:
        found = {"rewards": [len(query) for query in body["query"]]}
        return 200, [found] if wrap else found

    with Server(answer) as server:
        assert asking(make, server, dialect="openrlhf").score(GROUP).ravel().tolist() == [5, 8, 5]
        first = {"query": ["2+2?4", "2+2?five"], "prompts": ["2+2?", "2+2?"], "labels": ["4", "4"]}
        assert server.asked[0] == first


WRONG: list[tuple[Any, str, int]] = [
    ((500, "out of memory"), "answers 500: out of memory", 2),
    ((429, "busy"), "answers 429: busy", 2),
    ((404, "not here"), "answers 404: not here", 1),
    ((200, "no JSON"), "JSONDecodeError", 1),
    ((200, {"error_code": 500, "error_msg": "it broke", "score": [0, 0]}), "the server says: it broke", 1),
    ((200, {"score": [1.0]}), "answers with no list of 2 scores", 1),
    ((200, {"rewards": [1.0, 1.0]}), "answers with no list of 2 scores", 1),
]


def test_what_a_server_gets_wrong(make: Making) -> None:
    now: list[Any] = []
    with Server(lambda body: now[-1]) as server:
        rewards = asking(make, server)
        for answer, why, tries in WRONG:
            now.append(answer)
            rewards.first_failure = ""
            server.asked.clear()
            assert np.isnan(rewards.score(GROUP[:2])).all()
            assert why in rewards.first_failure
            assert len(server.asked) == tries, answer


def test_a_server_that_comes_back_is_asked_again(make: Making) -> None:
    with Server(lambda body: (503, "wait") if len(server.asked) == 1 else (200, {"score": [1, 0]})) as server:
        assert asking(make, server).score(GROUP[:2]).ravel().tolist() == [1, 0]


def test_a_server_that_is_not_there(make: Making) -> None:
    own = {"http": reward_sections.HttpSection(url="http://127.0.0.1:9/", retries=0)}
    rewards = make({"http": 1.0}, own)
    assert np.isnan(rewards.score(GROUP[:2])).all()
    assert "http://127.0.0.1:9/: [Errno 111] Connection refused" in rewards.first_failure


def test_a_server_that_does_not_answer(make: Making) -> None:
    release = threading.Event()

    def answer(body: Any) -> Any:
        release.wait(20)
        return 200, {"score": [1, 0]}

    with Server(answer) as server:
        rewards = asking(make, server, timeout=0.2, retries=0)
        assert np.isnan(rewards.score(GROUP[:2])).all()
        release.set()
        assert "timed out" in rewards.first_failure


def test_names_in_metrics_are_different() -> None:
    found = dict(RewardSection(functions={"a.py:score": 1.0, "b.py:score": 1.0}).problems())
    assert found == {"functions": "has two rewards called 'score'; give one of the functions another name"}
    assert "is empty" in dict(RewardSection(functions={}).problems())["functions"]
    assert "weights of 0 only" in dict(RewardSection(functions={"exact": 0.0}).problems())["functions"]
    assert list(RewardSection(functions={"exact": 1.0}).problems()) == []
