"""A program's operations run one after the other: threads of Paddle's would each keep memory of their own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT

STEPS = """
import paddle
from tests.support.step_programs import SGD, Product, make_batch, make_programs
programs, _ = make_programs(Product(), SGD)
for step, parts in ((1, 1), (2, 2)):
    programs.run(step, make_batch(step), parts)
print(paddle.get_flags("FLAGS_enable_pir_in_executor_trace_run"))
"""


def test_no_threads_share_a_program() -> None:
    """Paddle logs each way of running programs once a process."""
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        cwd=ROOT,
        env={**os.environ, "GLOG_minloglevel": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "running by trace mode" in done.stderr
    assert "running by multi-thread mode" not in done.stderr
    assert done.stdout.split() == ["{'FLAGS_enable_pir_in_executor_trace_run':", "False}"]  # as it was, for others
