"""A rank of a pipeline: the model that a training stage calls, and the passes of the schedule.

A training stage's loss calls `hidden_states` and gets them on the ranks with the last layers. On the first rank of the
pipeline the same call embeds the ids, runs the layers of this rank and sends the result; there the loss gets zeros, and
its value is not used. So a stage's code is the same with and without a pipeline.

With the interleaved schedule a rank has several chunks of the layers. Two chunks own inputs or loss: the first chunk of
the first rank (the ids) and the last chunk of the last rank (the targets). The passes of all others only receive, run
and send; no loss is called. A rank in the middle of a pipeline knows only the messages that come with the activations
(see `edges`): their shape, and document starts where rows hold several documents.

Only local shards are sent: a rank communicates with the ranks that have its own coordinates on every other axis.
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

from llmsuite.adapters.add import adapters
from llmsuite.adapters.layers.reft import chosen_tokens
from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import array_of, shared_tensor_of, tensor_of
from llmsuite.models import dropout, token_context
from llmsuite.models.block_quant import is_quantised_part
from llmsuite.models.divergence import Comparison
from llmsuite.models.qat import FakeQuantLinear, observing
from llmsuite.parallel import collective, edges
from llmsuite.parallel.chunked_loss import ChunkedLosses
from llmsuite.parallel.loss_ledger import total_of
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.p2p import P2PChannels
from llmsuite.parallel.schedule import Action
from llmsuite.parallel.tensor import local_value, reshard
from llmsuite.parallel.vocabulary import without_padding

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward pass that waits for its backward pass."""

    received: Tensor | None
    """The activations of the previous part; None in the first part."""
    result: Tensor
    total: Tensor | None
    """The loss, where the pass ended in one."""


class PassRecorder:
    """Follows the passes of a rank; this one records nothing."""

    @contextlib.contextmanager
    def in_pass(self, micro_batch: int | None, lengths: Any = None) -> Iterator[None]:
        """A forward or backward pass, while layers run.

        Args:
            micro_batch: its number; None for a pass without gradients.
            lengths: of the rows without padding, [B]; None in a backward pass, and when the batch does not have them.
        """
        yield

    def see_tokens(self, input_ids: Tensor, document_starts: Tensor | None) -> None:
        """The arguments of `PipelineStage.hidden_states`, before layers run."""


class PipelineStage:
    """This rank's layers, called like the full model. It is also made for a pipeline of one rank, where it adds
    nothing."""

    def __init__(
        self, chunks: Sequence[Any], mesh: Mesh, hidden_size: int, placements: list[Any], channels: P2PChannels | None
    ):
        """
        Args:
            chunks: models that have only the layers of one part each; see `pipeline_split.keep_part`.
            mesh: of the run, with this rank's coordinates.
            hidden_size: D of the hidden states [B, L, D].
            placements: placements over tp of the activations between layers.
            channels: to the neighbours; None without a pipeline.
        """
        self.chunks = list(chunks)
        self._mesh = mesh
        self._placements = placements
        self._channels = channels
        self._hidden_size = hidden_size
        self.is_first = mesh.coordinate["pp"] == 0
        self.is_last = mesh.coordinate["pp"] == mesh.degrees.pp - 1
        self._data_chunk = 0 if self.is_first else len(self.chunks) - 1
        """The chunk whose passes start with ids or end with a loss; without meaning in the middle of a pipeline."""
        self.needs_padding_mask = False
        """True where layers need to know which tokens are padding; then the padding of a step is marked."""
        self.observers: list[FakeQuantLinear] | None = None
        """Layers that observe their inputs in the forward passes of training; None when no rank has any."""
        self.recorder = PassRecorder()
        self.chunked_losses: ChunkedLosses | None = None
        """Losses of `model` in chunks of tokens; None where it computes them for all tokens at once."""
        self.dropout_seed: int | None = None
        """Seed of the masks of `models.dropout`; None when no layer drops anything."""
        self.step = 0
        """The step whose passes are made."""
        self.edited_ends: tuple[int, int] | None = None
        """Number of tokens at both ends of a prompt that interventions edit; None when no layer edits anything."""
        self.prompt_lengths: Any = None
        """Length of the prompt that each token of the pass belongs to, [B, L]; None when the batch does not have it."""
        self._lengths: Any = None
        self._document_starts: Tensor | None = None
        """Document starts of the rows whose hidden states were returned last."""
        self._micro_batch: int | None = None
        """The micro-batch whose forward pass runs; None outside of a schedule."""
        self._last_header: Sequence[int] = ()
        """The last header that has come to the last part."""
        self._passed: tuple[Tensor | None, Tensor] | None = None
        self._waiting: dict[tuple[int, int], Pass] = {}

    @property
    def _has_values(self) -> bool:
        """True where a pass has a `models.token_context`."""
        return self.edited_ends is not None or (self.dropout_seed is not None and self.model.training)

    @property
    def model(self) -> Any:
        """The chunk that a training stage calls."""
        return self.chunks[self._data_chunk]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of this rank, by its full name."""
        return itertools.chain.from_iterable(chunk.named_parameters() for chunk in self.chunks)

    def train(self) -> None:
        """Set all chunks to training mode."""
        for chunk in self.chunks:
            chunk.train()

    def eval(self) -> None:
        """Set all chunks to evaluation mode."""
        for chunk in self.chunks:
            chunk.eval()

    @property
    def training(self) -> bool:
        """False in an evaluation."""
        return bool(self.model.training)

    # the interface for training stages

    @contextlib.contextmanager
    def adapters_off(self) -> Iterator[None]:
        """While active, on every rank, passes run the model without its adapters; nothing is copied."""
        switched = [adapter for chunk in self.chunks for adapter in adapters(chunk)]
        for adapter in switched:
            adapter.is_enabled = False
        try:
            yield
        finally:
            for adapter in switched:
                adapter.is_enabled = True

    def hidden_states(self, input_ids: Tensor, document_starts: Tensor | None = None) -> tuple[Tensor, list[Any]]:
        """Hidden states [B, L, D] on the last stage; elsewhere zeros, after the activations are sent.

        Args:
            input_ids: [B, L].
            document_starts: for rows of several documents, as `CausalLM.hidden_states` takes it.

        Raises:
            UserError: under sequence parallel, the ranks do not divide L.
        """
        self._check_length(input_ids)
        self.recorder.see_tokens(input_ids, document_starts)
        # outside of a schedule the passes of the other chunks run here too
        before = range(self._data_chunk)
        after = range(self._data_chunk + 1, len(self.chunks))
        in_schedule = self._micro_batch is not None
        for chunk in () if in_schedule else before:
            self._run(chunk, *self._receive())
        assert not (in_schedule and self._passed), "a stage's loss may call hidden_states once"
        received = None
        if not self.is_first:
            received, document_starts = self._receive_as_read(input_ids, document_starts)
        elif self._lengths is not None:
            document_starts = mark_padding(document_starts, self._lengths, input_ids.shape)
        x = received
        if received is None:
            x = self.model.input_form.embed(self.model, input_ids, 0, document_starts)
        if self.is_first and self._has_values:
            document_starts = pack_token_values(document_starts, self._token_values(input_ids, document_starts))
        result = self._run(self._data_chunk, x, document_starts)
        self._passed = received, result
        for chunk in () if in_schedule else after:
            self._run(chunk, *self._receive())
        self._document_starts = document_starts
        if self.is_last:
            return self.model.final_norm(result), []
        return paddle.zeros([*input_ids.shape, self._hidden_size]), []

    def _token_values(self, input_ids: Tensor, document_starts: Tensor | None) -> Tensor:
        if self.edited_ends is not None:
            assert self.prompt_lengths is not None, "the batches of the stage have no prompt lengths"
            return chosen_tokens(shared_tensor_of(self.prompt_lengths), document_starts, self.edited_ends)
        assert self.dropout_seed is not None
        return dropout.token_keys(input_ids, document_starts, self.dropout_seed, self.step)

    def mtp_hidden_states(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """Hidden states [B, L, D] that predict the token after the next one, of a model with a layer for it; zeros
        where the last layers are not.

        Args:
            hidden: returned by `hidden_states`.
            next_ids: the token after each input, [B, L].
        """
        if not self.is_last:
            return paddle.zeros(hidden.shape)
        if self._mesh.tensor is not None:
            # under sequence parallel the last norm has gathered the sequence: layers take shards of it
            hidden = reshard(hidden, self._mesh, self._placements)
        starts, keys = self._without_keys(self._document_starts)
        with token_context.tokens(keys):
            return self.model.mtp_hidden_states(hidden, next_ids, starts)

    def _without_keys(self, marks: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Document starts of a pass, and the keys of its tokens, where layers need them."""
        if self._has_values and marks is not None:
            return unpack_token_values(marks)
        return marks, None

    def _check_length(self, input_ids: Tensor) -> None:
        length = input_ids.shape[1]
        tp = self._mesh.degrees.tp
        if tp > 1 and self._placements[0].is_shard() and length % tp:
            raise UserError(
                f"parallel.sequence_parallel: the stage has made a batch of {length} tokens, which {tp} ranks cannot "
                "share; its collate has to pad to a multiple of context.length_multiple"
            )

    def token_nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability of each target, [N]; zeros where the last layers are not."""
        if not self.is_last:
            return paddle.zeros([targets.shape[0]])
        nll: Tensor = self._losses.token_nll(hidden, targets)
        return nll

    def token_nll_and_entropy(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Negative log-probability of each target, and the entropy of each distribution over the vocabulary, in nats:
        [N] each; zeros where the last layers are not."""
        if not self.is_last:
            return _no_numbers(targets)
        return self._losses.token_nll_and_entropy(hidden, targets)

    def token_nll_and_greedy_match(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Negative log-probability of each target, and 1 where greedy decoding picks the target, else 0: [N] each;
        zeros where the last layers are not."""
        if not self.is_last:
            return _no_numbers(targets)
        return self._losses.token_nll_and_greedy_match(hidden, targets)

    def token_divergence(self, hidden: Tensor, taught: Tensor | None, comparison: Comparison | None) -> Tensor:
        """Divergence of each distribution over the vocabulary from that of a teacher, [N], see
        `CausalLM.token_divergence`; zeros where the last layers are not, and no teacher is."""
        if not self.is_last:
            return paddle.zeros([hidden.shape[0]])
        found: Tensor = self._losses.token_divergence(hidden, taught, comparison)
        return found

    def token_divergence_and_nll(
        self, hidden: Tensor, taught: Tensor | None, targets: Tensor, comparison: Comparison | None
    ) -> tuple[Tensor, Tensor]:
        """`token_divergence` and `token_nll`, [N] each; zeros where the last layers are not."""
        if not self.is_last:
            return _no_numbers(targets)
        return self._losses.token_divergence_and_nll(hidden, taught, targets, comparison)

    @property
    def _losses(self) -> Any:
        if self.chunked_losses is None:
            return self.model
        return self.chunked_losses

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D] to logits [..., V], replicated on every rank; zeros where the last layers are not.

        Under tensor parallel this gathers the logits of all ranks; `token_nll` does not need that.
        """
        if not self.is_last:
            return paddle.zeros([*hidden.shape[:-1], self.model.config.vocab_size])
        logits = self._replicate(self.model.logits(hidden))
        return without_padding(logits, [*logits.shape[:-1], self.model.config.vocab_size])

    def _replicate(self, tensor: Tensor) -> Tensor:
        """The plain tensor, the same on every rank of the tensor parallel group."""
        if not tensor.is_dist():
            return tensor
        replicated = [dist.Replicate()]
        return dtensor_to_local(reshard(tensor, self._mesh, replicated), self._mesh.tensor, replicated)

    def scores(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, D] to the outputs of a score head, [N] in float32, replicated on every rank; zeros where
        the last layers are not."""
        if not self.is_last:
            return paddle.zeros([hidden.shape[0]])
        return self._replicate(self.model.scores(hidden))

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Ids [B, L] to logits [B, L, V]."""
        return self.logits(self.hidden_states(input_ids)[0])

    # the interface for the engine

    def owns_loss_or_inputs(self, chunk: int) -> bool:
        """True where the passes of a chunk start with ids or end with a loss."""
        return (self.is_first or self.is_last) and chunk == self._data_chunk

    def forward(self, action: Action, loss: Callable[[], T] | None, lengths: Any = None) -> T | None:
        """Run a forward pass of the schedule; in training, `backward` follows.

        Args:
            action: the pass.
            loss: calls `hidden_states` once; None for a chunk that owns neither loss nor inputs. In training it returns
                `LossTerms`.
            lengths: of the rows without padding, [B]; None when the batches of the stage do not have them.

        Returns:
            The result of `loss`. It is the loss on the last stage only.
        """
        self._micro_batch = action.micro_batch
        self._passed = None
        self._lengths = lengths if self.needs_padding_mask or self.observers is not None else None
        has_gradient = paddle.is_grad_enabled()
        recorded = self.recorder.in_pass(action.micro_batch if has_gradient else None, lengths)
        # recompute runs layers again during backward passes, among other forward passes: nothing is observed there
        with recorded, observing(self.observers or () if has_gradient else ()):
            if loss is not None:
                terms: T | None = loss()
                assert self._passed is not None, "the stage's loss did not call hidden_states"
            else:
                terms = None
                (received, document_starts) = self._receive()
                self._passed = received, self._run(action.chunk, received, document_starts)
        if has_gradient:
            total = total_of(terms) if terms is not None and self.is_last else None
            self._waiting[action.chunk, action.micro_batch] = Pass(*self._passed, total)
        self._micro_batch = None
        self._passed = None
        self._lengths = None
        return terms

    def backward(self, action: Action, scale: float = 1.0) -> None:
        """Run the backward pass of a forward pass: of `scale` times the loss on the last stage, elsewhere from the
        gradient that the next part sends."""
        waiting = self._waiting.pop((action.chunk, action.micro_batch))
        with self.recorder.in_pass(action.micro_batch):  # recompute runs layers again
            if waiting.total is not None:
                (waiting.total if scale == 1.0 else waiting.total * scale).backward()
            else:
                y = waiting.result
                gradient = self._receive_gradient(y)
                if not y.stop_gradient:  # it has no gradient before the first adapter
                    paddle.autograd.backward([y], [gradient])
        after_backward = self.chunks[action.chunk].after_backward
        if after_backward is not None:
            after_backward()
        if waiting.received is not None:
            assert waiting.received.grad.dtype == waiting.received.dtype, "the previous part expects the dtype it sent"
            self._send_gradient(waiting.received.grad)

    @paddle.no_grad()
    def serve_forward_only(self) -> None:
        """Run every batch that arrives and send the result, outside of a schedule, until the first rank calls
        `send_stop`. Ranks in the middle of a pipeline are in it while those at its ends call `hidden_states`."""
        self.eval()
        while (received := self._receive_or_stop()) is not None:
            self._run(0, *received)
            for chunk in range(1, len(self.chunks)):
                self._run(chunk, *self._receive())
        self.send_stop()
        self.train()

    def send_stop(self) -> None:
        """Make the next rank leave `serve_forward_only`, if it is in the middle of the pipeline."""
        if self._channels is not None and self._mesh.coordinate["pp"] < self._mesh.degrees.pp - 2:
            self._channels.send_header(_STOP)
            collective.others().header_sent(_STOP, 0)

    # one pass through a chunk, and the messages around it

    def _run(self, chunk: int, x: Tensor, document_starts: Tensor | None) -> Tensor:
        """Run the layers of a chunk, and send the result to the next part if there is one."""
        marks = document_starts
        document_starts, keys = self._without_keys(marks)
        for observer in self.observers or ():
            observer.token_mask = None if document_starts is None else document_starts >= 0
        are_marked = self.observers is not None and not self.needs_padding_mask
        with token_context.tokens(keys):
            y, _ = self.chunks[chunk].decode(
                x, document_starts=clear_padding_marks(document_starts) if are_marked else document_starts
            )
        if not self._is_last_part(chunk):
            self._send(y, marks, chunk)
        return y

    def _part(self, chunk: int) -> int:
        return chunk * self._mesh.degrees.pp + self._mesh.coordinate["pp"]

    @property
    def _num_parts(self) -> int:
        return len(self.chunks) * self._mesh.degrees.pp

    def _is_last_part(self, chunk: int) -> bool:
        return edges.target(self._part(chunk), self._num_parts, forward=True) is None

    def _send(self, y: Tensor, document_starts: Tensor | None, chunk: int = 0) -> None:
        """Send activations of a chunk to the next part. Under sequence parallel a rank sends its part of them, but all
        document starts."""
        local = local_value(y).detach()
        length = 0 if document_starts is None else document_starts.shape[1]
        contents: dict[edges.Content, Tensor | None] = {"document_starts": document_starts, "activations": local}
        assert self._channels is not None
        # in the order of `edges`, in which the next rank receives; the header has the shapes of the others
        header = [*local.shape, length, edges.dtype_code(local.dtype)]
        if edges.has_header(self._part(chunk) + 1, self._num_parts, self._micro_batch):
            self._channels.send_header(header)
        collective.others().header_sent(header, chunk)
        for message in edges.messages(True, local.shape, length, with_header=False):
            self._channels.send(contents[message.content], forward=True)

    def _receive_as_read(self, input_ids: Tensor, document_starts: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Receive the input of the last part, as `_receive` does, on its rank, which has read the micro-batch too.

        Args:
            input_ids: [B, L].
            document_starts: of the rows that this rank has read.
        """
        if edges.has_header(self._part(self._data_chunk), self._num_parts, self._micro_batch):
            received, starts = self._receive()
            edges.check_same_batch(received.shape[:2], input_ids.shape)
            return received, starts
        rows, length = input_ids.shape
        is_cut = self._mesh.degrees.tp > 1 and self._placements[0].is_shard()
        # the first rank marks padding, and packs the values of tokens, by the same keys of the recipe
        has_starts = document_starts is not None or self._lengths is not None or self._has_values
        width, _, code = self._last_header[2:]
        local = length // self._mesh.degrees.tp if is_cut else length
        header = [rows, local, width, length if has_starts else 0, code]
        return self._receive_with(collective.others().header(header))

    def _receive(self) -> tuple[Tensor, Tensor | None]:
        received = self._receive_or_stop()
        assert received is not None, "the first rank has sent a stop in the middle of a schedule"
        return received

    def _receive_or_stop(self) -> tuple[Tensor, Tensor | None] | None:
        """Activations of the previous part and the document starts of their rows; None when it has sent a stop."""
        assert self._channels is not None
        header = collective.others().header(self._channels.receive_header())
        if header == _STOP:
            return None
        self._last_header = header
        return self._receive_with(header)

    def _receive_with(self, header: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Activations and document starts of the sizes in a header."""
        assert self._channels is not None
        *shape, length, code = header
        dtype = next(p.dtype for name, p in self.model.named_parameters() if not is_quantised_part(name))
        if code != edges.dtype_code(dtype):  # the sizes in bytes would differ
            raise UserError(
                f"the previous pipeline stage sends activations in {edges.DTYPES[code]}, and this one computes in "
                f"{edges.DTYPES[edges.dtype_code(dtype)]}: a layer of the model has to return the dtype of its input, "
                "so it has to cast back results that it computes in another dtype"
            )
        contents: dict[edges.Content, Tensor] = {}
        for message in edges.messages(True, shape, length, with_header=False):
            kind = "int64" if message.is_int64 else dtype
            contents[message.content] = self._channels.receive(list(message.shape), kind, forward=True)
        x = self._distribute(contents["activations"])
        x.stop_gradient = not paddle.is_grad_enabled()
        return x, contents.get("document_starts")

    def _send_gradient(self, gradient: Tensor) -> None:
        if gradient.is_dist():
            # autograd may leave other placements, such as partial sums over tp: the previous part expects those of its
            # activations
            gradient = reshard(gradient, self._mesh, self._placements)
        assert self._channels is not None
        self._channels.send(local_value(gradient).detach(), forward=False)

    def _receive_gradient(self, y: Tensor) -> Tensor:
        """The gradient of the activations `y` that were sent."""
        assert self._channels is not None
        (message,) = edges.messages(False, local_value(y).shape, 0)
        return self._distribute(self._channels.receive(list(message.shape), y.dtype, forward=False))

    def _distribute(self, local: Tensor) -> Tensor:
        """This rank's shard of activations, as a distributed tensor with the placements between layers."""
        if self._mesh.tensor is None:
            return local
        return dtensor_from_local(local, self._mesh.tensor, self._placements).detach()


def _no_numbers(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of zeros, [N] for targets [N]."""
    none = paddle.zeros([targets.shape[0]])
    return none, none


_STOP = [0] * edges.HEADER_LENGTH
"""Sent instead of a header: no activations follow."""


# metadata of the tokens of a micro-batch, in one int64 tensor [B, L] that is sent along with the activations: document
# starts, a mark for padding, and under dropout the keys of the tokens

_KEYS = 1 << 32
"""Number of keys; they start at -2^31."""


def mark_padding(document_starts: Tensor | None, lengths: Any, shape: Sequence[int]) -> Tensor:
    """Document starts [B, L] with -1 for the padding after the `lengths` [B] of the rows."""
    document_starts = paddle.zeros(shape, dtype="int64") if document_starts is None else document_starts
    is_padding = paddle.arange(shape[1]) >= shared_tensor_of(lengths).unsqueeze(-1)
    return paddle.where(is_padding, paddle.full_like(document_starts, -1), document_starts)


def clear_padding_marks(document_starts: Tensor | None) -> Tensor | None:
    """Document starts without padding marks, for layers that do not need them; None where each row is one document."""
    if document_starts is None or not array_of((document_starts > 0).any()):
        return None
    return document_starts.clip(min=0)


def pack_token_values(document_starts: Tensor | None, keys: Tensor) -> Tensor:
    """Document starts and keys (`models.dropout.token_keys`) in one tensor: (start + 2) 2^32 + key, with 0 instead of
    start + 2 where there are no starts. Starts are at least -1, so start + 2 is at least 1."""
    keys = keys.astype("int64")
    return keys if document_starts is None else (document_starts + 2) * tensor_of(_KEYS) + keys


def unpack_token_values(packed: Tensor) -> tuple[Tensor | None, Tensor]:
    """Document starts (None if there were none) and keys, from the result of `pack_token_values`."""
    half = tensor_of(_KEYS // 2)
    count = tensor_of(_KEYS)
    keys = (packed + half) % count - half
    starts = (packed - keys) // count - 2
    return (None if array_of((starts < -1).all()) else starts), keys.astype("int32")
