"""Holds a traced run against its plan: what every rank has sent, what lived in its memory, in which order it worked."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmsuite.parallel.mesh import GROUP_AXES, RUN, TENSOR, Mesh
from llmsuite.parallel.schedule import Action
from llmsuite.parallel.timeline import orders, simulate
from llmsuite.planning.activations import MicroBatch
from llmsuite.planning.communication import PIPELINE, Message, Traffic, model_prepasses
from llmsuite.planning.estimate import shape_spec_of
from llmsuite.planning.layout import Layout
from llmsuite.planning.memory import memory, needs_token_metadata
from llmsuite.recipe.resolve import RunPlan
from tests.support.planned_runs import estimated

Sent = collections.Counter[tuple[Any, ...]]
"""How often each (ranks of the group, operation, shape, bytes of an element). Of rows on their way to experts, whose
number depends on their values, how often only."""


@dataclasses.dataclass
class Truth:
    """How far a run is from its plan."""

    calls: int = 0
    """That all ranks have made in the step."""
    num_bytes: int = 0
    """That they gave to them; without rows for experts."""
    memory: dict[str, float] = dataclasses.field(default_factory=dict)
    """The largest relative error, of any rank: "between_steps", with all "gradients", "between_passes", and "peak"."""
    bubble: float = 0.0
    """Length of the passes as they were run, in units of their planned cost."""
    problems: list[str] = dataclasses.field(default_factory=list)
    """What was sent or done otherwise."""

    @property
    def live_memory(self) -> float:
        """The largest error of what lives between passes; what a pass takes while it runs is an estimate."""
        return max((self.memory[what] for what in _LIVE), key=abs)


_LIVE = "between_steps", "gradients", "between_passes"


def truth_of(directory: Path, plan: RunPlan) -> Truth:
    """Comparison with its plan of the run in a directory, whose last step `tests.parity.worker` traced."""
    num_ranks = plan.parallel.degrees.num_ranks
    records = [json.loads((directory / f"traffic-{rank}.json").read_text()) for rank in range(num_ranks)]
    meshes = [Mesh(plan.parallel.degrees, rank) for rank in range(num_ranks)]
    # what nobody reads in the middle of a pipeline is what others of the same data rank read
    by_data = {mesh.data_rank: record for mesh, record in zip(meshes, records) if record["micro_batches"]}
    layout = Layout(plan.model, plan.parallel)
    shape_spec = shape_spec_of(plan.model)
    found = Truth(memory=dict.fromkeys((*_LIVE, "peak"), 0.0))
    for mesh, record in zip(meshes, records):
        read = by_data[mesh.data_rank]
        batches = [_pass(plan, sizes) for sizes in read["micro_batches"]]
        sent = _sent(mesh, record)
        found.calls += sum(sent.values())
        traffic = Traffic(layout, plan.train, shape_spec, mesh, batches, _looks(plan, read["looks"]), False).counts
        expected: Sent = collections.Counter()
        for message, count in traffic.items():
            expected[_key(mesh, message)] += count
            found.num_bytes += count * message.total_bytes if message.is_exact else 0
        for key in sorted({*sent, *expected}, key=repr):
            if sent[key] != expected[key]:
                found.problems.append(f"rank {mesh.rank} has sent {sent[key]}, not {expected[key]}, times {key[1:]}")
        (planned,) = memory(
            layout, plan.train, plan.data.section.max_length, shape_spec, _dealt(batches, record), [mesh]
        )
        lives = {
            "between_steps": planned.between_steps,
            "gradients": planned.between_steps + planned.gradients,
            "between_passes": planned.between_steps + planned.held,
            "peak": planned.between_steps + planned.held + planned.buffers,
        }
        for what, value in lives.items():
            error = value / record["memory"][what] - 1
            found.memory[what] = max(found.memory[what], error, key=abs)
    _check_schedule(found, plan, meshes, records)
    return found


LIMIT = 0.05
"""Largest relative error of live memory."""


def check_truth(directory: Path, plan: RunPlan) -> Truth:
    """Assert that a run was as planned: all that was sent, the order of passes and their bubble; live memory nearly."""
    found = truth_of(directory, plan)
    assert found.problems == [], "\n".join(found.problems[:20])
    assert abs(found.live_memory) <= LIMIT, found.memory
    return found


def _check_schedule(found: Truth, plan: RunPlan, meshes: Sequence[Mesh], records: Sequence[dict[str, Any]]) -> None:
    """The passes that ran, in their order, are those that the plan has played; so is how long they wait."""
    planned = estimated(plan)
    count = sum(forward for forward, *_ in records[0]["actions"]) // plan.parallel.num_chunks
    pp = plan.parallel.degrees.pp
    wanted = orders(plan.parallel.schedule, pp, count, plan.parallel.num_chunks if pp > 1 else 1)
    lines: dict[tuple[int, int], list[list[Action]]] = collections.defaultdict(list)
    for mesh, record in zip(meshes, records):
        lines[mesh.data_rank, mesh.coordinate["tp"]].append([Action(*action) for action in record["actions"]])
    costs = [cost.forward for cost in planned.costs], [cost.backward for cost in planned.costs]
    for line in lines.values():
        if line != [list(actions) for actions in wanted]:
            found.problems.append("passes have run in another order")
            return
        found.bubble = simulate(line, *costs).bubble
        if count == planned.num_micro_batches and abs(found.bubble - planned.bubble) > 1e-9:
            found.problems.append(f"ranks wait {found.bubble:.3%} of the passes, not {planned.bubble:.3%}")


def _pass(plan: RunPlan, sizes: Sequence[int]) -> MicroBatch:
    rows, length, supervised, documents = sizes
    return MicroBatch(rows, length, supervised, bool(documents), needs_token_metadata(plan.model))


def _dealt(batches: Sequence[MicroBatch], record: dict[str, Any]) -> list[MicroBatch]:
    """Micro-batches with the rows that came to the experts of a rank, a layer: no plan can know how they are dealt."""
    rows: dict[int, list[int]] = collections.defaultdict(list)
    passes = [micro_batch for forward, micro_batch, _ in record["actions"] if forward]
    for micro_batch, inside in zip(passes, record["rows"], strict=True):
        rows[micro_batch] += inside
    return [
        dataclasses.replace(batch, expert_rows=sum(rows[i]) / len(rows[i]) if rows[i] else None)
        for i, batch in enumerate(batches)
    ]


def _looks(plan: RunPlan, passes: Sequence[Sequence[int]]) -> list[list[MicroBatch]]:
    """The passes of each look, of which the first one comes first."""
    count = len(model_prepasses(plan.train.profile))
    if not count:
        assert not passes, "the plan knows of no look at the global batch"
        return []
    each = len(passes) // count
    found = [MicroBatch(rows, length, supervised, bool(documents)) for rows, length, supervised, documents in passes]
    return [found[i * each : (i + 1) * each] for i in range(count)]


def _sent(mesh: Mesh, record: dict[str, Any]) -> Sent:
    found: Sent = collections.Counter()
    for ranks, operation, shape, width, count in record["messages"]:
        if ranks is not None and operation == "send":
            found[tuple(ranks), operation] += count
        else:
            # what Paddle has made for itself is along tp, and the pairs of a pipeline are not known by name
            other = None if operation == "send" else _row(mesh, TENSOR)
            found[other if ranks is None else tuple(ranks), operation, tuple(shape), width] += count
    return found


def _key(mesh: Mesh, message: Message) -> tuple[Any, ...]:
    group = _group(mesh, message)
    return (
        (group, message.operation, message.shape, message.num_bytes) if message.is_exact else (group, message.operation)
    )


def _group(mesh: Mesh, message: Message) -> tuple[int, ...] | None:
    """Ranks of a message's group; None for what goes to a neighbour."""
    if message.axis == PIPELINE:
        return None
    if message.axis == RUN:
        return tuple(range(mesh.degrees.num_ranks))
    if message.axis == "loaders":
        return tuple(int(rank) for rank in mesh.grid[[0, -1]].flat)
    if message.axis == "tied":
        (line,) = (line for line in mesh.pipelines() if mesh.rank in line)
        return line[0], line[-1]
    return _row(mesh.expert_mesh if message.is_expert else mesh, message.axis)


def _row(mesh: Mesh, axis: str) -> tuple[int, ...]:
    (row,) = (row for row in mesh.rows(*GROUP_AXES[axis]) if mesh.rank in row)
    return tuple(int(rank) for rank in row)
