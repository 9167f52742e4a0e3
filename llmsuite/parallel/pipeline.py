"""A rank of a pipeline: the model as a training stage calls it, and the passes of the schedule.

A training stage's loss asks for hidden states and gets them where the last layers are. On the first rank of the
pipeline the same call embeds the ids, runs the layers that are here and sends the result on; the loss gets zeros there,
and its value is not used. So a stage's code is the same with and without a pipeline.

With the interleaved schedule a rank has several chunks of the layers. One of them owns inputs or loss: the first chunk
of the first rank (the ids) and the last chunk of the last rank (the targets). The passes of all others only receive,
run and send on; no loss is asked for. A rank in the middle of a pipeline knows only what comes with the activations
(see `edges`): their shape, and where documents begin in rows of several.

Only local parts travel: a rank talks to the ranks with its own coordinate on every other axis.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.errors import UserError
from llmsuite.models import dropout, token_values
from llmsuite.models.block_quant import is_quantised_part
from llmsuite.models.lora import adapters
from llmsuite.models.qat import FakeQuantLinear, observing
from llmsuite.models.reft import chosen_tokens
from llmsuite.parallel import edges
from llmsuite.parallel.loss_ledger import total_of
from llmsuite.parallel.marks import marked, unmarked, with_keys, without_keys
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.p2p import P2PChannels
from llmsuite.parallel.schedule import Action
from llmsuite.parallel.tensor import local_value, reshard
from llmsuite.parallel.vocabulary import without_padding
from llmsuite.typing import Tensor

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward pass that waits for its backward pass."""

    received: Tensor | None
    """The activations of the part before; None in the first part."""
    result: Tensor
    total: Tensor | None
    """The loss, where the pass ended in one."""


class PipelineStage:
    """This rank's layers, called like the whole model. Also made for a pipeline of one rank, where it adds nothing."""

    def __init__(
        self, chunks: Sequence[Any], mesh: Mesh, hidden_size: int, placements: list[Any], channels: P2PChannels | None
    ):
        """
        Args:
            chunks: models that have only the layers of one part each; see `cut.keep_part`.
            mesh: this rank's place.
            hidden_size: D of the hidden states [B, L, D].
            placements: placements over tp of the activations between layers.
            channels: to the neighbours; None without a pipeline.
        """
        self.chunks, self._mesh, self._placements = list(chunks), mesh, placements
        self._channels, self._hidden_size = channels, hidden_size
        self.is_first, self.is_last = mesh.coordinate["pp"] == 0, mesh.coordinate["pp"] == mesh.degrees.pp - 1
        self._data_chunk = 0 if self.is_first else len(self.chunks) - 1
        """The chunk whose passes begin with ids or end in a loss; of no meaning in the middle of a pipeline."""
        self.marks_padding = False
        """Whether layers want to know which tokens are padding; those of a step are marked then."""
        self.observers: list[FakeQuantLinear] | None = None
        """The layers that observe their inputs in the forward passes of training; None when no rank has any."""
        self.dropout_seed: int | None = None
        """Seed of the masks of `models.dropout`; None when no layer drops anything."""
        self.step = 0
        """The step whose passes are made."""
        self.edited_ends: tuple[int, int] | None = None
        """How many tokens at both ends of a prompt `models.reft` edits; None when no layer edits anything."""
        self.prompt_lengths: Any = None
        """Length of the prompt that each token of the pass belongs to, [B, L]; None when the batch does not say it."""
        self._lengths: Any = None
        self._document_starts: Tensor | None = None
        """Those of the rows that a stage's loss has got hidden states of."""
        self._in_schedule = False
        self._passed: tuple[Tensor | None, Tensor] | None = None
        self._waiting: dict[tuple[int, int], Pass] = {}

    @property
    def _has_values(self) -> bool:
        """Whether there are `models.token_values` in a pass."""
        return self.edited_ends is not None or (self.dropout_seed is not None and self.model.training)

    @property
    def model(self) -> Any:
        """The chunk that a training stage calls."""
        return self.chunks[self._data_chunk]

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

    @property
    def training(self) -> bool:
        """As `paddle.nn.Layer.training`: false in an evaluation."""
        return bool(self.model.training)

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
        self._check_length(input_ids)
        # outside of a schedule the passes of the other chunks are made here too
        before, after = range(self._data_chunk), range(self._data_chunk + 1, len(self.chunks))
        for chunk in () if self._in_schedule else before:
            self._run(chunk, *self._receive())
        assert not (self._in_schedule and self._passed), "a stage's loss may ask for hidden states once"
        received = None
        if not self.is_first:
            received, document_starts = self._receive()
            edges.check_same_batch(received.shape[:2], input_ids.shape)
        elif self._lengths is not None:
            document_starts = marked(document_starts, self._lengths, input_ids.shape)
        x = self.model.embed(input_ids, document_starts=document_starts) if received is None else received
        if self.is_first and self._has_values:
            document_starts = with_keys(document_starts, self._token_values(input_ids, document_starts))
        result = self._run(self._data_chunk, x, document_starts)
        self._passed = received, result
        for chunk in () if self._in_schedule else after:
            self._run(chunk, *self._receive())
        self._document_starts = document_starts
        if self.is_last:
            return self.model.final_norm(result), []
        return paddle.zeros([*input_ids.shape, self._hidden_size]), []

    def _token_values(self, input_ids: Tensor, document_starts: Tensor | None) -> Tensor:
        if self.edited_ends is not None:
            assert self.prompt_lengths is not None, "the stage does not say where prompts end"
            return chosen_tokens(paddle.to_tensor(self.prompt_lengths), document_starts, self.edited_ends)
        assert self.dropout_seed is not None
        return dropout.token_keys(input_ids, document_starts, self.dropout_seed, self.step)

    def mtp_hidden_states(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """Hidden states [B, L, D] that predict the token after the next one, of a model with a layer for it; zeros
        where the last layers are not.

        Args:
            hidden: what `hidden_states` has returned.
            next_ids: the token behind each input, [B, L].
        """
        if not self.is_last:
            return paddle.zeros(hidden.shape)
        if self._mesh.tensor is not None:
            hidden = reshard(hidden, self._mesh, self._placements)
        starts, keys = self._without_keys(self._document_starts)
        with token_values.tokens(keys):
            return self.model.mtp_hidden_states(hidden, next_ids, starts)

    def _without_keys(self, marks: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Document starts of a pass, and the keys of its tokens, where layers ask for them."""
        return without_keys(marks) if self._has_values and marks is not None else (marks, None)

    def _check_length(self, input_ids: Tensor) -> None:
        length, tp = input_ids.shape[1], self._mesh.degrees.tp
        if tp > 1 and self._placements[0].is_shard() and length % tp:
            raise UserError(
                f"parallel.sequence_parallel: the stage has made a batch of {length} tokens, which {tp} ranks cannot "
                "share; its collate has to pad to a multiple of context.length_multiple"
            )

    def token_nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability of each target, [N]; zeros where the last layers are not."""
        return self.model.token_nll(hidden, targets) if self.is_last else paddle.zeros([targets.shape[0]])

    def token_nll_and_entropy(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As `token_nll`, and the entropy of each distribution over the vocabulary, in nats: [N] each."""
        return self._two_of("token_nll_and_entropy", hidden, targets)

    def token_nll_and_first_choice(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As `token_nll`, and 1 where greedy decoding picks the target, else 0: [N] each."""
        return self._two_of("token_nll_and_first_choice", hidden, targets)

    def _two_of(self, method: str, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        none = paddle.zeros([targets.shape[0]])
        return getattr(self.model, method)(hidden, targets) if self.is_last else (none, none)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D] to logits [..., V], whole on every rank; zeros where the last layers are not.

        Under tensor parallel this brings the logits of all ranks together: `token_nll` does without.
        """
        if not self.is_last:
            return paddle.zeros([*hidden.shape[:-1], self.model.config.vocab_size])
        logits = self._whole(self.model.logits(hidden))
        return without_padding(logits, [*logits.shape[:-1], self.model.config.vocab_size])

    def _whole(self, tensor: Tensor) -> Tensor:
        """The plain tensor, the same on every rank of the tensor parallel group."""
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
        return (self.is_first or self.is_last) and chunk == self._data_chunk

    def forward(self, action: Action, loss: Callable[[], T] | None, lengths: Any = None) -> T | None:
        """A forward pass of the schedule; in training, `backward` follows.

        Args:
            action: the pass.
            loss: calls `hidden_states` once; None for a chunk that owns neither loss nor inputs. In training it gives
                `LossTerms`.
            lengths: of the rows without padding, [B]; None when the stage does not say.

        Returns:
            The result of `loss`. It is the loss on the last stage only.
        """
        self._in_schedule, self._passed = True, None
        self._lengths = lengths if self.marks_padding or self.observers is not None else None
        # recompute runs layers again during backward passes, among other forward passes: nothing is observed there
        with observing(self.observers or () if paddle.is_grad_enabled() else ()):
            if loss is not None:
                terms: T | None = loss()
                assert self._passed is not None, "the stage's loss did not ask for hidden states"
            else:
                terms, (received, document_starts) = None, self._receive()
                self._passed = received, self._run(action.chunk, received, document_starts)
        if paddle.is_grad_enabled():
            total = total_of(terms) if terms is not None and self.is_last else None
            self._waiting[action.chunk, action.micro_batch] = Pass(*self._passed, total)
        self._in_schedule, self._passed, self._lengths = False, None, None
        return terms

    def backward(self, action: Action, scale: float = 1.0) -> None:
        """The backward pass of a forward one: of `scale` times the loss on the last stage, elsewhere of the gradient
        that the next part sends."""
        waiting = self._waiting.pop((action.chunk, action.micro_batch))
        if waiting.total is not None:
            (waiting.total if scale == 1.0 else waiting.total * scale).backward()
        else:
            y = waiting.result
            gradient = self._receive_gradient(y)
            if not y.stop_gradient:  # as in front of the first adapter
                paddle.autograd.backward([y], [gradient])
        if ended := getattr(self.chunks[action.chunk], "after_backward", None):  # of sharding stage 3, see `gathering`
            ended()
        if waiting.received is not None:
            assert waiting.received.grad.dtype == waiting.received.dtype, "the part before expects what it has sent"
            self._send_gradient(waiting.received.grad)

    @paddle.no_grad()
    def serve_forward_only(self) -> None:
        """Run and send on every batch that comes, outside of a schedule, until the first rank calls `send_stop`. The
        ranks in the middle of a pipeline are in it while those at its ends ask for hidden states."""
        self.eval()
        while (received := self._receive_or_stop()) is not None:
            self._run(0, *received)
            for chunk in range(1, len(self.chunks)):
                self._run(chunk, *self._receive())
        self.send_stop()
        self.train()

    def send_stop(self) -> None:
        """Let the next rank leave `serve_forward_only`, if it is in the middle of the pipeline."""
        if self._channels is not None and self._mesh.coordinate["pp"] < self._mesh.degrees.pp - 2:
            self._channels.send(paddle.to_tensor(_STOP, dtype="int64"), forward=True)

    # one pass through a chunk, and the messages around it

    def _run(self, chunk: int, x: Tensor, document_starts: Tensor | None) -> Tensor:
        """Through the layers of a chunk, and on to the next part if there is one."""
        marks = document_starts
        document_starts, keys = self._without_keys(marks)
        for observer in self.observers or ():
            observer.counted = None if document_starts is None else document_starts >= 0
        are_marked = self.observers is not None and not self.marks_padding
        with token_values.tokens(keys):
            y, _ = self.chunks[chunk].decode(
                x, document_starts=unmarked(document_starts) if are_marked else document_starts
            )
        pp = self._mesh.degrees.pp
        part, num_parts = chunk * pp + self._mesh.coordinate["pp"], len(self.chunks) * pp
        if edges.target(part, num_parts, forward=True) is not None:
            self._send(y, marks)
        return y

    def _send(self, y: Tensor, document_starts: Tensor | None) -> None:
        """Send activations on. Under sequence parallel a rank sends its part of them, but all document starts."""
        local = local_value(y).detach()
        length = 0 if document_starts is None else document_starts.shape[1]
        contents: dict[edges.Content, Tensor | None] = {
            "header": paddle.to_tensor([*local.shape, length, edges.dtype_code(local.dtype)], dtype="int64"),
            "document_starts": document_starts,
            "activations": local,
        }
        assert self._channels is not None
        for message in edges.messages(True, local.shape, length):
            self._channels.send(contents[message.content], forward=True)

    def _receive(self) -> tuple[Tensor, Tensor | None]:
        received = self._receive_or_stop()
        assert received is not None, "the first rank has sent a stop in the middle of a schedule"
        return received

    def _receive_or_stop(self) -> tuple[Tensor, Tensor | None] | None:
        """Activations of the part before and the document starts of their rows; None when it has sent a stop."""
        assert self._channels is not None
        header = self._channels.receive([edges.HEADER_LENGTH], "int64", forward=True).tolist()
        if header == _STOP:
            return None
        *shape, length, code = header
        dtype = next(p.dtype for name, p in self.model.named_parameters() if not is_quantised_part(name))
        if code != edges.dtype_code(dtype):  # so many bytes would not be so many elements
            raise UserError(
                f"the part before sends activations in {edges.DTYPES[code]}, and this one computes in "
                f"{edges.DTYPES[edges.dtype_code(dtype)]}: a layer of the model has to return the dtype that it gets, "
                "so what it computes in another one it has to cast back"
            )
        contents: dict[edges.Content, Tensor] = {}
        for message in edges.messages(True, shape, length)[1:]:
            kind = "int64" if message.is_int64 else dtype
            contents[message.content] = self._channels.receive(list(message.shape), kind, forward=True)
        x = self._spread(contents["activations"])
        x.stop_gradient = not paddle.is_grad_enabled()
        return x, contents.get("document_starts")

    def _send_gradient(self, gradient: Tensor) -> None:
        if gradient.is_dist():
            gradient = reshard(gradient, self._mesh, self._placements)
        assert self._channels is not None
        self._channels.send(local_value(gradient).detach(), forward=False)

    def _receive_gradient(self, y: Tensor) -> Tensor:
        """The gradient of what was sent on."""
        assert self._channels is not None
        (message,) = edges.messages(False, local_value(y).shape, 0)
        return self._spread(self._channels.receive(list(message.shape), y.dtype, forward=False))

    def _spread(self, local: Tensor) -> Tensor:
        """This rank's part of activations, as a tensor with the placements they have between layers."""
        if self._mesh.tensor is None:
            return local
        return dtensor_from_local(local, self._mesh.tensor, self._placements).detach()


_STOP = [0] * edges.HEADER_LENGTH
"""In place of a header: nothing will follow."""
