"""A rank that runs one recipe after another in one process; `tests.parity.cases` starts it by `tests.tools.launched`.

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
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from llmsuite.base.cache import isolated_cache
from llmsuite.contract.registry import PluginInfo, load_plugins
from llmsuite.devices.cpu import CpuBackend
from llmsuite.recipe.resolve import plan_run
from tests import device, standin
from tests.parity import traffic
from tests.support.gloo_groups import reused


def before_paddle(file: str) -> None:
    """In the launcher, of whose process each rank is a fork."""
    if any(case["trace"] for case in json.loads(Path(file).read_text())):
        traffic.install()


def main(file: str) -> int:
    """Run the cases in a file; after each, rank 0 leaves a file `done` in its directory."""
    path = Path(file)
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    cases = json.loads(path.read_text())
    opened = list[str]()
    sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
    import paddle.distributed as dist

    from llmsuite.engine.trainer import run
    from tests.parity import token_stage
    from tests.parity.mutations import mutated

    registry = load_plugins()
    registry.add(PluginInfo("tokens", "tests", "tokens", plugin=token_stage))
    registry.add(PluginInfo("standin", "tests", "standin", plugin=standin))
    registry.add(PluginInfo("sim", "tests", "sim", plugin=device))
    groups: dict[Any, Any] = {}
    new_group = dist.new_group
    for case in cases:
        print(f"== {case['name']}", flush=True)
        directory = path.parent / case["name"]
        os.environ["LLMSUITE_CACHE"] = str(
            isolated_cache(directory / "cache")
        )  # what is computed before the first step counts too
        plan = plan_run(case["recipe"], [*case["words"], f"--output_dir={directory}"], registry, smoke=True)
        dist.new_group = reused(new_group, groups)
        with contextlib.ExitStack() as during:
            during.enter_context(mutated(case["mutation"]))
            during.enter_context(mock.patch.object(CpuBackend, "overlaps_communication", case["overlaps"]))
            during.enter_context(_gradients_of_first_step(directory))
            during.enter_context(_samples_of_each_step(directory, rank))
            if case["trace"]:
                during.enter_context(_traffic_of_last_step(directory, rank, plan.train.section.max_steps or 0))
            opened.clear()
            work = run if plan.train.stage.trains else plan.train.stage.factory()
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

    from llmsuite.parallel import collective
    from llmsuite.parallel.optimizer import Optimizer

    update = Optimizer.step

    def written(self: Optimizer, step: int) -> None:
        if step == 1:
            mesh = collective.mesh()
            whole = {}
            finished = {shard.name: gradient for shard, gradient in self.final_gradients()}
            with paddle.no_grad():
                for shard in self.shards:
                    gradient = finished.get(shard.name)
                    part = paddle.zeros_like(shard.main_param.detach()) if gradient is None else gradient
                    whole[shard.name] = shard.gather_shard(part).astype("float32").numpy()
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
    from llmsuite.engine import eager_engine
    from llmsuite.parallel import collective

    train_step = eager_engine.train_step

    def noted_step(engine: Any, step: int, batches: Any, *args: Any) -> Any:
        told = None
        if engine.passes.objective is not None and all(
            isinstance(samples, list) for samples in batches.samples
        ):  # no thread reads them
            told = [[hashlib.sha256(repr(sample).encode()).hexdigest() for sample in b] for b in batches.samples]
        record = {"step": step, "data_rank": collective.mesh().data_rank, "micro_batches": told}
        with open(directory / f"samples-{rank}.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
        return train_step(engine, step, batches, *args)

    eager_engine.train_step = noted_step
    try:
        yield
    finally:
        eager_engine.train_step = train_step


@contextlib.contextmanager
def _traffic_of_last_step(directory: Path, rank: int, last: int) -> Iterator[None]:
    """While active, step `last` leaves what this rank has sent in it, the shape of its batch, the order of its passes,
    and the bytes of its tensors."""
    from llmsuite.engine import eager_engine
    from llmsuite.models import rotation

    under_way = _UnderWay()
    train_step = eager_engine.train_step
    rotation._KEPT.clear()  # tables of the run before, which this one would not have to make
    before = under_way.live_bytes()

    def traced_step(engine: Any, step: int, batches: Any, *args: Any) -> Any:
        if step != last:
            return train_step(engine, step, batches, *args)
        collated = batches.all_batches()  # before the step, which lets go of them
        ranks = traffic.communicators()
        messages: traffic.Messages = collections.Counter()
        memory = _memory_of_a_step(before, under_way.live_bytes)
        with traffic.traced(messages), memory as held, _passes_of_a_step() as traced:
            result = train_step(engine, step, batches, *args)
        sent: traffic.Traffic = collections.Counter()
        for (_, name, shape, _), count in messages.items():
            sent[name, shape] += count
        record = {
            "micro_batches": [[*b["input_ids"].shape, _num_logits(b), "document_starts" in b] for b in collated],
            "memory": held,
            **traced,
            "sent": [[name, list(shape), count] for (name, shape), count in sorted(sent.items())],
            "messages": [
                [ranks.get(communicator), name, list(shape), width, count]
                for (communicator, name, shape, width), count in sorted(messages.items())
            ],
        }
        (directory / f"traffic-{rank}.json").write_text(json.dumps(record))
        return result

    eager_engine.train_step = traced_step
    try:
        with under_way.counted():
            yield
    finally:
        eager_engine.train_step = train_step


def _num_logits(batch: dict[str, Any]) -> int:
    """Positions of a batch that logits or scores are made of."""
    return len(batch["targets" if "targets" in batch else "positions"]) + len(batch.get("mtp_targets", ()))


class _UnderWay:
    """Bytes of the copies that wait for a neighbour in the pipeline to take them: how long they wait is chance."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0

    def live_bytes(self) -> int:
        """Bytes of all tensors of this process but for these copies, by Paddle's own count.

        Programs free what they have used in a thread of their own (Paddle 3.3.1), which a busy machine runs late: so
        the count is read until it has not fallen for some readings.
        """
        gc.collect()
        least = self._live_bytes()
        unchanged = 0
        while unchanged < 8:
            time.sleep(0.005)
            found = self._live_bytes()
            unchanged = unchanged + 1 if found >= least else 0
            least = min(least, found)
        return least

    def _live_bytes(self) -> int:
        from paddle.base import core

        with self._lock:
            return int(core.host_memory_stat_current_value("Allocated", 0)) - self._bytes

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Around a run, whose sending threads start in it."""
        from llmsuite.parallel import p2p
        from llmsuite.parallel.p2p import P2PChannels

        send = P2PChannels.send
        send_all = p2p._send_all

        def noted_send(edges: P2PChannels, value: Any, forward: bool) -> None:
            with self._lock:
                self._bytes += _allocated(value)
            send(edges, value, forward)

        def noted_send_all(jobs: queue.Queue[Callable[[], None]]) -> None:
            while True:
                job = jobs.get()
                (copy,) = (cell.cell_contents for cell in job.__closure__ or () if hasattr(cell.cell_contents, "place"))
                num_bytes = _allocated(copy)
                del copy
                job()
                with self._lock:
                    del job
                    self._bytes -= num_bytes

        P2PChannels.send = noted_send  # type: ignore[method-assign]
        p2p._send_all = noted_send_all
        try:
            yield
        finally:
            P2PChannels.send = send  # type: ignore[method-assign]
            p2p._send_all = send_all


def _allocated(tensor: Any) -> int:
    """Bytes of a tensor's memory, which is given out by 64 (phi/core/memory/allocation, `kDefaultHostAlignment`)."""
    return -(-int(tensor.size) * int(tensor.element_size()) // 64) * 64


@contextlib.contextmanager
def _memory_of_a_step(before: int, live_bytes: Callable[[], int]) -> Iterator[dict[str, int]]:
    """While active, notes the bytes of tensors beyond `before`: between steps, when gradients are there, and the most
    that is alive between two passes and, with what is under way to a neighbour, while they run."""
    from paddle.base import core

    from llmsuite.parallel.optimizer import Optimizer
    from llmsuite.parallel.pipeline import PipelineStage

    held = {"between_steps": live_bytes() - before, "gradients": 0, "between_passes": 0, "peak": 0}
    forward = PipelineStage.forward
    backward = PipelineStage.backward
    finish = Optimizer.finish_gradients

    def noted_forward(self: PipelineStage, *args: Any) -> Any:
        result = forward(self, *args)
        held["between_passes"] = max(held["between_passes"], live_bytes() - before)
        return result

    def noted_backward(self: PipelineStage, *args: Any) -> None:
        backward(self, *args)
        held["between_passes"] = max(held["between_passes"], live_bytes() - before)

    def noted_finish(self: Optimizer, weight: float) -> float:
        held["gradients"] = live_bytes() - before
        held["peak"] = int(core.host_memory_stat_peak_value("Allocated", 0)) - before
        return finish(self, weight)

    PipelineStage.forward = noted_forward  # type: ignore[method-assign, assignment]
    PipelineStage.backward = noted_backward  # type: ignore[method-assign]
    Optimizer.finish_gradients = noted_finish  # type: ignore[method-assign]
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    try:
        yield held
    finally:
        PipelineStage.forward = forward  # type: ignore[method-assign]
        PipelineStage.backward = backward  # type: ignore[method-assign]
        Optimizer.finish_gradients = finish  # type: ignore[method-assign]


@contextlib.contextmanager
def _passes_of_a_step() -> Iterator[dict[str, list[Any]]]:
    """While active, notes the passes of this rank in order: as "actions" (is forward, micro-batch, chunk) of those
    that are learnt from, as "rows" those that came to experts in each of the forward ones, layer by layer; as "looks"
    sequences, length, what logits are made of, and whether there are documents, of those before."""
    import paddle

    from llmsuite.models.experts import Experts
    from llmsuite.parallel.pipeline import PipelineStage

    found: dict[str, list[Any]] = {"actions": [], "looks": [], "rows": []}
    rows = Experts.rows
    inside = []
    forward = PipelineStage.forward
    backward = PipelineStage.backward
    hidden_states = PipelineStage.hidden_states
    token_nll = PipelineStage.token_nll

    def noted_forward(self: PipelineStage, action: Any, *args: Any) -> Any:
        if paddle.is_grad_enabled():
            found["actions"].append([True, action.micro_batch, action.chunk])
        inside.clear()
        result = forward(self, action, *args)
        if paddle.is_grad_enabled():
            found["rows"].append([*inside])
        return result

    def noted_backward(self: PipelineStage, action: Any, *args: Any) -> None:
        found["actions"].append([False, action.micro_batch, action.chunk])
        backward(self, action, *args)

    def noted_hidden(self: PipelineStage, input_ids: Any, *args: Any, **more: Any) -> Any:
        if not paddle.is_grad_enabled():
            found["looks"].append([*input_ids.shape, 0, "document_starts" in more])
        return hidden_states(self, input_ids, *args, **more)

    def noted_nll(self: PipelineStage, hidden: Any, targets: Any) -> Any:
        if not paddle.is_grad_enabled():
            found["looks"][-1][2] += targets.shape[0]
        return token_nll(self, hidden, targets)

    def noted_rows(self: Experts, x: Any, *args: Any) -> Any:
        inside.append(x.shape[0])
        return rows(self, x, *args)

    Experts.rows = noted_rows  # type: ignore[method-assign]
    PipelineStage.forward = noted_forward  # type: ignore[method-assign, assignment]
    PipelineStage.backward = noted_backward
    PipelineStage.hidden_states = noted_hidden  # type: ignore[method-assign]
    PipelineStage.token_nll = noted_nll
    try:
        yield found
    finally:
        Experts.rows = rows  # type: ignore[method-assign]
        PipelineStage.forward = forward  # type: ignore[method-assign]
        PipelineStage.backward = backward
        PipelineStage.hidden_states = hidden_states  # type: ignore[method-assign]
        PipelineStage.token_nll = token_nll
