"""The number of ranks of a command line."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.cli.ranks import launch_ranks, settle_degrees
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.cpu import CpuBackend


@pytest.mark.parametrize(
    ("num_devices", "tp", "pp", "expected"),
    [
        (1, None, 1, (1, 1)),
        (4, None, 1, (1, 4)),
        (1, 2, 1, (1, 2)),
        (4, None, 2, (2, 2)),
        (1, None, 3, (3, 1)),
        (4, 2, 2, (2, 2)),
        (1, 2, 2, (2, 2)),
    ],
)
def test_degrees_that_are_not_given_follow_from_the_others(
    num_devices: int, tp: int | None, pp: int, expected: tuple[int, int]
) -> None:
    args = types.SimpleNamespace(num_devices=num_devices, tensor_parallel_degree=tp, pipeline_parallel_degree=pp)
    for _ in range(2):  # a rank has the same command line
        assert settle_degrees(args) == Degrees(expected[0], 1, 1, expected[1])
        assert (args.num_devices, args.tensor_parallel_degree) == (expected[0] * expected[1], expected[1])


@pytest.mark.parametrize(("num_devices", "tp", "pp"), [(3, None, 2), (2, 4, 1), (4, 2, 1), (2, None, 4)])
def test_contradictions_are_refused(num_devices: int, tp: int | None, pp: int) -> None:
    args = types.SimpleNamespace(num_devices=num_devices, tensor_parallel_degree=tp, pipeline_parallel_degree=pp)
    with pytest.raises(UserError, match=f"--num_devices: is {num_devices}, and tensor parallel x pipeline parallel is"):
        settle_degrees(args)


def test_deleted_logs_are_not_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def launch(command: Any, count: int, logs: Path, environment: Any, write: Callable[[str], None]) -> int:
        write(f"too many heads\nrank 1 ended with exit code 2; its log: {logs}/workerlog.1\n")
        return 2

    monkeypatch.setattr("llmsuite.launch.launch.launch", launch)
    monkeypatch.setattr(CpuBackend, "prepare_ranks", lambda self: None)
    registry: Any = types.SimpleNamespace(device=lambda name: types.SimpleNamespace(factory=CpuBackend))
    assert launch_ranks(types.SimpleNamespace(device="cpu", num_devices=2), registry) == 2
    assert capsys.readouterr().out == "too many heads\nrank 1 ended with exit code 2\n"
