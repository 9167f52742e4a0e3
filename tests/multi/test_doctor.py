"""The doctor starts ranks and lets them add up tensors."""

from __future__ import annotations

import re

from tests.multi.conftest import Runner


def test_the_network_between_ranks(runner: Runner) -> None:
    output = runner.run("doctor", "--num_devices=3")
    speed = re.search(
        r"^ok +network +all-reduce over 3 ranks: ([\d.]+) GB/s a rank at 16 MiB, ([\d.]+) ms", output, re.M
    )
    assert speed, output
    for pair in ("0-1", "1-2"):
        assert re.search(rf"^(ok|warn) +ranks {pair} +[\d.]+ GB/s", output, re.M), output
