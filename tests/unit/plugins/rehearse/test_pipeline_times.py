"""Pipelines played by times that can be added in one's head."""

from __future__ import annotations

import pytest

from llmsuite.base import spans
from llmsuite.parallel.schedule import Action, Kind
from llmsuite.parallel.timeline import orders
from llmsuite.plugins.rehearse.pipeline_times import PassMarks, StageTimes, play_stages, stage_times, with_stand_ins

Orders = tuple[tuple[Action, ...], ...]


def stage_of(actions: tuple[Action, ...], forward: float, backward: float, prepasses: float = 0.0) -> StageTimes:
    """A stage whose passes all take as long, with half a second for the update."""
    return StageTimes([forward if action.forward else backward for action in actions], prepasses, 0.5)


def alike(passes: Orders, forward: float, backward: float) -> list[StageTimes]:
    return [stage_of(actions, forward, backward) for actions in passes]


@pytest.mark.parametrize(
    ("kind", "num_stages", "num_micro_batches", "num_chunks", "seconds"),
    [
        # no pipeline: 4 times 1 + 2
        ("1F1B", 1, 4, 1, 12.0),
        # the bubble of 1F1B is a forward and a backward pass for each other stage: (4 + 1) * 3, (8 + 3) * 3
        ("1F1B", 2, 4, 1, 15.0),
        ("1F1B", 4, 8, 1, 33.0),
        ("FThenB", 4, 8, 1, 33.0),
        # chunks of half the layers: the bubble is half as long, 12 + 3 / 2 and 24 + 9 / 2
        ("interleaved", 2, 4, 2, 13.5),
        ("interleaved", 4, 8, 2, 28.5),
    ],
)
def test_a_schedule_has_its_bubble(
    kind: Kind, num_stages: int, num_micro_batches: int, num_chunks: int, seconds: float
) -> None:
    passes = orders(kind, num_stages, num_micro_batches, num_chunks)
    found = play_stages(alike(passes, 1.0 / num_chunks, 2.0 / num_chunks), passes)
    assert found.seconds == seconds + 0.5
    assert found.bubble == pytest.approx(1 - 3 * num_micro_batches / seconds)


def test_stages_wait_for_the_slowest_one() -> None:
    """The last stage is busy all the time but for the first forward and the last backward pass of the other one."""
    passes = orders("1F1B", 2, 4, 1)
    found = play_stages([stage_of(passes[0], 1.0, 2.0), stage_of(passes[1], 2.0, 4.0)], passes)
    assert found.seconds == 1 + 4 * 6 + 2 + 0.5
    assert found.bubble == pytest.approx(1 - (12 + 24) / 2 / 27)


def test_one_slow_pass_delays_what_needs_it() -> None:
    passes = orders("1F1B", 2, 2, 1)
    first, last = alike(passes, 1.0, 2.0)
    assert play_stages([first, last], passes).seconds == 9.5
    slow = StageTimes([11.0, *last.passes[1:]], 0.0, 0.5)  # its first forward pass
    assert play_stages([first, slow], passes).seconds == 19.5


def test_prepasses_go_through_the_pipeline_first() -> None:
    passes = orders("1F1B", 2, 4, 1)
    first, last = stage_of(passes[0], 1.0, 2.0, prepasses=4.0), stage_of(passes[1], 1.0, 2.0, prepasses=8.0)
    # 4 micro-batches of 2 seconds on the last stage, after the first of 1 second
    assert play_stages([first, last], passes).seconds == 9 + 15 + 0.5


def test_stages_that_are_not_rehearsed_are_as_fast_as_their_neighbour() -> None:
    passes = orders("1F1B", 4, 4, 1)
    rehearsed = {0: stage_of(passes[0], 1.0, 2.0, 4.0), 3: stage_of(passes[3], 3.0, 6.0)}
    found = with_stand_ins(rehearsed, passes, [1.0, 2.0, 1.0, 3.0])
    assert found[1] == stage_of(passes[1], 2.0, 4.0, 8.0)
    assert found[2] == stage_of(passes[2], 1.0, 2.0, 4.0)
    assert (found[0], found[3]) == (rehearsed[0], rehearsed[3])
    # the only one that there is
    assert with_stand_ins({3: rehearsed[3]}, passes, [1.0] * 4)[0] == stage_of(passes[0], 3.0, 6.0)


def test_chunks_stand_in_for_chunks() -> None:
    passes = orders("interleaved", 2, 2, 2)
    times = StageTimes([(1.0 if action.forward else 2.0) + action.chunk for action in passes[0]], 0.0, 0.0)
    found = with_stand_ins({0: times}, passes, [1.0, 1.0, 1.0, 3.0])
    expected = [(1.0 if a.forward else 2.0) + a.chunk for a in passes[1]]
    assert found[1].passes == [x * (3.0 if a.chunk else 1.0) for x, a in zip(expected, passes[1], strict=True)]


def test_passes_last_until_the_next_ones() -> None:
    names = ["prepass reference", "forward", "backward", "forward", "backward"]
    found = stage_times(names, [1.0, 3.0, 4.0, 5.0, 5.0, 7.0, 7.5, 8.0, 8.0, 10.0], 12.0)
    assert found == StageTimes([1.0, 2.5, 0.5, 2.0], 2.0, 4.0)
    assert found.seconds == 12.0


def test_spans_of_passes_are_marked() -> None:
    count = [0]
    marks = PassMarks(lambda: count[0])
    spans.record(marks)
    try:
        for name in ("collate", "prepass reference", "forward", "backward", "optimizer"):
            with spans.span(name):
                count[0] += 2
            count[0] += 1
    finally:
        spans.record(None)
    assert marks.names == ["prepass reference", "forward", "backward"]
    assert marks.records == [3, 5, 6, 8, 9, 11]
