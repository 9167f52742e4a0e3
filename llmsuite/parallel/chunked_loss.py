"""The loss in chunks of tokens: where the vocabulary is large, the logits [N, V] are the largest tensors of a step.

Only the logits of one chunk exist at a time. The backward pass recomputes them, chunk by chunk, which costs one more
product. Where the head is frozen, as under adapters, it does not: then the gradient of a token's loss is a vector times
a number that the backward pass brings, and the vectors [N, D] are computed with the loss, as Liger-Kernel's fused
linear cross-entropy does (Hsu et al. 2024, arXiv 2410.10989).

Shapes: N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.base.typing import Tensor
from llmsuite.models.divergence import Comparison
from llmsuite.models.exact import is_own_code
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.tensor import local_value, reshard

LOSSES = ("token_nll", "token_nll_and_entropy", "token_nll_and_greedy_match")
"""Methods of a `CausalLM` that turn hidden states [N, D] into logits [N, V], and those into numbers [N]."""
DIVERGENCES = ("token_divergence", "token_divergence_and_nll")
"""Such methods that also take hidden states of a teacher."""


class ChunkedLosses:
    """The losses of a model, which computes them for some of the tokens at a time."""

    def __init__(self, model: Any, num_tokens: int, mesh: Mesh, shards: Sequence[ParameterShard]):
        """
        Args:
            model: this rank's part, already parallel.
            num_tokens: of a chunk, at most.
            mesh: of the run, with this rank's coordinates.
            shards: of its parameters.
        """
        self._settings = model, num_tokens, mesh, shards
        computed: dict[str, Callable[..., Any]] = {
            "token_nll": model.token_nll,
            "token_nll_and_entropy": model.token_nll_and_entropy,
            "token_nll_and_greedy_match": model.token_nll_and_greedy_match,
        }
        self._losses = {name: _InChunks(name, compute, *self._settings) for name, compute in computed.items()}

    def token_nll(self, hidden: Tensor, targets: Tensor) -> Any:
        """`CausalLM.token_nll`, [N]."""
        return self._losses["token_nll"](hidden, targets)

    def token_nll_and_entropy(self, hidden: Tensor, targets: Tensor) -> Any:
        """`CausalLM.token_nll_and_entropy`, [N] each."""
        return self._losses["token_nll_and_entropy"](hidden, targets)

    def token_nll_and_greedy_match(self, hidden: Tensor, targets: Tensor) -> Any:
        """`CausalLM.token_nll_and_greedy_match`, [N] each."""
        return self._losses["token_nll_and_greedy_match"](hidden, targets)

    def token_divergence(self, hidden: Tensor, taught: Tensor, comparison: Comparison) -> Any:
        """`CausalLM.token_divergence`, [N]."""
        return self._compared("token_divergence", comparison)(hidden, taught)

    def token_divergence_and_nll(self, hidden: Tensor, taught: Tensor, targets: Tensor, comparison: Comparison) -> Any:
        """`CausalLM.token_divergence_and_nll`, [N] each."""
        return self._compared("token_divergence_and_nll", comparison)(hidden, taught, targets)

    def _compared(self, name: str, comparison: Comparison) -> _InChunks:
        compute = functools.partial(getattr(self._settings[0], name), comparison=comparison)
        return _InChunks(name, compute, *self._settings)


class _InChunks:
    """One of `LOSSES` or `DIVERGENCES`, in chunks."""

    def __init__(
        self,
        name: str,
        compute: Callable[..., Any],
        model: Any,
        num_tokens: int,
        mesh: Mesh,
        shards: Sequence[ParameterShard],
    ):
        self._compute = compute
        self._model = model
        self._num_tokens = num_tokens
        self._mesh = mesh
        self._shards = shards
        self.has_one_gradient = name not in ("token_nll_and_entropy", "token_divergence_and_nll")
        """True where only the first output has a gradient: then that of a token is a vector times one number."""

    def __call__(self, hidden: Tensor, *others: Tensor) -> Any:
        """Hidden states [N, D] and other tensors of the tokens, such as targets [N], to [N], or two of them."""
        if hidden.shape[0] <= self._num_tokens:
            return self._compute(hidden, *others)
        trained = [parameter for parameter in self._parameters() if not parameter.stop_gradient]
        with self.whole_head():
            if paddle.is_grad_enabled() and (trained or not hidden.stop_gradient):
                return _Chunks.apply(hidden, *trained, (self, others))
            return _joined([self.of_chunk(*chunk) for chunk in self.chunks(hidden, *others)])

    def _parameters(self) -> list[Tensor]:
        """Parameters that the logits are made with."""
        model = self._model
        head = self._model.lm_head
        own = [model.model.embed_tokens.weight] if head is None else list(head.parameters())
        if is_own_code(model, "logits", "tied_logits", *LOSSES, *DIVERGENCES):
            return own
        # code from elsewhere may use other parameters
        known = {id(parameter) for parameter in (*own, *model.model.parameters())}
        return own + [parameter for parameter in model.parameters() if id(parameter) not in known]

    @contextlib.contextmanager
    def whole_head(self) -> Iterator[None]:
        """While active, sharding stage 3 keeps the head gathered. Otherwise each chunk would gather it, and data ranks
        with different numbers of chunks would make different numbers of calls."""
        own = {id(parameter) for parameter in self._parameters()}
        held = [shard for shard in self._shards if id(shard.parameter) in own]
        for shard in held:
            shard.keep_gathered()
        try:
            yield
        finally:
            for shard in held:
                shard.release()

    def chunks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Slices of several tensors [N, ...] with the same tokens, chunk after chunk."""
        for first in range(0, tensors[0].shape[0], self._num_tokens):
            yield tuple(tensor[first : first + self._num_tokens] for tensor in tensors)

    def of_chunk(self, hidden: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """The outputs of one chunk."""
        found = self._compute(hidden, *others)
        return found if isinstance(found, tuple) else (found,)

    def with_gradient(self, hidden: Tensor, *others: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Copy of the hidden states of one chunk that can have a gradient, and the outputs computed from it."""
        with paddle.enable_grad():
            x = hidden.detach()
            x.stop_gradient = False
            return x, self.of_chunk(x, *others)

    def rows(self, gradients: Sequence[Tensor]) -> Tensor:
        """Gradient [N, D] of all chunks, from the gradient of each chunk; partial sums over tp are reduced."""
        replicated = [dist.Replicate()]
        parts = []
        for gradient in gradients:
            # partial: each rank of the tensor parallel group has the part from its slice of the vocabulary
            parts.append(reshard(gradient, self._mesh, replicated) if gradient.is_dist() else gradient)
        return paddle.concat(parts)


def _joined(chunks: Sequence[Sequence[Tensor]]) -> Any:
    """The outputs of all chunks, concatenated over the tokens."""
    outputs = tuple(paddle.concat(list(parts)) for parts in zip(*chunks, strict=True))
    return outputs if len(outputs) > 1 else outputs[0]


class _Chunks(PyLayer):
    """Losses with gradients to hidden states and to the trained parameters of the head. Arguments without gradients
    come in a tuple, which PyLayer does not look into."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *rest: Any) -> Any:
        *trained, (losses, others) = rest
        ctx.losses = losses
        ctx.needs_hidden_gradient = not hidden.stop_gradient
        ctx.dtype = hidden.dtype
        ctx.vectors = None
        if trained or not losses.has_one_gradient:
            ctx.others = others
            ctx.save_for_backward(hidden, *trained)
            return _joined([losses.of_chunk(*chunk) for chunk in losses.chunks(hidden, *others)])
        outputs = []
        vectors = []
        for chunk in losses.chunks(hidden, *others):
            x, found = losses.with_gradient(*chunk)
            vectors += paddle.grad([found[0]], [x], [paddle.ones_like(found[0])])
            outputs.append([output.detach() for output in found])
        ctx.vectors = losses.rows(vectors)
        return _joined(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.vectors is not None:
            # gathers the head as often as a data rank without chunks does: all ranks make the same calls
            with ctx.losses.whole_head():
                return ((ctx.vectors.astype("float32") * gradients[0].unsqueeze(-1)).astype(ctx.dtype),)
        losses = ctx.losses
        (hidden, *trained) = ctx.saved_tensor()
        hidden_gradients = list[Tensor]()
        sums = [_Sum(parameter) for parameter in trained]
        with losses.whole_head():
            for chunk, *rest in losses.chunks(hidden, *ctx.others, *gradients):
                others = rest[: len(ctx.others)]
                given = rest[len(ctx.others) :]
                x, outputs = losses.with_gradient(chunk, *others)
                pairs = [(output, g) for output, g in zip(outputs, given, strict=True) if not output.stop_gradient]
                given = [g for _, g in pairs]
                found = paddle.grad([o for o, _ in pairs], [x, *trained], given, allow_unused=True)
                hidden_gradients.append(found.pop(0))
                for total in sums:
                    gradient = found.pop(0)
                    if gradient is not None:
                        total.add(gradient)
                    del gradient  # frees it before the next one is added
        hidden_gradient = losses.rows(hidden_gradients) if ctx.needs_hidden_gradient else None
        return hidden_gradient, *(total.gradient() for total in sums)


class _Sum:
    """Sum of a parameter's gradients over all chunks, on this rank. 16-bit gradients are summed in float32, or small
    chunks would be rounded away."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        self._first: Tensor | None = None
        """Gradient of the first chunk, kept because a mesh and placements taken from a tensor die with it (Paddle
        3.3.1)."""

    def add(self, gradient: Tensor) -> None:
        """Add the gradient of one more chunk."""
        local = local_value(gradient)
        wide = local if local.dtype == paddle.float32 else local.astype("float32")
        if self._first is None:
            self._first = gradient
            self._total = wide
        else:
            self._total.add_(wide)

    def gradient(self) -> Tensor:
        """The sum, with the dtype and the placements that the gradients had: a partial sum stays one."""
        if self._first is None:  # no output depends on the parameter
            return paddle.zeros_like(self._parameter)
        first = self._first
        total = self._total
        cast = total if total.dtype == first.dtype else total.astype(first.dtype)
        return dtensor_from_local(cast, first.process_mesh, first.placements) if first.is_dist() else cast
