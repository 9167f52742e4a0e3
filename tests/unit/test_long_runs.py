"""The check that finds long runs whose memory grows."""

from __future__ import annotations

import pytest

from tests.tools.long_runs import Growing, Sample, check

MIB = 2**20


def _samples(leak: int = 0, files: float = 0.0, threads: float = 0.0) -> list[Sample]:
    """A run of 2,000 steps that fills its caches, whose memory goes up and down, and that leaks so much a step."""
    steps = range(1, 2001, 20)
    swing = [(number * 7 % 5) * 8 * MIB for number in range(len(steps))]
    return [
        Sample(n, 200 * MIB + min(n, 400) * MIB // 10 + up + leak * n, round(20 + files * n), round(5 + threads * n))
        for n, up in zip(steps, swing)
    ]


def test_a_run_that_settles_does_not_grow() -> None:
    assert check(_samples()) == "256 to 256 MiB, 20 to 20 files, 5 to 5 threads"


@pytest.mark.parametrize("leak", [{"leak": 12_000}, {"files": 0.01}, {"threads": 0.005}])
def test_a_leak_is_found(leak: dict[str, float]) -> None:
    with pytest.raises(Growing, match="grows behind step"):
        check(_samples(**leak))  # type: ignore[arg-type]
