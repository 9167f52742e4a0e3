"""A rank that runs one recipe after another in the same process; `tests.parity.cases` starts it.

    python -m tests.parity.worker CASES.json

Every case gets a mesh, groups, a model and a cache of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from llmsuite.cli import commands
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.start import start_paddle
from llmsuite.plugins import builtin
from llmsuite.plugins.manager import PluginInfo, load_plugins
from llmsuite.recipe.resolve import plan_run


def main(path: Path) -> int:
    """Run the cases in a file; after each, rank 0 leaves a file `done` in its directory."""
    cases = json.loads(path.read_text())
    rank, num_ranks = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    start_paddle(CpuBackend(), num_ranks, join=num_ranks > 1)
    from llmsuite.stages.run import run
    from tests.parity import token_stage
    from tests.parity.mutations import mutated

    registry = load_plugins(builtin, commands)
    registry.add(PluginInfo("tokens", "tests", "tokens", plugin=token_stage))
    for case in cases:
        print(f"== {case['name']}", flush=True)
        directory = path.parent / case["name"]
        os.environ["LLMSUITE_CACHE"] = str(directory / "cache")  # what is computed before the first step counts too
        plan = plan_run(case["recipe"], [*case["words"], f"--output_dir={directory}"], registry, smoke=True)
        with mutated(case["mutation"]):
            code = run(plan, registry, resume=False)
        assert code == 0, code
        if rank == 0:
            (directory / "done").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
