"""The ranks of `scaling.py`: run one strategy after another, and leave what each rank has counted as RANK.json.

    python benchmarks/scaling_ranks.py CASES DIRECTORY

CASES is a file of JSON: {"ranks", "steps", "cases": {name: words of the command line}}. Of every case the steps are
timed one by one, from the beginning of one to the beginning of the next; in one more step, which is not timed, all that
is sent is written down, and what lies in memory is counted.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
WARM_UP = 2
"""Steps before those that are timed."""
RECIPE = ROOT / "recipes" / "llama" / "pretrain.json"


def main(file: Path, directory: Path) -> int:
    """The launcher: ranks are forks of it, so Paddle is imported once."""
    from llmsuite.contract.registry import load_plugins
    from llmsuite.devices.start import start_paddle
    from llmsuite.launch.launch import launch
    from tests.support import gloo_trace

    asked = json.loads(file.read_text())
    backend = load_plugins().devices["cpu"].factory()
    num_ranks = int(asked["ranks"])
    gloo_trace.install()
    backend.prepare_ranks()
    start_paddle(backend, num_ranks, fork=True)

    def work() -> int:
        backend.after_paddle()
        return run_cases(asked["cases"], asked["steps"], directory)

    environment = backend.variables(num_ranks, 0)
    return launch(work, num_ranks, directory / "logs", lambda _: environment, lambda text: None, None, 300.0)


def run_cases(cases: dict[str, list[str]], steps: int, directory: Path) -> int:
    """In a rank."""
    import paddle.distributed as dist

    from llmsuite.contract.registry import load_plugins
    from llmsuite.engine.trainer import run
    from llmsuite.launch import calls
    from llmsuite.recipe.resolve import plan_run
    from tests.support.gloo_groups import reused

    calls.start()
    os.environ["LLMSUITE_PLUGINS"] = ""
    registry = load_plugins()
    found = {}
    groups: dict[Any, Any] = {}
    new_group = dist.new_group
    rank = os.environ["PADDLE_TRAINER_ID"]
    for name, words in cases.items():
        plan = plan_run(RECIPE, [*words, f"--output_dir={directory / name}"], registry, smoke=True)
        # a group brings threads that wake up all the time: those of the cases before must not slow this one down
        dist.new_group = reused(new_group, groups)
        with counted(WARM_UP + steps + 1) as record:
            if (code := run(plan, registry, resume=False)) != 0:
                return code
        record["seconds"], record["cpu_seconds"] = (record[key][WARM_UP:] for key in ("seconds", "cpu_seconds"))
        found[name] = record
    (directory / f"{rank}.json").write_text(json.dumps(found))
    return 0


@contextlib.contextmanager
def counted(last: int) -> Iterator[dict[str, Any]]:
    """Around a run of `last` steps, which takes the times of all but the last; that one is counted."""
    from llmsuite.engine import eager_engine
    from llmsuite.parallel.optimizer import Optimizer
    from tests.support import gloo_trace

    record: dict[str, Any] = {"seconds": [], "cpu_seconds": []}
    train_step = eager_engine.train_step
    finish = Optimizer.finish_gradients
    before = live_bytes()
    since: list[tuple[float, float]] = []

    def noted(engine: Any, step: int, *args: Any) -> Any:
        now = time.perf_counter(), time.process_time()
        if since:
            clock, cpu = since.pop()
            record["seconds"].append(now[0] - clock)
            record["cpu_seconds"].append(now[1] - cpu)
        if step != last:
            since.append(now)
            return train_step(engine, step, *args)
        between = live_bytes() - before
        record["held"] = {**held(engine.passes.model, engine.optimizer), "between_steps": between}

        def finished(self: Optimizer, weight: float) -> Any:
            record["held"]["gradients"] = live_bytes() - before - between
            return finish(self, weight)

        messages: gloo_trace.Messages = collections.Counter()
        Optimizer.finish_gradients = finished  # type: ignore[method-assign]
        with gloo_trace.traced(messages):
            result = train_step(engine, step, *args)
        record["sent"] = [[operation, shape, width, n] for (_, operation, shape, width), n in messages.items()]
        return result

    eager_engine.train_step = noted
    try:
        yield record
    finally:
        eager_engine.train_step = train_step  # type: ignore[method-assign]
        Optimizer.finish_gradients = finish


def live_bytes() -> int:
    """Bytes of all tensors of this process, by Paddle's own count.

    The least of some readings: copies that a thread has just sent to a neighbour in the pipeline are freed meanwhile.
    """
    from paddle.base import core

    gc.collect()
    readings = []
    for _ in range(20):
        readings.append(int(core.host_memory_stat_current_value("Allocated", 0)))
        time.sleep(0.005)
    return min(readings)


def held(model: Any, optimizer: Any) -> dict[str, int]:
    """Bytes of what lives between steps, each tensor once: in stage 3 the piece of a parameter is what is updated."""
    from llmsuite.parallel.tensor import local_value

    whole = [local_value(p) for _, p in model.named_parameters() if p._is_initialized()]
    copies = [shard.main_param for shard in optimizer.shards if shard.shard_is_copy]
    stored = [s.main_param for s in optimizer.shards if not s.shard_is_copy and not s.parameter._is_initialized()]
    moments = [entry.value for entry in optimizer.state() if not entry.is_scalar and not entry.shard.is_empty]
    return {"parameters": _bytes(whole + stored), "pieces": _bytes(copies), "moments": _bytes(moments)}


def _bytes(tensors: Sequence[Any]) -> int:
    return sum(int(tensor.size) * int(tensor.element_size()) for tensor in tensors)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
