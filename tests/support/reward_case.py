"""Rewards of a recipe and completions that they score, for tests of rewards."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from llmsuite.contract.schema.reward import RewardSection
from llmsuite.rl import reward_sections
from llmsuite.rl.completion import Completion
from llmsuite.rl.rewards import Rewards

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


def functions(folder: Path, code: str) -> str:
    """A file with rewards; returns its name."""
    path = folder / "my_rewards.py"
    path.write_text(code)
    return str(path)


CODE = """
import os, pickle, signal, stat, struct, subprocess, time

def is_socket(number):
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False

def pipes():
    return [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2 and is_socket(number)]

def message(*values):
    text = pickle.dumps((*values, ""))
    return struct.pack("!i", len(text)) + text

def score(completions):
    (c,) = completions
    print("on its own output")
    kind = c.text
    if kind == "raises": raise ValueError("no such thing")
    if kind == "hangs": time.sleep(600)
    if kind == "dies": os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "leaves": os._exit(4)
    if kind == "starts": subprocess.Popen(["sleep", "600"], start_new_session=True)
    if kind == "waits": subprocess.run(["sleep", "600"])
    if kind == "forks" and os.fork() == 0: return [1.0]
    if kind == "meddles": [os.write(fd, b"\\0\\0\\0\\4ouch") for fd in pipes()]
    if kind == "breaks off": [os.write(fd, b"\\0\\0\\4\\0ouch") for fd in pipes()]; time.sleep(600)
    if kind == "answers twice": [os.write(fd, message(77, [1.0])) for fd in pipes()]
    return {"nan": [float("nan")], "inf": [float("inf")], "none": [None], "short": [], "number": 3.0,
            "text": ["1"], "mapping": [{"score": 1.0, "more": 2.0}], "list": [[1.0]],
            "huge": [10**400]}.get(kind, [1.0])
"""
