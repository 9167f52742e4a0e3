"""Rewards that start processes and take too long, again and again: each is missing, and no process is left.

python -m tests.tools.timeouts [CALLS]

Every call starts processes in one of several ways, some of which leave its group and session, and takes too long.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np

from llmsuite.contract.schema.reward import RewardSection
from llmsuite.rl.rewards import Rewards
from tests.support.reward_case import completion
from tests.tools.faults import MARK, ORPHAN_SECONDS, marked

_CODE = """
import os, signal, subprocess, sys, time

WAYS = [
    lambda: subprocess.Popen(["sleep", "600"]),
    lambda: subprocess.Popen(["sleep", "600"], start_new_session=True),
    lambda: os.fork() or time.sleep(600),
    lambda: os.fork() or (os.setsid(), os.fork(), time.sleep(600)),
    lambda: os.fork() or (signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(600)),
]

def score(completions):
    WAYS[int(completions[0].text) % len(WAYS)]()
    time.sleep(600)
"""
_ROUND = 50
"""Calls that are made together."""


def main(calls: int) -> int:
    """Make calls; returns how many went wrong, or processes that are left."""
    mark = os.environ[MARK] = uuid.uuid4().hex  # what is started inherits it; this process began without
    missing = 0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "slow_reward.py"
        file.write_text(_CODE)
        section = RewardSection(functions={f"{file}:score": 1.0}, time_limit=0.5, workers=4, max_failed=1.0)
        rewards = Rewards(section, {})
        for first in range(0, calls, _ROUND):
            numbers = range(first, min(calls, first + _ROUND))
            missing += int(np.isnan(rewards.score([completion(str(n), n) for n in numbers])).sum())
            print(f"{numbers.stop}/{calls} calls, {time.monotonic() - begun:.0f} s", flush=True)
        rewards.close()
    deadline = time.monotonic() + ORPHAN_SECONDS
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    print(f"{missing} of {calls} calls took too long; processes left: {left or 'none'}")
    return calls - missing + len(left)


if __name__ == "__main__":
    sys.exit(1 if main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000) else 0)
