"""Every recipe, made small by `--smoke`, on its own mesh in 16 bits, on processes that stand in for GPUs; some op by op
and by programs of layers, as in `tests.tools.matrix`.

    python -m tests.tools.sixteen_bits [--precision fp16] [RECIPE...]

with names such as llama/sft; without any, all of them. A recipe passes that runs to its end with finite numbers: no
operation of it lacks a 16-bit form, no kernel gets what the GPU's would refuse, no message has another dtype than its
receiver expects. That the numbers are right is for tests/multi/test_standin.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path

from llmsuite.contract.registry import PluginInfo
from tests import standin
from tests.conftest import registry_with
from tests.multi.conftest import Runner
from tests.parity.cases import run_cases
from tests.tools.matrix import entries


def main(arguments: list[str]) -> int:
    """Run the recipes that are named, or all; 1 where one does not pass."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.sixteen_bits")
    parser.add_argument("--precision", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    given = parser.parse_args(arguments)
    registry = registry_with()
    registry.add(PluginInfo("standin", "tests", "standin", plugin=standin))
    chosen = [e for e in entries() if e.recipe in (given.recipes or [e.recipe])]
    if missing := {*given.recipes} - {e.recipe for e in chosen}:
        parser.error(f"no recipe {', '.join(sorted(missing))}")
    on = ["--device=standin", f"--engine.precision={given.precision}"]
    with tempfile.TemporaryDirectory() as directory:
        runner = Runner(Path(directory))
        cases = {e: dataclasses.replace(e.many(registry), trace=False) for e in chosen}
        cases = {e: dataclasses.replace(case, words=[*case.words, *on]) for e, case in cases.items()}
        failed = run_cases(runner, cases.values())
        bad = 0
        for entry, case in cases.items():
            problem = _problem(runner, case.name, entry.trains(registry), failed.get(case.name))
            bad += problem is not None
            print(f"{entry.recipe}, {entry.mode}: {problem or 'passed'}", flush=True)
    print(f"{len(cases)} runs in {given.precision}, {bad} did not pass")
    return int(bad > 0)


def _problem(runner: Runner, name: str, trains: bool, printed: str | None) -> str | None:
    if printed is not None:
        lines = [line for line in printed.splitlines() if "Error" in line] or printed.splitlines()
        return lines[-1].strip()[:300]
    steps = runner.metrics(name) if trains else []
    wrong = [s for s in steps if not (math.isfinite(s["loss"]) and (s.get("skipped") or s["grad_norm"] > 0))]
    return f"step {json.dumps(wrong[0])}" if wrong or len(steps) != 3 * trains else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
