"""Linear layers that multiply by a device's own kernels, where those are not Paddle's.

`use_linear_ops` chooses the kernel of each `models.linear.Linear`, and the functions by which other layers multiply
(`models.linear.WithMatmul`, `WithLinear`).

Shapes: I inputs and O outputs of a matrix, N rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.autograd import PyLayer

from llmsuite.base.typing import Tensor
from llmsuite.devices.matmul_ops import MatmulOps
from llmsuite.devices.ops import Ops, identity
from llmsuite.models.blocks import CausalLM, TiedHead, apply_linears
from llmsuite.models.exact import has_hooks
from llmsuite.models.linear import Linear, WithLinear, WithMatmul, add_bias, adopt_linears, is_matrix, is_plain_linear
from llmsuite.models.logit_ops import LogitOps
from llmsuite.models.lora_matmul import LowRankLayer, lora_matmul


class RankLayout:
    """Layout of a product over ranks: methods turn a global tensor into this rank's shard, or a shard into a global
    tensor. This one is for one card, whose shard is the full tensor."""

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's shard of a matrix."""
        return tensor

    def input(self, x: Tensor) -> Tensor:
        """This rank's shard of x, as the product needs it."""
        return x

    def output(self, y: Tensor) -> Tensor:
        """The output, from this rank's shard of it."""
        return y

    def output_gradient(self, gradient: Tensor) -> Tensor:
        """This rank's shard of the gradient of the output."""
        return gradient

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of x, from this rank's contribution."""
        return gradient

    def matrix_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of the matrix, from this rank's contribution."""
        return gradient


class LinearOps:
    """Replacement of `paddle.matmul` by `MatmulOps.matmul` of inputs that `MatmulOps.round_activation` has
    rounded."""

    def __init__(self, ops: Ops):
        self.ops = ops
        self.matmuls = ops.matmuls

    def layout(self, x: Tensor, matrix: Tensor, transpose_y: bool) -> RankLayout:
        """Layout over ranks of x times a matrix; all matrices of one call of `matmul_many` share it."""
        return RankLayout()

    def __call__(self, x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
        """Product of x [..., I] and a matrix y [I, O] ([O, I] with `transpose_y`), [..., O].

        With `transpose_x` it is x^T y of x [N, I] and y [N, O], [I, O], as the gradient of a matrix needs it: for
        plain tensors, and without a gradient itself.
        """
        if transpose_x:
            return self.matmuls.matmul(x, y, True, transpose_y)
        return self.matmul_many(x, [y], transpose_y)[0]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., I] W + bias, [..., O], as `devices.matmul_ops.linear`."""
        return add_bias(self(x, weight), bias)

    def matmul_many(
        self, x: Tensor, matrices: Sequence[Tensor], transpose_y: bool = False, round_outputs: bool = False
    ) -> list[Tensor]:
        """Products of x [..., I] with several matrices, [..., O] each; x is saved once for all their gradients.

        With `round_outputs` the outputs and their gradients are rounded as `MatmulOps.round_activation` does. An x that
        is already rounded is used unchanged, and its gradient is rounded too.
        """
        if not paddle.in_dynamic_mode():
            return [self.matmul_in_program(x, matrix, transpose_y, round_outputs) for matrix in matrices]
        if not paddle.is_grad_enabled() or all(t.stop_gradient for t in (x, *matrices)):
            layout = self.layout(x, matrices[0], transpose_y)
            rounded = self.matmuls.round_activation(layout.input(x))
            pairs = ((rounded, layout.local(matrix)) for matrix in matrices)
            return [layout.output(self.matmuls.sum_of_products([pair], transpose_y, round_outputs)) for pair in pairs]
        return list(_Products.apply(x, *matrices, (self, transpose_y, round_outputs)))

    def matmul_in_program(self, x: Tensor, matrix: Tensor, transpose_y: bool, round_output: bool = False) -> Tensor:
        """Product of x [..., I] and a matrix while a static program is traced, whose backward pass runs no Python."""
        assert self.matmuls.program_matmul is not None, "refused before the run"
        return self.matmuls.program_matmul(x, matrix, transpose_y, round_output)

    def apply_layers(self, layers: Sequence[nn.Layer], x: Tensor, then: nn.Layer | None = None) -> list[Tensor]:
        """Outputs of linear layers that share the input x, as `blocks.apply_linears`, in one operation if possible."""
        linear: list[Any] = list(layers)
        is_supported = all(is_matrix(layer) or is_low_rank(layer) for layer in linear)
        if not is_supported or any(layer._forward_pre_hooks for layer in linear):
            return [layer(x) for layer in layers]
        round_outputs = self.matmuls.rounds_outputs and can_round_outputs(layers, then)
        if all(is_matrix(layer) for layer in linear):
            weights = [layer.weight for layer in linear]
            return finish_linears(linear, x, self.matmul_many(x, weights, round_outputs=round_outputs))
        if not paddle.in_dynamic_mode() or x.is_dist() or not all(_has_complete_sum(layer) for layer in linear):
            return [self._apply_alone(layer, x, round_outputs) for layer in linear]
        parts = [(layer.weight, layer.factors() if is_low_rank(layer) else None) for layer in linear]
        return finish_linears(linear, x, lora_matmul(self.matmuls, x, parts, round_outputs))

    def apply_low_rank(self, layer: Any, x: Tensor) -> Tensor:
        """The output of a linear layer with a low-rank adapter and nothing more, [..., O] of x [..., I]."""
        return self.apply_layers([layer], x)[0]

    def _apply_alone(self, layer: Any, x: Tensor, round_output: bool) -> Tensor:
        """The output of one layer alone, rounded as in one operation with others: in programs, and over ranks."""
        if is_matrix(layer):
            (product,) = self.matmul_many(x, [layer.weight], round_outputs=round_output)
            return finish_linears([layer], x, [product])[0]
        # in float32, so that the gradient of x is rounded once, after all its terms are added up
        wide = x if x.dtype == paddle.float32 else x.astype("float32")
        y: Tensor = layer.multiply(wide)
        return y.astype("bfloat16") if round_output else y


def can_round_outputs(layers: Sequence[Any], then: nn.Layer | None) -> bool:
    """True if the outputs of linear layers may be rounded where they are computed: the layer `then`, whose input is
    computed from them, rounds its input anyway, nothing is added to them, and no hook reads them."""
    if then is None or then._forward_pre_hooks or then._forward_post_hooks:
        return False
    if not is_matrix(then) and not is_low_rank(then):
        return False
    return all(layer.bias is None and not layer._forward_post_hooks for layer in layers)


def is_low_rank(layer: Any) -> bool:
    """True if a layer is a linear one with a low-rank adapter (`LoraLinear` of the adapters) and nothing more."""
    return isinstance(layer, LowRankLayer) and not has_hooks(layer) and layer.is_low_rank()


def _has_complete_sum(layer: Any) -> bool:
    """True if the sums of a layer are complete on this rank."""
    return is_matrix(layer) or (layer.reduce_partial_sum is identity and not layer.weight.is_dist())


def finish_linears(layers: Sequence[Any], x: Tensor, products: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of linear layers whose products were computed without calling them: add their biases and call their
    forward hooks."""
    outputs = []
    for layer, product in zip(layers, products, strict=True):
        y = product if layer.bias is None else product + layer.bias
        for hook in layer._forward_post_hooks.values():
            changed = hook(layer, (x,), y)
            y = y if changed is None else changed
        outputs.append(y)
    return outputs


class _Products(PyLayer):
    """x W for several W. Arguments that are no tensors come in a tuple, which PyLayer does not inspect."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *matrices, (linear_ops, transpose_y, round_outputs) = rest
        ctx.layout = layout = linear_ops.layout(x, matrices[0], transpose_y)
        ctx.matmuls = matmuls = linear_ops.matmuls
        ctx.transpose_y = transpose_y
        ctx.is_x_rounded = x.dtype != paddle.float32
        ctx.needs_x_grad = not x.stop_gradient
        ctx.needs_grads = [not matrix.stop_gradient for matrix in matrices]
        rounded = matmuls.round_activation(layout.input(x))
        # the parameters themselves: under sharding stage 3 they have other memory by the time of the backward pass
        ctx.save_for_backward(*matrices, *([rounded] if any(ctx.needs_grads) else []))
        pairs = ((rounded, layout.local(matrix)) for matrix in matrices)
        return tuple(layout.output(matmuls.sum_of_products([p], transpose_y, round_outputs)) for p in pairs)

    @staticmethod
    @paddle.no_grad()
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layout = ctx.layout
        matmuls = ctx.matmuls
        transpose_y = ctx.transpose_y
        saved = ctx.saved_tensor()
        matrices = saved[: len(ctx.needs_grads)]
        saved_x = saved[len(ctx.needs_grads) :]
        pairs = []
        matrix_grads = []
        for matrix, needs_grad, gradient in zip(matrices, ctx.needs_grads, gradients, strict=True):
            rounded = matmuls.round_activation(layout.output_gradient(gradient))
            pairs.append((rounded, layout.local(matrix)))
            matrix_grad = None
            if needs_grad:
                left, right = (part.reshape([-1, part.shape[-1]]) for part in (saved_x[0], rounded))
                if transpose_y:
                    left, right = right, left
                matrix_grad = layout.matrix_gradient(matmuls.matmul(left, right, True, False))
            matrix_grads.append(matrix_grad)
        if not ctx.needs_x_grad:
            return (None, *matrix_grads)
        x_grad = matmuls.sum_of_products(pairs, not transpose_y, ctx.is_x_rounded)
        return (layout.input_gradient(x_grad), *matrix_grads)


class _Nll(PyLayer):
    """`cross_entropy` of x W. Arguments that are no tensors, and the targets, come in a tuple, which PyLayer does not
    inspect.

    One operation: between two, Paddle would cast the gradient of float32 logits back to float32 (3.3.1).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, how: tuple[MatmulOps, bool, Tensor]) -> Tensor:
        ctx.matmuls, ctx.transpose_y, targets = how
        ctx.is_x_rounded = x.dtype != paddle.float32
        ctx.needs_x_grad = not x.stop_gradient
        rounded = ctx.matmuls.round_activation(x)
        ctx.save_for_backward(matrix, *([] if matrix.stop_gradient else [rounded]))
        logits = ctx.matmuls.matmul(rounded, matrix, False, ctx.transpose_y)
        nll, ctx.logits_gradient = ctx.matmuls.rounded_grad_cross_entropy(logits, targets)
        return nll

    @staticmethod
    @paddle.no_grad()
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        matmuls = ctx.matmuls
        transpose_y = ctx.transpose_y
        (matrix, *saved_x) = ctx.saved_tensor()
        logits_grad = ctx.logits_gradient(gradient)
        ctx.logits_gradient = None  # it holds the logits: their memory is freed together with `logits_grad`
        matrix_grad = None
        if saved_x:
            left = saved_x[0]
            right = logits_grad
            if transpose_y:
                left, right = right, left
            matrix_grad = matmuls.matmul(left, right, True, False)
        if not ctx.needs_x_grad:
            return None, matrix_grad
        return matmuls.sum_of_products([(logits_grad, matrix)], not transpose_y, ctx.is_x_rounded), matrix_grad


class FusedNllOps(LogitOps):
    """`LogitOps` of a device that computes the loss of logits that are a plain product, and that nothing else reads,
    in one operation with the product."""

    def nll_of_head(self, model: Any, hidden: Tensor, targets: Tensor) -> Tensor | None:
        head = model.lm_head
        matrix = model.model.embed_tokens.weight if head is None else head.weight
        has_gradient = paddle.is_grad_enabled() and not (hidden.stop_gradient and matrix.stop_gradient)
        is_local = paddle.in_dynamic_mode() and not hidden.is_dist() and not matrix.is_dist()
        if not _is_plain_product(model) or not has_gradient or not is_local or 0 in hidden.shape:
            return None
        nll: Tensor = _Nll.apply(hidden, matrix, (self.ops.matmuls, head is None, targets))
        return nll


def _is_plain_product(model: Any) -> bool:
    """True if the logits of a model are nothing but the product with the matrix of its head."""
    head = model.lm_head
    if model.score is not None:
        return False
    if head is None:
        return type(model.tied_head) is TiedHead  # not one that gathers a sharded matrix first
    hooks = head._forward_pre_hooks or head._forward_post_hooks
    return is_matrix(head) and head.bias is None and not hooks


def use_linear_ops(model: nn.Layer, linear_ops: LinearOps, together: bool = True) -> None:
    """Let the linear layers of a model, its adapters, experts and head multiply by `linear_ops`; with `together`,
    layers that share an input do so in one operation."""
    adopt_linears(model)
    # one for all layers: compiled layers have to be alike
    kernel = linear_ops.linear
    low_rank_kernel = linear_ops.apply_low_rank
    for module in model.sublayers(include_self=True):
        if isinstance(module, Linear) and is_plain_linear(module):
            module.kernel = kernel
        if isinstance(module, LowRankLayer):
            module.low_rank_kernel = low_rank_kernel
        if isinstance(module, WithMatmul):
            module.use_matmul(linear_ops)
        if isinstance(module, WithLinear):
            module.use_linear(kernel)
        if together and vars(module).get("apply_linears") is apply_linears:
            module.apply_linears = linear_ops.apply_layers
    if isinstance(model, CausalLM):
        if type(model.tied_head) is TiedHead:
            model.tied_head = TiedHead(linear_ops)
        if linear_ops.matmuls.rounded_grad_cross_entropy is not None and _has_plain_nll(model, linear_ops.ops):
            model.logit_ops = FusedNllOps(linear_ops.ops)


def _has_plain_nll(model: CausalLM, ops: Ops) -> bool:
    """True if a model computes its loss as `CausalLM` does, with the loss of these operations: its family has no logits
    of its own, such as scaled ones."""
    kind = type(model)
    return (
        kind.token_nll is CausalLM.token_nll
        and kind.logits is CausalLM.logits
        and kind.tied_logits is CausalLM.tied_logits
        and type(model.logit_ops) is LogitOps
        and model.logit_ops.ops.cross_entropy is ops.cross_entropy
    )
