"""The memory that loading a model in FP8 takes, in each rank of a mesh; `tests.tools.launched` starts it.

    main(DIRECTORY, WORD...)

loads `DIRECTORY/model` as the recipe with these overrides does, and writes `DIRECTORY/memory-RANK.json`.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import numpy as np

from llmsuite.contract.registry import load_plugins
from llmsuite.recipe.resolve import plan_run

RECIPE = "recipes/deepseek/sft.json"


def main(directory: str, *words: str) -> int:
    """Load it twice: what is imported and cached the first time is no memory of the model."""
    from llmsuite.engine.build import build_model
    from llmsuite.parallel import collective
    from llmsuite.parallel.tensor import local_value

    registry = load_plugins()
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    for name in ("small", "model"):
        path = Path(directory) / name
        plan = plan_run(RECIPE, [f"--model.weights={path}", "--model.config={}", *words], registry, smoke=True)
        backend = plan.parallel.device.factory()
        backend.activate(collective.local_rank())
        mesh = collective.start(plan.parallel.degrees)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is there now
        before = _kilobytes("VmRSS")
        built = build_model(plan.model, plan.parallel, plan.train, registry, backend, mesh)
        peak = _kilobytes("VmHWM") - before
        parameters = [local_value(parameter) for _, parameter in built.part.named_parameters()]
        size = sum(int(np.prod(p.shape)) * p.element_size() for p in parameters)
    Path(directory, f"memory-{rank}.json").write_text(json.dumps({"model": size, "peak": peak << 10}))
    return 0


def _kilobytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))
