"""The messages between stages of Paddle's interleaved schedule, which are matched by their order alone."""

from __future__ import annotations

import re
from collections import defaultdict, deque

import pytest
from paddle.distributed.passes.pipeline_scheduler_pass.pipeline_vpp import PipelineVirtualPipelinePass

Job = tuple[str, int, int]
"""Name of the job, the part and the micro-batch."""
Message = tuple[str, int, int]
"""Activations or gradient, the part that it is for, and the micro-batch."""


def _jobs(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Job]:
    schedule = PipelineVirtualPipelinePass()
    for name, value in (
        *(("num_micro_batches", micro_batches), ("pp_stage", stage)),
        *(("pp_degree", stages), ("vpp_degree", chunks)),
    ):
        schedule.set_attr(name, value)
    found = []
    for job in schedule._pir_create_job_list()[:-1]:  # the last one is the update
        match = re.fullmatch(r"([a-z_]+)(\d+)", job.type())
        assert match is not None
        found.append((match[1], int(match[2]) * stages + stage, job.micro_batch_id()))
    return found


def _ends(stages: int, chunks: int, micro_batches: int) -> str:
    """The end of a step: "well", with ranks in a deadlock, or with a message that is taken for another."""
    last = stages * chunks - 1
    left = [deque(_jobs(stage, stages, chunks, micro_batches)) for stage in range(stages)]
    sent: defaultdict[tuple[int, int], deque[Message]] = defaultdict(deque)
    moves = True
    while moves:
        moves = False
        for jobs in left:
            while jobs:
                what, part, number = jobs[0]
                source = {"recv_forward": part - 1, "backward": part + 1}.get(what, -1)
                if 0 <= source <= last:
                    channel = sent[source % stages, part % stages]
                    if not channel:
                        break
                    if channel.popleft() != (what, part, number):
                        return "mistaken"
                if what == "forward" and part < last:
                    sent[part % stages, (part + 1) % stages].append(("recv_forward", part + 1, number))
                if what == "send_backward" and part > 0:
                    sent[part % stages, (part - 1) % stages].append(("backward", part - 1, number))
                jobs.popleft()
                moves = True
    return "waits" if any(left) else "well"


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (2, 3), (3, 2), (4, 2), (4, 3), (8, 2)])
def test_a_multiple_of_the_stages_ends_well(stages: int, chunks: int) -> None:
    assert [_ends(stages, chunks, count * stages) for count in (1, 2, 3, 5)] == ["well"] * 4


@pytest.mark.parametrize(("stages", "count", "end"), [(2, 3, "mistaken"), (2, 5, "mistaken"), (4, 6, "waits")])
def test_other_numbers_may_not(stages: int, count: int, end: str) -> None:
    """So a rule refuses them: see `recipe.rules.programs`."""
    assert _ends(stages, 2, count) == end
