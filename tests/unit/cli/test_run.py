"""What `llmsuite run` sets before Paddle is imported."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from llmsuite.cli import run as run_command
from llmsuite.devices import start
from llmsuite.devices.gpu import GpuBackend
from llmsuite.errors import Problem
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import RunPlan

FLAGS = GpuBackend.deterministic_flags


class Started(Exception):
    """In place of Paddle's import."""


@pytest.mark.parametrize(
    ("given", "worker", "expected"),
    [
        ("false", False, {"FLAGS_cudnn_deterministic": "0", "FLAGS_embedding_deterministic": None}),
        ("true", False, FLAGS),
        ("true", True, FLAGS),  # whoever has started the rank
    ],
)
def test_deterministic_kernels_are_chosen_before_paddle_reads_its_flags(
    write_recipe: Callable[..., Path],
    registry: Registry,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    worker: bool,
    expected: dict[str, str | None],
) -> None:
    monkeypatch.setenv("FLAGS_cudnn_deterministic", "0")  # which the shell has exported
    monkeypatch.setenv("FLAGS_embedding_deterministic", "")  # so that it is restored
    monkeypatch.delenv("FLAGS_embedding_deterministic")
    if worker:
        monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    found: dict[str, str | None] = {}

    def started(*arguments: object, **options: object) -> None:
        found.update({name: os.environ.get(name) for name in expected})
        raise Started

    monkeypatch.setattr(start, "start_paddle", started)
    monkeypatch.setattr(run_command, "_check", lambda *arguments: None)
    words = ["--device=gpu", f"--engine.deterministic={given}"]
    args = types.SimpleNamespace(recipe=str(write_recipe()), overrides=words, smoke=False, resume=False)
    with pytest.raises(Started):
        run_command.run(args, registry)
    assert found == expected


def test_a_device_that_cannot_repeat_itself_is_refused(
    plan: Callable[..., RunPlan], problems: Callable[..., list[Problem]]
) -> None:
    for device in ("cpu", "gpu"):
        assert plan({"device": device, "engine.deterministic": True}).recipe.engine.deterministic
    (found,) = problems({"device": "xpu", "engine.deterministic": True})
    assert found.key == "engine.deterministic"
    assert found.message == "nothing makes the sums of xpu repeat themselves to the last bit; set it to false"
