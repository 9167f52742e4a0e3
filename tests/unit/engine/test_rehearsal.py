"""A rank without the others; whole rehearsals are in tests/multi/test_rehearse.py."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.ops import Ops
from llmsuite.engine.rehearsal import GivenRouting, RehearsedRanks, Sent, give_routing
from llmsuite.engine.rules import StepRules
from llmsuite.models.experts import Experts
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.schedule import order
from tests.support.families import tiny

STOP = [0] * 5


def rank_of_stage(stage: int, sent: Sent, num_chunks: int = 1, pp: int = 4) -> RehearsedRanks:
    return RehearsedRanks(Mesh(Degrees(pp, 1, 1, 1), stage), num_chunks, sent)


def header_of(micro_batch: int) -> list[int]:
    return [1, 10 + micro_batch, 2, 0, 1]


def test_headers_of_the_first_rank_are_those_of_the_next_ones() -> None:
    first = rank_of_stage(0, Sent())
    for header in (header_of(0), STOP, header_of(1), header_of(2)):
        first.header_sent(header, 0)
    again = Sent.from_json(dataclasses.asdict(first.sent))
    middle = rank_of_stage(1, again)
    assert [middle.header(STOP) for _ in range(4)] == [header_of(0), STOP, header_of(1), header_of(2)]
    # nobody stops the last one
    last = rank_of_stage(3, again)
    assert [last.header(STOP) for _ in range(3)] == [header_of(0), header_of(1), header_of(2)]


def test_every_rank_of_an_interleaved_pipeline_gets_the_header_of_its_micro_batch() -> None:
    sent = Sent()
    for stage in range(4):
        own = rank_of_stage(stage, sent, num_chunks=2)
        if stage == 0:
            own.header_sent(STOP, 0)  # does not come back
        elif stage < 3:
            assert own.header(STOP) == STOP
        for action in order("interleaved", stage, 4, 6, 2):
            if not action.forward:
                continue
            if stage or action.chunk:
                assert own.header(STOP) == header_of(action.micro_batch), (stage, action)
            if stage < 3 or action.chunk == 0:
                own.header_sent(header_of(action.micro_batch), action.chunk)
        sent = own.sent if stage == 0 else sent


def test_a_rank_without_data_is_told_what_the_first_one_knows() -> None:
    first = rank_of_stage(0, Sent())
    assert first.numbers_of_rank0([7.0, 2.0], [0.0, 0.0]) == [7.0, 2.0]
    assert rank_of_stage(3, first.sent).numbers_of_rank0([7.0, 2.0], [0.0, 0.0]) == [7.0, 2.0]
    assert rank_of_stage(1, first.sent).numbers_of_rank0([0.0, 0.0], [0.0, 0.0]) == [7.0, 2.0]


def test_numbers_of_the_others_are_asked_for() -> None:
    class Told(RehearsedRanks):
        def numbers_of_rank0(self, own: Any, arrived: Any) -> list[float]:
            return [5.0]

    with collective.without_others(Told(Mesh(Degrees(1, 1, 1, 1), 0), 1, Sent())):
        assert collective.broadcast_from_rank0([1.0]) == [5.0]
        assert collective.sum_array_over_loader_ranks(np.array([3.0])).tolist() == [3.0]
    assert collective.broadcast_from_rank0([1.0]) == [1.0]


def counts(rows: int) -> Any:
    return paddle.zeros([rows], "int64")


def test_each_expert_gets_as_many_rows() -> None:
    routing = GivenRouting("balanced", 4, 2)
    assert routing.here(counts(4), 16) == [4, 4, 4, 4]
    assert routing.here(counts(4), 18) == [5, 5, 4, 4]
    # of another rank's experts nothing stays here: their slot is after the last
    assert routing.here(counts(2), 16, [2, 2, 0, 1]) == [4, 4]
    table = paddle.zeros([6], "int64")
    assert routing.of_ranks(table, [4, 5]).tolist() == [4, 5, 4, 5, 4, 5]


def test_the_same_experts_get_all_rows() -> None:
    routing = GivenRouting("worst", 4, 2)
    assert routing.here(counts(4), 16) == [8, 8, 0, 0]
    assert sum(routing.here(counts(4), 16)) == 16


def test_a_model_is_given_its_routing() -> None:
    model = tiny("qwen_moe")
    give_routing([model], "balanced")
    experts = [module for module in model.sublayers() if isinstance(module, Experts)]
    assert len({id(module.row_counts) for module in experts}) == len(experts) > 0
    config = model.config
    rows = 8 * config.num_experts
    assert experts[0].row_counts.here(counts(config.num_experts), rows) == [8] * config.num_experts


def test_experts_outside_of_a_mixture_are_refused() -> None:
    chunk = paddle.nn.Sequential(Experts(4, 8, 8, Ops()))
    with pytest.raises(UserError, match=r"rehearse: 0 gets its tokens in code of its own"):
        give_routing([chunk], "balanced")


def test_a_step_without_values_is_accepted() -> None:
    metrics = {"loss": math.nan, "grad_norm": math.inf}
    assert StepRules(has_values=False).decide(1, 0.0, metrics) == "accept"
    assert "skipped" not in metrics
