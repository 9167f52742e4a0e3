"""Pipeline schedules are plain data: they end, do everything once, and hold no more than they promise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paddle.distributed.auto_parallel.pipelining import schedules as paddles

from llmsuite.parallel import edges, schedule
from llmsuite.parallel.schedule import Action, Kind, order
from tests.support.schedules import peak_live, play, play_connecting, play_reading

Shape = tuple[Kind, int, int, int]
SHAPES = st.one_of(
    st.tuples(st.sampled_from(["FThenB", "1F1B"]), st.integers(1, 9), st.integers(1, 20), st.just(1)),
    st.tuples(st.just("interleaved"), st.integers(1, 9), st.integers(1, 20), st.integers(1, 5)),
)  # kind, stages, micro-batches, chunks a rank


def all_orders(shape: Shape) -> list[list[Action]]:
    kind, stages, micro, chunks = shape
    return [order(kind, stage, stages, micro, chunks) for stage in range(stages)]


@given(SHAPES)
def test_every_pass_happens_once_and_forward_first(shape: Shape) -> None:
    _, _, micro, chunks = shape
    passes = list(itertools.product(range(chunks), range(micro)))
    for actions in all_orders(shape):
        for forward in (True, False):
            assert sorted((a.chunk, a.micro_batch) for a in actions if a.forward == forward) == passes
        for chunk, i in passes:
            assert actions.index(Action(True, i, chunk)) < actions.index(Action(False, i, chunk))


@given(SHAPES)
def test_no_schedule_waits_for_ever_or_takes_one_message_for_another(shape: Shape) -> None:
    kind, stages, micro, chunks = shape
    peaks = peak_live(kind, stages, micro, chunks)
    if kind == "FThenB":
        assert peaks == [micro] * stages
    elif chunks == 1:
        assert peaks == [min(stages - stage, micro) for stage in range(stages)]
    else:
        first_round = -(-micro // max(1, micro // stages))  # as many as there are stages, or up to twice as many less 1
        warmup = [(chunks - 1) * first_round + 2 * (stages - 1 - stage) for stage in range(stages)]
        assert peaks == [min(w + 1, micro * chunks) for w in warmup]


@given(SHAPES)
def test_the_forward_passes_alone_end_too(shape: Shape) -> None:
    """An evaluation runs only these."""
    play([[action for action in actions if action.forward] for actions in all_orders(shape)], shape[3])


@given(SHAPES)
def test_a_message_is_sent_before_its_receiver_can_go_on(shape: Shape) -> None:
    """`play` against another rendering of the rules: a pass needs the pass of the part before, and no more."""
    _, stages, _, chunks = shape
    queues = [list(actions) for actions in all_orders(shape)]
    done: set[tuple[bool, int, int]] = set()
    while any(queues):
        before = len(done)
        for stage, queue in enumerate(queues):
            if queue:
                action = queue[0]
                part = action.chunk * stages + stage
                needs = {(True, part, action.micro_batch)} if not action.forward else set()
                if action.forward and part > 0:
                    needs.add((True, part - 1, action.micro_batch))
                if not action.forward and part < stages * chunks - 1:
                    needs.add((False, part + 1, action.micro_batch))
                if needs <= done:
                    done.add((action.forward, part, action.micro_batch))
                    queue.pop(0)
        assert len(done) > before


@given(SHAPES.filter(lambda shape: shape[1] > 1))
def test_no_schedule_hangs_where_the_first_use_of_a_channel_waits_for_both_ends(shape: Shape) -> None:
    """`P2PChannels` uses each channel once before the first pass, in the order of the list."""
    play_connecting(all_orders(shape), shape[3], edges.channels(range(shape[1]), ring=shape[3] > 1))


@pytest.mark.parametrize("micro", [5, 7, 9, 11, 13, 15])
def test_why_channels_are_used_before_the_first_pass(micro: int) -> None:
    """One rank stands in its first send of a gradient, the other one waits for activations."""
    with pytest.raises(AssertionError, match="2 ranks wait for each other for ever"):
        play_connecting(all_orders(("interleaved", 2, micro, 2)), 2)


def words(actions: Sequence[Action]) -> str:
    return " ".join(f"{'F' if a.forward else 'B'}{a.micro_batch}{'abcd'[a.chunk]}" for a in actions)


def test_1f1b_of_the_second_of_three_stages_by_hand() -> None:
    assert words(order("1F1B", 1, 3, 4)) == "F0a F1a B0a F2a B1a F3a B2a B3a"


def test_interleaved_of_two_stages_by_hand() -> None:
    first, second = (words(order("interleaved", stage, 2, 4, 2)) for stage in (0, 1))
    assert first == "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a"
    assert second == "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"


def test_a_schedule_that_cannot_end_is_noticed() -> None:
    first, second = (order("1F1B", stage, 2, 2) for stage in range(2))
    first.sort(key=lambda action: action.micro_batch)  # the gradient of 0 before the activations of 1 ...
    second.sort(key=lambda action: not action.forward)  # ... and both activations before any gradient
    with pytest.raises(AssertionError, match="wait for each other for ever"):
        play([first, second])


def test_a_backward_pass_before_its_forward_pass_is_noticed() -> None:
    with pytest.raises(AssertionError, match="before it went forward"):
        play([order("1F1B", 0, 1, 2)[::-1]])


def test_messages_that_are_mixed_up_are_noticed() -> None:
    orders = [order("FThenB", stage, 2, 2) for stage in range(2)]
    orders[1][:2] = orders[1][1::-1]
    with pytest.raises(AssertionError, match=r"rank 1 waits for \(part, micro-batch\) \(1, 1\) and gets \(1, 0\)"):
        play(orders)


def test_a_short_last_round_would_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is why rounds are as equal as can be."""
    play([order("interleaved", stage, 4, 5, 3) for stage in range(4)], 3)
    monkeypatch.setattr(schedule, "_rounds", lambda stages, micro: [range(4), range(4, 5)])
    with pytest.raises(AssertionError, match="wait for each other for ever"):
        play([order("interleaved", stage, 4, 5, 3) for stage in range(4)], 3)


# Paddle's own schedules


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("micro", range(1, 17))
def test_interleaved_is_paddles_order(stages: int, chunks: int, micro: int) -> None:
    """Wherever Paddle has one: it wants rounds of one size."""
    rounds = max(1, micro // stages)
    if micro % rounds:
        assert len({len(r) for r in schedule._rounds(stages, micro)}) == 2
        return
    theirs = paddles.ScheduleVPP.__new__(paddles.ScheduleVPP)
    theirs.pp_group_size = stages
    theirs.n_local_stages = chunks
    theirs._n_microbatches = micro
    theirs.microbatches_per_round = micro // rounds
    for stage in range(stages):
        found = [a for a in theirs._calculate_single_rank_operations(stage) if a is not None]
        expected = [
            (str(a.computation_type) == "F", a.microbatch_index, (a.stage_index - stage) // stages) for a in found
        ]
        ours = order("interleaved", stage, stages, micro, chunks)
        assert [(a.forward, a.micro_batch, a.chunk) for a in ours] == expected


class Recorder:
    """In place of a stage of Paddle's: notes what its schedule asks for."""

    def __init__(self, stage: int):
        self.stage_index = stage
        self.asked = list[Action]()

    def forward_one_chunk(self, micro_batch: int, *inputs: object) -> None:
        self.asked.append(Action(True, micro_batch))

    def backward_one_chunk(self, micro_batch: int, **how: object) -> None:
        self.asked.append(Action(False, micro_batch))

    def __getattr__(self, name: str) -> Callable[..., list[object]]:
        return lambda *given, **named: []  # nothing is sent, received or added up


@pytest.mark.parametrize("kind", ["FThenB", "1F1B"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2, 3, 4, 7, 16])
def test_the_others_are_paddles_order_too(kind: Kind, stages: int, micro: int) -> None:
    for stage in range(stages):
        cls = {"FThenB": paddles.ScheduleFThenB, "1F1B": paddles.Schedule1F1B}[kind]
        theirs = cls.__new__(cls)
        recorder = Recorder(stage)
        theirs._stage = recorder
        theirs._num_stages = stages
        theirs._n_microbatches = micro
        theirs._stage_initialized = theirs._has_backward = True
        theirs._check_inputs = lambda *given, micro=micro: ([()] * micro, [{}] * micro)
        theirs._maybe_compute_loss = theirs._maybe_get_loss = theirs._update_losses = lambda *given: None
        theirs._step_microbatches()
        assert order(kind, stage, stages, micro) == recorder.asked


def _stuck(waits_for_sends: bool) -> dict[Kind, int]:
    """How many schedules do not end, of 64 each of `1F1B` and `FThenB` and 192 that are interleaved."""
    found: dict[Kind, int] = {}
    chunks: dict[Kind, Sequence[int]] = {"1F1B": (1,), "FThenB": (1,), "interleaved": (2, 3, 4)}
    for kind, numbers in chunks.items():
        found[kind] = 0
        for stages, num_chunks, micro in itertools.product((2, 3, 4, 8), numbers, range(1, 17)):
            orders = [order(kind, stage, stages, micro, num_chunks) for stage in range(stages)]
            try:
                play_reading(orders, num_chunks, waits_for_sends)
            except AssertionError:
                found[kind] += 1
    return found


def test_schedules_end_if_host_copies_wait_for_their_own_stream() -> None:
    """As `devices.tensors` makes them."""
    assert _stuck(waits_for_sends=False) == {"1F1B": 0, "FThenB": 0, "interleaved": 0}


def test_interleaved_schedules_do_not_end_if_host_copies_wait_for_sends() -> None:
    """So a device that makes such copies has to refuse them: `DeviceBackend.supports_interleaving`."""
    assert _stuck(waits_for_sends=True) == {"1F1B": 0, "FThenB": 0, "interleaved": 171}
