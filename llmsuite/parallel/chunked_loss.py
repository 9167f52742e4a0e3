"""The loss in chunks of tokens: where the vocabulary is large, the logits [N, V] are the largest tensors of a step.

Logits of one chunk exist at a time. In the backward pass they are made again, chunk by chunk, which takes one further
product. Where the head is frozen, as under adapters, they are not: then the gradient of a token's loss is a vector
times a number that the backward pass brings, and the vectors [N, D] are made along with the loss, as Liger-Kernel's
fused linear cross-entropy makes them (Hsu et al. 2024, arXiv 2410.10989).

Shapes: N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.models.exact import is_own_code
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.tensor import local_value, reshard
from llmsuite.typing import Tensor

LOSSES = ("token_nll", "token_nll_and_entropy", "token_nll_and_first_choice")
"""The methods of a `CausalLM` that make logits [N, V] of hidden states [N, D], and of these some numbers [N]."""


def chunk_losses(model: Any, num_tokens: int, mesh: Mesh, shards: Sequence[ParameterShard]) -> None:
    """Let a model compute its losses for so many tokens at a time.

    Args:
        model: this rank's part, parallel already.
        num_tokens: of a chunk, at most.
        mesh: this rank's place.
        shards: of its parameters.
    """
    for name in LOSSES:
        model.__dict__[name] = _InChunks(name, model, num_tokens, mesh, shards)


class _InChunks:
    """Computes in place of one of `LOSSES`."""

    def __init__(self, name: str, model: Any, num_tokens: int, mesh: Mesh, shards: Sequence[ParameterShard]):
        self._compute, self._model, self._num_tokens = getattr(model, name), model, num_tokens
        self._mesh, self._shards = mesh, shards
        self.has_one_gradient = name != "token_nll_and_entropy"
        """Whether the first output alone has a gradient: then that of a token is a vector times one number."""

    def __call__(self, hidden: Tensor, targets: Tensor) -> Any:
        """Hidden states [N, D] and targets [N] to [N], or two of them."""
        if hidden.shape[0] <= self._num_tokens:
            return self._compute(hidden, targets)
        trained = [parameter for parameter in self._parameters() if not parameter.stop_gradient]
        with self.whole_head():
            if paddle.is_grad_enabled() and (trained or not hidden.stop_gradient):
                return _Chunks.apply(hidden, *trained, (self, targets))
            return _joined([self.of_chunk(*chunk) for chunk in self.chunks(hidden, targets)])

    def _parameters(self) -> list[Tensor]:
        """Those that the logits are made with."""
        model, head = self._model, self._model.lm_head
        own = [model.model.embed_tokens.weight] if head is None else list(head.parameters())
        if is_own_code(model, "logits", "tied_logits", *LOSSES):
            return own
        known = {id(parameter) for parameter in (*own, *model.model.parameters())}  # its author's may use others
        return own + [parameter for parameter in model.parameters() if id(parameter) not in known]

    @contextlib.contextmanager
    def whole_head(self) -> Iterator[None]:
        """While active, sharding stage 3 keeps the head whole: each chunk would gather it, and data ranks differ in how
        many chunks they have."""
        own = {id(parameter) for parameter in self._parameters()}
        held = [shard for shard in self._shards if id(shard.parameter) in own]
        for shard in held:
            shard.hold()
        try:
            yield
        finally:
            for shard in held:
                shard.let_go()

    def chunks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The same tokens of several tensors [N, ...], chunk after chunk."""
        for first in range(0, tensors[0].shape[0], self._num_tokens):
            yield tuple(tensor[first : first + self._num_tokens] for tensor in tensors)

    def of_chunk(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """The outputs of one chunk."""
        found = self._compute(hidden, targets)
        return found if isinstance(found, tuple) else (found,)

    def with_gradient(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A copy of the hidden states of one chunk that may have a gradient, and the outputs, made of it."""
        with paddle.enable_grad():
            x = hidden.detach()
            x.stop_gradient = False
            return x, self.of_chunk(x, targets)

    def rows(self, gradients: Sequence[Tensor]) -> Tensor:
        """The gradient [N, D] of all chunks, from those of each; those that are a sum over ranks are summed."""
        whole = [dist.Replicate()]
        return paddle.concat([reshard(one, self._mesh, whole) if one.is_dist() else one for one in gradients])


def _joined(chunks: Sequence[Sequence[Tensor]]) -> Any:
    """The outputs of all chunks, as the loss as a whole has them."""
    outputs = tuple(paddle.concat(list(parts)) for parts in zip(*chunks, strict=True))
    return outputs if len(outputs) > 1 else outputs[0]


class _Chunks(PyLayer):
    """Losses of hidden states and of the trained parameters of the head. What is no tensor, and the targets, come in a
    tuple, which PyLayer does not look into."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *rest: Any) -> Any:
        *trained, (losses, targets) = rest
        ctx.losses, ctx.wants_hidden, ctx.dtype = losses, not hidden.stop_gradient, hidden.dtype
        ctx.vectors = None
        if trained or not losses.has_one_gradient:
            ctx.targets = targets
            ctx.save_for_backward(hidden, *trained)
            return _joined([losses.of_chunk(*chunk) for chunk in losses.chunks(hidden, targets)])
        outputs, vectors = [], []
        for chunk in losses.chunks(hidden, targets):
            x, found = losses.with_gradient(*chunk)
            vectors += paddle.grad([found[0]], [x], [paddle.ones_like(found[0])])
            outputs.append([output.detach() for output in found])
        ctx.vectors = losses.rows(vectors)
        return _joined(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.vectors is not None:
            with ctx.losses.whole_head():  # as often as a data rank without chunks
                return ((ctx.vectors.astype("float32") * gradients[0].unsqueeze(-1)).astype(ctx.dtype),)
        losses, (hidden, *trained) = ctx.losses, ctx.saved_tensor()
        of_hidden, sums = list[Tensor](), [_Sum(parameter) for parameter in trained]
        with losses.whole_head():
            for chunk, targets, *given in losses.chunks(hidden, ctx.targets, *gradients):
                x, outputs = losses.with_gradient(chunk, targets)
                pairs = [(output, g) for output, g in zip(outputs, given, strict=True) if not output.stop_gradient]
                given = [g for _, g in pairs]
                found = paddle.grad([o for o, _ in pairs], [x, *trained], given, allow_unused=True)
                of_hidden.append(found.pop(0))
                for total in sums:
                    if (gradient := found.pop(0)) is not None:
                        total.add(gradient)
                    del gradient
        return (losses.rows(of_hidden) if ctx.wants_hidden else None, *(total.gradient() for total in sums))


class _Sum:
    """The sum of a parameter's gradients of all chunks, on this rank; of 16-bit ones in float32."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        self._first: Tensor | None = None
        """That of the first chunk: a mesh and placements that are taken from a tensor end with it (Paddle 3.3.1)."""

    def add(self, gradient: Tensor) -> None:
        """One more."""
        local = local_value(gradient)
        wide = local if local.dtype == paddle.float32 else local.astype("float32")
        if self._first is None:
            self._first, self._total = gradient, wide
        else:
            self._total.add_(wide)

    def gradient(self) -> Tensor:
        """The sum, with the dtype and the placements that the gradients had: a partial sum stays one."""
        if self._first is None:  # nothing is made of it
            return paddle.zeros_like(self._parameter)
        first, total = self._first, self._total
        narrow = total if total.dtype == first.dtype else total.astype(first.dtype)
        return dtensor_from_local(narrow, first.process_mesh, first.placements) if first.is_dist() else narrow
