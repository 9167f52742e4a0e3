"""Rewards of users' files and of plugins: what they give, what is missing of them, and what ends a run."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.reward import RewardSection
from llmsuite.contract.schema.section import Section
from llmsuite.contract.specs import RewardSpec
from llmsuite.rl.completion import Completion
from tests.support.reward_case import CODE, KNOWN, Making, completion, functions


def test_a_function_in_a_file(make: Making, tmp_path: Path) -> None:
    code = "def words(completions):\n    return [len(c.text.split()) for c in completions]\n"
    file = functions(tmp_path, code + "def one(completions):\n    return (1,)\n")
    rewards = make({f"{file}:words": 0.5, "exact": 1.0, f"{file}:one": 2.0})
    assert rewards.names == ("words", "exact", "one")
    found = rewards.score([completion("a b"), completion("4")])
    assert rewards.total(found).tolist() == [3.0, 3.5]


def test_an_async_function_is_run_to_its_end(make: Making, tmp_path: Path) -> None:
    code = "import asyncio\nlock = asyncio.Lock()\nasync def answers(completions):\n    async with lock:\n"
    code += "        await asyncio.sleep(0.01)\n    return [float(c.text) for c in completions]\n"
    rewards = make({functions(tmp_path, code) + ":answers": 1.0}, max_failed=0.5)
    assert rewards.score([completion("4"), completion("5", 1)]).tolist() == [[4.0], [5.0]]
    assert np.isnan(rewards.score([completion("no"), completion("5", 1)])[0, 0])
    assert "ValueError: could not convert string to float: 'no'" in rewards.first_failure


def test_a_file_called_as_another_module(make: Making, tmp_path: Path) -> None:
    (tmp_path / "pickle.py").write_text("def score(completions):\n    return [1]\n")
    with pytest.raises(UserError, match="a module 'pickle' is imported already; give the file another name"):
        make({f"{tmp_path}/pickle.py:score": 1.0}).score([completion("4")])


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise ImportError('not today')", r"cannot be loaded: ImportError: not today \(my_rewards.py:1\)"),
        ("other = 1", "has no function 'score'"),
        ("score = 1", "it is not a function that scores completions"),
        ("import os; os._exit(3)", "its process ended with exit code 3"),
    ],
)
def test_a_function_that_cannot_be_loaded_ends_the_run(make: Making, tmp_path: Path, code: str, why: str) -> None:
    rewards = make({functions(tmp_path, code) + ":score": 1.0})
    with pytest.raises(UserError, match=why):
        rewards.load()
    with pytest.raises(UserError, match=why):
        rewards.score([completion("4")])


FAILURES = {
    "raises": r"ValueError: no such thing \(my_rewards.py:21\)",
    "hangs": r"it took longer than 1.5 s \(reward.time_limit\)",
    "dies": "its process was killed by signal 11",
    "leaves": "its process ended with exit code 4",
    "nan": "it returned nan",
    "inf": "it returned inf",
    "none": "it returned None",
    "huge": "OverflowError|too large",
    "short": r"it returned \[\], which is not a list of 1 rewards",
    "number": "it returned 3.0, which is not a list of 1 rewards",
    "text": "it returned '1', which is a text, not a number",
    "mapping": r"it returned the keys \['more', 'score'\], not \['score'\]",
    "list": r"it returned \[1.0\], which is not a number",
    "waits": r"it took longer than 1.5 s \(reward.time_limit\)",
    "meddles": r"its process sent no result \(UnpicklingError\)",
    "breaks off": r"it took longer than 1.5 s \(reward.time_limit\)",
    "answers twice": "its process sent no result",
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


def test_a_reward_that_takes_too_much_memory_is_missing(make: Making, tmp_path: Path) -> None:
    code = "import time\ndef score(completions):\n    if completions[0].text == 'much':\n"
    code += "        more = bytearray(300 << 20)\n        time.sleep(30)\n    return [1.0]\n"
    rewards = make({functions(tmp_path, code) + ":score": 1.0}, memory_limit=0.25, max_failed=0.5, workers=1)
    found = rewards.score([completion(text, i) for i, text in enumerate(["fine", "much", "fine"])])
    assert np.isnan(found).ravel().tolist() == [False, True, False]
    assert "its process took more than 0.25 GiB (reward.memory_limit)" in rewards.first_failure


def test_a_process_that_is_stopped_between_calls_takes_too_long(make: Making, tmp_path: Path) -> None:
    """It reads no call, and nobody waits until it does."""
    code = "import os, signal, threading\ndef score(completions):\n    stop = (os.getpid(), signal.SIGSTOP)\n"
    code += "    if completions[0].text == 'stop': threading.Timer(0.2, os.kill, stop).start()\n    return [1.0]\n"
    rewards = make({functions(tmp_path, code) + ":score": 1.0}, time_limit=1.5, max_failed=1.0, workers=1)
    assert rewards.score([completion("stop")]).tolist() == [[1.0]]
    time.sleep(0.5)
    found = rewards.score([completion("x" * 4_000_000), completion("fine", 1)])
    assert np.isnan(found).ravel().tolist() == [True, False]
    assert "it took longer than 1.5 s (reward.time_limit)" in rewards.first_failure


def test_a_process_that_ends_between_calls_fails_no_call(make: Making, tmp_path: Path) -> None:
    code = "import os, threading\ndef score(completions):\n    threading.Timer(0.2, os._exit, [3]).start()\n"
    code += "    return [float(os.getpid()) for _ in completions]\n"
    rewards = make({functions(tmp_path, code) + ":score": 1.0}, max_failed=0.0, workers=1)
    pids = []
    for _ in range(3):
        pids.append(rewards.score([completion("4")]).item())
        deadline = time.monotonic() + 30
        while Path(f"/proc/{pids[-1]:.0f}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert len({*pids}) == 3
    assert not rewards.first_failure


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


def test_children_of_rewards_end_with_their_processes(
    make: Making, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a call that was in time, of one that was not, and of a fork that came back as its parent did."""
    monkeypatch.setenv("REWARD_STARTED_BY", str(tmp_path))
    rewards = make({functions(tmp_path, CODE) + ":score": 1.0}, time_limit=1.5, workers=2)
    found = rewards.score([completion(kind, i) for i, kind in enumerate(["starts", "waits", "forks", "fine"])])
    assert found[[0, 2, 3]].tolist() == [[1.0], [1.0], [1.0]]
    assert np.isnan(found[1, 0])
    rewards.close()
    own = f"/proc/{os.getpid()}"
    mark = f"REWARD_STARTED_BY={tmp_path}".encode()
    assert [p for p in _environments() if str(p.parent) != own and mark in _read(p)] == []


def _environments() -> list[Path]:
    return list(Path("/proc").glob("[0-9]*/environ"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


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


def _nothing(options: Any) -> Any:
    """A factory that forgets to return."""


def test_a_factory_that_returns_nothing(make: Making) -> None:
    spec = RewardSpec(name="empty", help="", factory=_nothing)
    with pytest.raises(UserError, match="reward empty: its factory returned None, which is not a function that scores"):
        make({"empty": 1.0}, known={"empty": spec}).load()


def test_names_in_metrics_are_different() -> None:
    found = dict(RewardSection(functions={"a.py:score": 1.0, "b.py:score": 1.0}).problems())
    assert found == {"functions": "has two rewards called 'score'; give one of the functions another name"}
    assert "is empty" in dict(RewardSection(functions={}).problems())["functions"]
    assert "only weights of 0" in dict(RewardSection(functions={"exact": 0.0}).problems())["functions"]
    assert list(RewardSection(functions={"exact": 1.0}).problems()) == []
