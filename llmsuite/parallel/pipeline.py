"""A rank of a pipeline: the model's face towards a training stage, and the passes between the ranks.

A training stage's loss asks for hidden states and gets them where the last layers are. On the first rank of the
pipeline the same call embeds the ids, runs the layers that are here and sends the result on; what the loss makes of
the zeros it gets there counts for nothing. So a stage's code is the same with and without a pipeline.

With the interleaved schedule a rank has several chunks of the layers. Data meets one of them: the first chunk of the
first rank (the ids) and the last chunk of the last rank (the targets). The passes of all others only receive, run and
send on; no loss is asked, and a rank in the middle of a pipeline knows of a batch what comes with the activations: its
shape, and where documents begin in rows of several.

Only local parts travel: a rank talks to the ranks with its own coordinate on every other axis.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.errors import UserError
from llmsuite.launch import calls
from llmsuite.models.lora import adapters
from llmsuite.models.qat import FakeQuantLinear, observed
from llmsuite.parallel.loss_ledger import LossTerms
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.schedule import Action
from llmsuite.parallel.tensor import local_value, reshard
from llmsuite.typing import Tensor

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward pass that waits for its backward pass."""

    given: Tensor | None
    """What came from the part before; None in the first part."""
    result: Tensor
    total: Tensor | None
    """The loss, where the pass ended in one."""


class PipelineStage:
    """This rank's layers, called like the whole model. Also made for a pipeline of one rank, where it adds nothing."""

    def __init__(
        self, chunks: Sequence[Any], mesh: Mesh, hidden_size: int, placements: list[Any], edges: P2PChannels | None
    ):
        """
        Args:
            chunks: models that have what belongs to a part each; see `cut.keep_part`.
            mesh: this rank's place.
            hidden_size: D of the hidden states [B, L, D].
            placements: of the activations between layers, over tp.
            edges: to the neighbours; None without a pipeline.
        """
        self.chunks, self._mesh, self._placements, self._edges = list(chunks), mesh, placements, edges
        self._hidden_size = hidden_size
        self.is_first, self.is_last = mesh.coordinate["pp"] == 0, mesh.coordinate["pp"] == mesh.degrees.pp - 1
        self._at_data = 0 if self.is_first else len(self.chunks) - 1
        self.marks_padding = False
        """Whether layers want to know which tokens are padding; those of a step are marked then."""
        self.observers: list[FakeQuantLinear] | None = None
        """What takes note of its inputs in the forward passes of training; None when no rank has any."""
        self._lengths: Any = None
        self._in_schedule = False
        self._passed: tuple[Tensor | None, Tensor] | None = None
        self._waiting: dict[tuple[int, int], Pass] = {}

    @property
    def model(self) -> Any:
        """The chunk that a training stage meets."""
        return self.chunks[self._at_data]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of this rank, by its full name."""
        return itertools.chain.from_iterable(chunk.named_parameters() for chunk in self.chunks)

    def train(self) -> None:
        """As `paddle.nn.Layer.train`."""
        for chunk in self.chunks:
            chunk.train()

    def eval(self) -> None:
        """As `paddle.nn.Layer.eval`."""
        for chunk in self.chunks:
            chunk.eval()

    # what a training stage calls

    @contextlib.contextmanager
    def adapters_off(self) -> Iterator[None]:
        """While active, on every rank, passes are those of the model without its adapters; nothing is copied."""
        switched = [adapter for chunk in self.chunks for adapter in adapters(chunk)]
        for adapter in switched:
            adapter.is_on = False
        try:
            yield
        finally:
            for adapter in switched:
                adapter.is_on = True

    def hidden_states(self, input_ids: Tensor, document_starts: Tensor | None = None) -> tuple[Tensor, list[Any]]:
        """Hidden states [B, L, D] on the last stage; elsewhere zeros, once the activations are sent on.

        Args:
            input_ids: [B, L].
            document_starts: for rows of several documents, as `CausalLM.hidden_states` takes it.

        Raises:
            UserError: under sequence parallel, L cannot be cut.
        """
        length, tp = input_ids.shape[1], self._mesh.degrees.tp
        if tp > 1 and self._placements[0].is_shard() and length % tp:
            raise UserError(
                f"parallel.sequence_parallel: the stage has made a batch of {length} tokens, which {tp} ranks cannot "
                "share; its collate has to pad to a multiple of context.length_multiple"
            )
        # outside of a schedule the passes of the other chunks are made here too
        before, after = range(self._at_data), range(self._at_data + 1, len(self.chunks))
        for chunk in () if self._in_schedule else before:
            self._run(chunk, *self._receive())
        assert not (self._in_schedule and self._passed), "a stage's loss may ask for hidden states once"
        given = None
        if not self.is_first:
            given, document_starts = self._receive()
        if given is not None and (sent := list(given.shape[:2])) != (read := list(input_ids.shape)):
            raise UserError(
                f"the first rank of the pipeline sends a micro-batch of {sent} tokens, the last one has read one of "
                f"{read}; do their machines have the same data files?"
            )
        if given is None and self._lengths is not None:
            document_starts = _marked(document_starts, self._lengths, input_ids.shape)
        x = self.model.embed(input_ids, document_starts=document_starts) if given is None else given
        result = self._run(self._at_data, x, document_starts)
        self._passed = given, result
        for chunk in () if self._in_schedule else after:
            self._run(chunk, *self._receive())
        if self.is_last:
            return self.model.final_norm(result), []
        return paddle.zeros([*input_ids.shape, self._hidden_size]), []

    def token_nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability of each target, [N]; zeros where the last layers are not."""
        return self.model.token_nll(hidden, targets) if self.is_last else paddle.zeros([targets.shape[0]])

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D] to logits [..., V], whole on every rank; zeros where the last layers are not.

        Under tensor parallel this brings the logits of all ranks together: `token_nll` does without.
        """
        if not self.is_last:
            return paddle.zeros([*hidden.shape[:-1], self.model.config.vocab_size])
        return self._whole(self.model.logits(hidden))

    def _whole(self, tensor: Tensor) -> Tensor:
        """As a plain tensor that every rank of the tensor parallel group has alike."""
        if not tensor.is_dist():
            return tensor
        whole = [dist.Replicate()]
        return dtensor_to_local(reshard(tensor, self._mesh, whole), self._mesh.tensor, whole)

    def scores(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, D] to what a score head gives, [N] in float32, whole on every rank; zeros where the last
        layers are not."""
        if not self.is_last:
            return paddle.zeros([hidden.shape[0]])
        return self._whole(self.model.scores(hidden))

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Ids [B, L] to logits [B, L, V]."""
        return self.logits(self.hidden_states(input_ids)[0])

    # what the engine calls

    def owns_loss_or_inputs(self, chunk: int) -> bool:
        """Whether the passes of a chunk begin with ids or end in a loss."""
        return (self.is_first or self.is_last) and chunk == self._at_data

    def forward(self, action: Action, loss: Callable[[], T] | None, lengths: Any = None) -> T | None:
        """A forward pass of the schedule; in training, `backward` follows.

        Args:
            action: which one.
            loss: calls `hidden_states` once; None where the chunk meets no data. In training it gives `LossTerms`.
            lengths: of the rows without padding, [B]; None when the stage does not say.

        Returns:
            What `loss` gives. It is the loss on the last stage only.
        """
        self._in_schedule, self._passed = True, None
        self._lengths = lengths if self.marks_padding or self.observers is not None else None
        # not what is computed again later, in the backward pass of this micro-batch among other forward passes
        with observed(self.observers or () if paddle.is_grad_enabled() else ()):
            if loss is not None:
                terms: T | None = loss()
                assert self._passed is not None, "the stage's loss did not ask for hidden states"
            else:
                terms, (given, document_starts) = None, self._receive()
                self._passed = given, self._run(action.chunk, given, document_starts)
        if paddle.is_grad_enabled():
            assert terms is None or isinstance(terms, LossTerms)
            total = terms.total if terms is not None and self.is_last else None
            self._waiting[action.chunk, action.micro_batch] = Pass(*self._passed, total)
        self._in_schedule, self._passed, self._lengths = False, None, None
        return terms

    def backward(self, action: Action, scale: float = 1.0) -> None:
        """Gradients of a pass: of `scale` times the loss on the last stage, elsewhere of what the next part sends."""
        waiting = self._waiting.pop((action.chunk, action.micro_batch))
        if waiting.total is not None:
            (waiting.total if scale == 1.0 else waiting.total * scale).backward()
        else:
            assert self._edges is not None
            y = waiting.result
            gradient = self._edges.receive(local_value(y).shape, y.dtype, forward=False)
            if not y.stop_gradient:  # as in front of the first adapter
                paddle.autograd.backward([y], [self._spread(gradient)])
        if waiting.given is not None:
            gradient = waiting.given.grad
            if gradient.is_dist():
                gradient = reshard(gradient, self._mesh, self._placements)
            assert self._edges is not None
            self._edges.send(local_value(gradient).detach(), forward=False)

    @paddle.no_grad()
    def serve_forward_only(self) -> None:
        """In the middle of a pipeline, outside of a schedule: pass on what comes, until the first rank lets go."""
        self.eval()
        while (given := self._receive_or_end()) is not None:
            self._run(0, *given)
            for chunk in range(1, len(self.chunks)):
                self._run(chunk, *self._receive())
        self.send_stop()
        self.train()

    def send_stop(self) -> None:
        """Let the next rank leave `serve_forward_only`, if it is in the middle of the pipeline."""
        if self._edges is not None and self._mesh.coordinate["pp"] < self._mesh.degrees.pp - 2:
            self._edges.send(paddle.to_tensor(_END, dtype="int64"), forward=True)

    def _run(self, chunk: int, x: Tensor, document_starts: Tensor | None) -> Tensor:
        """Through the layers of a chunk, and on to the next part if there is one."""
        for observer in self.observers or ():
            observer.counted = None if document_starts is None else document_starts >= 0
        are_marked = self.observers is not None and not self.marks_padding
        y, _ = self.chunks[chunk].decode(
            x, document_starts=_unmarked(document_starts) if are_marked else document_starts
        )
        if not (self.is_last and chunk == len(self.chunks) - 1):
            assert self._edges is not None
            local = local_value(y).detach()
            # of sequences that are cut a rank sends a part, of their documents all
            length = 0 if document_starts is None else document_starts.shape[1]
            self._edges.send(paddle.to_tensor([*local.shape, length], dtype="int64"), forward=True)
            if document_starts is not None:
                self._edges.send(document_starts, forward=True)
            self._edges.send(local, forward=True)
        return y

    def _receive(self) -> tuple[Tensor, Tensor | None]:
        received = self._receive_or_end()
        assert received is not None, "the first rank has let go in the middle of a schedule"
        return received

    def _receive_or_end(self) -> tuple[Tensor, Tensor | None] | None:
        """Activations of the part before and the documents of their rows. Their shapes come first: they change from
        micro-batch to micro-batch."""
        assert self._edges is not None
        *shape, length = header = self._edges.receive([len(_END)], "int64", forward=True).tolist()
        if header == _END:
            return None
        document_starts = self._edges.receive([shape[0], length], "int64", forward=True) if length else None
        x = self._spread(self._edges.receive(shape, next(iter(self.model.parameters())).dtype, forward=True))
        x.stop_gradient = not paddle.is_grad_enabled()
        return x, document_starts

    def _spread(self, local: Tensor) -> Tensor:
        if self._mesh.tensor is None:
            return local
        return dtensor_from_local(local, self._mesh.tensor, self._placements).detach()


def _marked(document_starts: Tensor | None, lengths: Any, shape: Sequence[int]) -> Tensor:
    """Documents [B, L] with -1 for what is behind the length of each row."""
    document_starts = paddle.zeros(shape, dtype="int64") if document_starts is None else document_starts
    is_padding = paddle.arange(shape[1]) >= paddle.to_tensor(lengths).unsqueeze(-1)
    return paddle.where(is_padding, paddle.full_like(document_starts, -1), document_starts)


def _unmarked(document_starts: Tensor | None) -> Tensor | None:
    """Documents without marks, for layers that do not ask for them; None where each row is one."""
    if document_starts is None or not bool((document_starts > 0).any()):
        return None
    return document_starts.clip(min=0)


_END = [0, 0, 0, 0]
"""In place of the shape of activations, and of the length of rows of several documents: none will follow."""


class P2PChannels:
    """Sends to and receives from the neighbours. A send never waits for its receiver.

    There is a channel, a group of two, for each direction between two neighbours: what is sent first is received
    first. Between two ranks that are each other's next, as two ranks with several chunks are, activations and
    gradients go the same way; they have a channel each, for their orders differ (see `schedule.play`).
    """

    def __init__(self, mesh: Mesh, ring: bool):
        """`ring`: whether the last rank sends on to the first, which has a second chunk."""
        self._groups: dict[bool, tuple[Any, Any]] = {}
        """By direction (forward or not): to send in, to receive in."""
        made: dict[tuple[int, int, bool], Any] = {}
        for line in mesh.pipeline_lines():
            for a, b in [*itertools.pairwise(line), *([(line[-1], line[0])] if ring else [])]:
                for sender, receiver, forward in ((a, b, True), (b, a, False)):
                    made[sender, receiver, forward] = dist.new_group(sorted((a, b)))
            if mesh.rank in line:
                at = line.index(mesh.rank)
                self._next, self._previous = line[(at + 1) % len(line)], line[at - 1]
        for forward in (True, False):
            to, origin = (self._next, self._previous) if forward else (self._previous, self._next)
            self._groups[forward] = made.get((mesh.rank, to, forward)), made.get((origin, mesh.rank, forward))
        self._tasks: list[Any] = []
        self._senders: dict[bool, queue.Queue[Callable[[], None]]] = {}

    def send(self, value: Tensor, forward: bool) -> None:
        """Send to the next part, or to the one before."""
        group, peer = self._groups[forward][0], self._next if forward else self._previous
        copy = value.clone()
        call = calls.made("send", copy, group)
        if dist.get_backend(group) != "GLOO":
            self._tasks = [task for task in self._tasks if not task.is_completed()]
            self._tasks.append(dist.isend(copy, peer, group))
            call.end()
            return

        # Gloo's send waits for its receiver, and in 1F1B neighbours send to each other at once
        def job() -> None:
            group.process_group.send(copy, group.get_group_rank(peer), True).wait()
            call.end()

        if forward not in self._senders:
            self._senders[forward] = queue.Queue()
            threading.Thread(target=_send_all, args=(self._senders[forward],), daemon=True).start()
        self._senders[forward].put(job)

    def receive(self, shape: list[int], dtype: Any, forward: bool) -> Tensor:
        """Receive from the part before (a forward pass), or from the next one (a backward pass)."""
        group, peer = self._groups[forward][1], self._previous if forward else self._next
        value = paddle.empty(shape, dtype=dtype)
        with calls.made("receive", value, group):
            group.process_group.recv(value, group.get_group_rank(peer), True).wait()
        return value


def _send_all(jobs: queue.Queue[Callable[[], None]]) -> None:
    """Do jobs for ever, in a thread of its own. One that fails ends the rank.

    The main thread is most likely waiting for an answer to what was not sent; nothing else would wake it.
    """
    try:
        while True:
            jobs.get()()
    except BaseException:
        traceback.print_exc()
        print("a message to a neighbour in the pipeline could not be sent; the run ends", file=sys.stderr, flush=True)
        os._exit(1)
