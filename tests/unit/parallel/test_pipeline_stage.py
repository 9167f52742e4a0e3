"""A rank of a pipeline without its neighbours: what it refuses, and what ends it."""

from __future__ import annotations

import os
import queue
from typing import Any

import paddle
import paddle.distributed as dist
import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.parallel import collective, p2p
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.others import OtherRanks
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.parallel.schedule import Action


class Neighbours(p2p.P2PChannels):
    """Channels to nobody: they give what was laid ready, and keep what is sent."""

    def __init__(self, *messages: Any):
        self.messages = [paddle.to_tensor(m) for m in messages]
        self.asked = list[list[int]]()
        self.sent = list[Any]()

    def receive(self, shape: list[int], dtype: Any, forward: bool) -> Any:
        self.asked.append(shape)
        return self.messages.pop(0)

    def send(self, value: Any, forward: bool) -> None:
        self.sent.append(value.tolist())


class Doubling(paddle.nn.Layer):
    """A model whose layers double their inputs; with document starts, they add those."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = self.create_parameter([1], default_initializer=paddle.nn.initializer.Constant(2.0))

    def decode(self, x: Any, document_starts: Any = None) -> tuple[Any, list[Any]]:
        y = x * self.factor
        return y if document_starts is None else y + document_starts.astype(y.dtype).unsqueeze(-1), []


def test_a_length_that_cannot_be_cut_is_refused() -> None:
    stage = PipelineStage([Doubling()], Mesh(Degrees(1, 1, 1, 2), 0), 4, [dist.Shard(1)], None)
    with pytest.raises(UserError, match=r"batch of 3 tokens, which 2 ranks cannot share.*length_multiple"):
        stage.hidden_states(paddle.zeros([2, 3], dtype="int64"))


def test_ranks_that_read_other_data_are_noticed() -> None:
    edges: Any = Neighbours([2, 4, 1, 0, 0], [[[1.0]] * 4] * 2)
    stage = PipelineStage([Doubling()], Mesh(Degrees(2, 1, 1, 1), 1), 1, [], edges)
    with pytest.raises(
        UserError, match=r"sends a micro-batch of \[2, 4\] tokens, the last one has read one of \[2, 5\]"
    ):
        stage.hidden_states(paddle.zeros([2, 5], dtype="int64"))


class Last(Doubling):
    """A model whose loss is the sum of the states of the last rank."""

    def final_norm(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize("starts", [None, [[0, 0, 2]]])
def test_the_last_rank_knows_the_shapes_that_it_has_read(starts: Any) -> None:
    """Of the first micro-batch they come along, and are compared."""
    first = ([1, 2, 1, 0, 0], [[[1.0], [2.0]]])
    second = ([[[1.0], [2.0], [3.0]]],) if starts is None else (starts, [[[1.0], [2.0], [3.0]]])
    edges: Any = Neighbours(*first, *second)
    stage = PipelineStage([Last()], Mesh(Degrees(2, 1, 1, 1), 1), 1, [], edges)
    given = None if starts is None else paddle.to_tensor(starts)

    def states(length: int, document_starts: Any = None) -> Any:
        return stage.hidden_states(paddle.zeros([1, length], dtype="int64"), document_starts)[0].sum()

    with paddle.no_grad():
        stage.forward(Action(True, 0), lambda: states(2))
        stage.forward(Action(True, 1), lambda: states(3, given))
    assert edges.asked == [[5], [1, 2, 1], *([] if starts is None else [[1, 3]]), [1, 3, 1]]
    assert not edges.messages


def test_the_rank_before_the_last_sends_one_header() -> None:
    edges: Any = Neighbours()
    stage = PipelineStage([Doubling()], Mesh(Degrees(2, 1, 1, 1), 0), 2, [], edges)
    for number in (0, 1):
        stage._micro_batch = number
        stage._send(paddle.zeros([1, 1, 2]), None)
    assert edges.sent == [[1, 1, 2, 0, 0], [[[0.0, 0.0]]], [[[0.0, 0.0]]]]


@pytest.mark.parametrize(("dtype", "code", "sent"), [("bfloat16", 0, "float32"), ("float32", 2, "float16")])
def test_activations_of_another_dtype_are_an_error(dtype: str, code: int, sent: str) -> None:
    """They would be read as another number of elements: over NCCL the ranks hang, or go on with garbage."""
    edges: Any = Neighbours([1, 1, 2, 0, code], [[[1.0, 3.0]]])
    model = Doubling()
    model.factor._set_impl(paddle.ones([1]).astype(dtype))
    stage = PipelineStage([model], Mesh(Degrees(2, 1, 1, 1), 1), 2, [], edges)
    with pytest.raises(UserError, match=rf"sends activations in {sent}, and this one computes in {dtype}: .*cast back"):
        stage.hidden_states(paddle.zeros([1, 1], dtype="int64"))


@pytest.mark.parametrize(("dtype", "code"), [("float32", 0), ("bfloat16", 1), ("float16", 2)])
def test_activations_say_their_dtype(dtype: str, code: int) -> None:
    edges: Any = Neighbours()
    stage = PipelineStage([Doubling()], Mesh(Degrees(2, 1, 1, 1), 0), 2, [], edges)
    stage._send(paddle.zeros([1, 1, 2], dtype), None)
    assert edges.sent[0] == [1, 1, 2, 0, code]


def test_the_middle_passes_on_until_the_first_rank_lets_go() -> None:
    # the second one brings where documents begin: each token of its row is one
    messages = ([1, 1, 2, 0, 0], [[[1.0, 3.0]]], [1, 2, 1, 2, 0], [[0, 1]], [[[5.0], [7.0]]], [0] * 5)
    edges: Any = Neighbours(*messages)
    stage = PipelineStage([Doubling()], Mesh(Degrees(4, 1, 1, 1), 1), 2, [], edges)
    stage.serve_forward_only()
    passed_on = [[1, 1, 2, 0, 0], [[[2.0, 6.0]]], [1, 2, 1, 2, 0], [[0, 1]], [[[10.0], [15.0]]], [0] * 5]
    assert edges.sent == passed_on
    # the one before the last does not tell the last one, which knows
    edges = Neighbours(*messages)
    PipelineStage([Doubling()], Mesh(Degrees(4, 1, 1, 1), 2), 2, [], edges).serve_forward_only()
    assert edges.sent == passed_on[:-1]


class Told(OtherRanks):
    """Knows the header of what arrives, which no other rank sends."""

    def __init__(self) -> None:
        self.seen = list[tuple[list[int], int]]()

    def header_sent(self, header: Any, chunk: int) -> None:
        self.seen.append((list(header), chunk))

    def header(self, arrived: Any) -> list[int]:
        assert arrived == [7, 7, 7, 7, 7]
        return [1, 1, 2, 0, 0]


def test_a_rank_without_the_others_is_told_the_headers() -> None:
    edges: Any = Neighbours([7, 7, 7, 7, 7], [[[1.0, 3.0]]])
    stage = PipelineStage([Doubling()], Mesh(Degrees(3, 1, 1, 1), 1), 2, [], edges)
    told = Told()
    with collective.without_others(told):
        stage.forward(Action(True, 0), None)
    assert told.seen == [([1, 1, 2, 0, 0], 0)]
    assert not isinstance(collective.others(), Told)
    assert edges.sent[-1] == [[[2.0, 6.0]]]


def test_a_message_that_cannot_be_sent_ends_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def fail() -> None:
        raise RuntimeError("connection reset")

    def leave(code: int) -> None:
        done.append(f"exit code {code}")
        raise SystemExit

    monkeypatch.setattr(os, "_exit", leave)
    jobs: queue.Queue[Any] = queue.Queue()
    for job in (lambda: done.append("first"), fail, lambda: done.append("third")):
        jobs.put(job)
    with pytest.raises(SystemExit):
        p2p._send_all(jobs)
    assert done == ["first", "exit code 1"]
    said = capsys.readouterr().err
    assert "RuntimeError: connection reset" in said
    assert "could not be sent; the run ends" in said
