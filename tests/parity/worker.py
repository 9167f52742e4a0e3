"""A rank that runs one recipe after another in the same process; `tests.parity.cases` starts it by `tests.launched`.

Every case gets a mesh, a model and a cache of its own. Groups are used again by the cases that have the same ones: each
brings two threads that wake up all the time, and after some dozen cases the processes would do nothing else.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmsuite.cli import commands
from llmsuite.plugins import builtin
from llmsuite.plugins.manager import PluginInfo, load_plugins
from llmsuite.recipe.resolve import plan_run
from tests.parity import traffic


def before_paddle(file: str) -> None:
    """In the launcher, of whose process each rank is a fork."""
    if any(case["trace"] for case in json.loads(Path(file).read_text())):
        traffic.install()


def main(file: str) -> int:
    """Run the cases in a file; after each, rank 0 leaves a file `done` in its directory."""
    path, rank = Path(file), int(os.environ["PADDLE_TRAINER_ID"])
    cases, opened = json.loads(path.read_text()), list[str]()
    sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
    import paddle.distributed as dist

    from llmsuite.stages.run import run
    from tests.parity import token_stage
    from tests.parity.mutations import mutated

    registry = load_plugins(builtin, commands)
    registry.add(PluginInfo("tokens", "tests", "tokens", plugin=token_stage))
    groups: dict[Any, Any] = {}
    new_group = dist.new_group
    for case in cases:
        print(f"== {case['name']}", flush=True)
        directory = path.parent / case["name"]
        os.environ["LLMSUITE_CACHE"] = str(directory / "cache")  # what is computed before the first step counts too
        plan = plan_run(case["recipe"], [*case["words"], f"--output_dir={directory}"], registry, smoke=True)
        dist.new_group = _reused(new_group, groups)
        with contextlib.ExitStack() as during:
            during.enter_context(mutated(case["mutation"]))
            during.enter_context(_gradients_of_first_step(directory))
            during.enter_context(_samples_of_each_step(directory, rank))
            if case["trace"]:
                during.enter_context(_traffic_of_last_step(directory, rank))
            opened.clear()
            work = run if plan.stage.trains else plan.stage.factory()
            code = work(plan, registry, resume=case["resume"])
        if code != 0:  # interrupted
            return code
        if case["note_opened"]:
            (directory / f"opened-{rank}.json").write_text(json.dumps(opened))
        if rank == 0:
            (directory / "done").touch()
    return 0


@contextlib.contextmanager
def _gradients_of_first_step(directory: Path) -> Iterator[None]:
    """While active, the gradients that the optimizer gets in step 1 are written, brought together over all ranks."""
    import numpy as np
    import paddle

    from llmsuite.engine import collective
    from llmsuite.engine.optimizer import Optimizer

    update = Optimizer.step

    def written(self: Optimizer, step: int) -> None:
        if step == 1:
            mesh = collective.mesh()
            whole = {}
            finished = {shard.name: gradient for shard, gradient in self._finished}
            with paddle.no_grad():
                for shard in self.shards:
                    gradient = finished.get(shard.name)
                    part = paddle.zeros_like(shard.owned.detach()) if gradient is None else gradient
                    whole[shard.name] = shard.gather_part(part).numpy()
            if mesh.data_rank == 0 and mesh.coordinate["tp"] == 0:
                np.savez(directory / f"gradients-{mesh.coordinate['pp']}.npz", **whole)
        update(self, step)

    Optimizer.step = written  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.step = update  # type: ignore[method-assign]


@contextlib.contextmanager
def _samples_of_each_step(directory: Path, rank: int) -> Iterator[None]:
    """While active, each training step adds a line to `samples-RANK.jsonl`: the step, the data rank, and of each
    micro-batch the sha256 of what its samples hold, None where nothing is read."""
    from llmsuite.engine import collective, loop

    train_step = loop.train_step

    def noted_step(step: int, micro_batches: Any, objective: Any, *args: Any, **more: Any) -> Any:
        told = None
        if objective is not None and all(isinstance(batch, list) for batch in micro_batches):  # no thread reads them
            told = [[hashlib.sha256(repr(sample).encode()).hexdigest() for sample in b] for b in micro_batches]
        record = {"step": step, "data_rank": collective.mesh().data_rank, "micro_batches": told}
        with open(directory / f"samples-{rank}.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
        return train_step(step, micro_batches, objective, *args, **more)

    loop.train_step = noted_step
    try:
        yield
    finally:
        loop.train_step = train_step


@contextlib.contextmanager
def _traffic_of_last_step(directory: Path, rank: int) -> Iterator[None]:
    """While active, each training step leaves what this rank has sent in it, the shape of its batch, and the bytes of
    its tensors."""
    from llmsuite.engine import loop

    train_step, before = loop.train_step, _live_bytes()

    def traced_step(step: int, micro_batches: Any, objective: Any, *args: Any, **more: Any) -> Any:
        ranks = traffic.communicators()
        messages: traffic.Messages = collections.Counter()
        with traffic.traced(messages), _memory_of_a_step(before) as held:
            result = train_step(step, micro_batches, objective, *args, **more)
        sent: traffic.Traffic = collections.Counter()
        for (_, name, shape, _), count in messages.items():
            sent[name, shape] += count
        batches = [] if objective is None else [objective.collate(samples) for samples in micro_batches]
        record = {
            "micro_batches": [
                [*b["input_ids"].shape, len(b["targets" if "targets" in b else "positions"])] for b in batches
            ],
            "memory": held,
            "sent": [[name, list(shape), count] for (name, shape), count in sorted(sent.items())],
            "messages": [
                [ranks.get(communicator), name, list(shape), width, count]
                for (communicator, name, shape, width), count in sorted(messages.items())
            ],
        }
        (directory / f"traffic-{rank}.json").write_text(json.dumps(record))
        return result

    loop.train_step = traced_step
    try:
        yield
    finally:
        loop.train_step = train_step


def _live_bytes() -> int:
    """Of all tensors of this process, by Paddle's own count."""
    from paddle.base import core

    gc.collect()
    return int(core.host_memory_stat_current_value("Allocated", 0))


@contextlib.contextmanager
def _memory_of_a_step(before: int) -> Iterator[dict[str, int]]:
    """While active, notes the bytes of tensors beyond `before`: between steps, when gradients are there, and the most
    that is alive between two passes."""
    from llmsuite.engine.optimizer import Optimizer
    from llmsuite.engine.pipeline import PipelineStage

    held = {"between_steps": _live_bytes() - before, "gradients": 0, "between_passes": 0}
    forward, finish = PipelineStage.forward, Optimizer.finish_gradients

    def noted_forward(self: PipelineStage, *args: Any) -> Any:
        result = forward(self, *args)
        held["between_passes"] = max(held["between_passes"], _live_bytes() - before)
        return result

    def noted_finish(self: Optimizer, weight: float) -> float:
        held["gradients"] = _live_bytes() - before
        return finish(self, weight)

    PipelineStage.forward = noted_forward  # type: ignore[method-assign, assignment]
    Optimizer.finish_gradients = noted_finish  # type: ignore[method-assign]
    try:
        yield held
    finally:
        PipelineStage.forward = forward  # type: ignore[method-assign]
        Optimizer.finish_gradients = finish  # type: ignore[method-assign]


def _reused(new_group: Callable[[list[int]], Any], groups: dict[Any, Any]) -> Callable[[list[int]], Any]:
    """`new_group` for one case: the first time it asks for some ranks it gets the first such group, and so on."""
    asked: collections.Counter[tuple[int, ...]] = collections.Counter()

    def group_of(ranks: list[int]) -> Any:
        key = tuple(ranks)
        asked[key] += 1
        if (key, asked[key]) not in groups:
            groups[key, asked[key]] = new_group(ranks)
        return groups[key, asked[key]]

    return group_of
