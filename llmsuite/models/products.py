"""Products of activations with matrices in the form that a device has for them, where that is not Paddle's own.

Layers multiply by their attributes `matmul` and `linear`, which are those of `llmsuite.devices.ops` until
`use_products` puts others there.

Shapes: I inputs and O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.autograd import PyLayer

from llmsuite.devices.ops import Ops, linear, matmul, sum_of_products
from llmsuite.models.adapter import identity
from llmsuite.models.blocks import CausalLM
from llmsuite.models.blocks import products as plain_products
from llmsuite.models.exact import is_plain
from llmsuite.models.lora_products import lora_products
from llmsuite.typing import Tensor


class Place:
    """How ranks compute a product together: methods turn a tensor of the model into this rank's part, or a part into a
    tensor of the model. This one is for one card, whose part is the whole."""

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a matrix."""
        return tensor

    def input(self, x: Tensor) -> Tensor:
        """This rank's part of x, as the product needs it."""
        return x

    def output(self, y: Tensor) -> Tensor:
        """The output, from this rank's part of it."""
        return y

    def output_gradient(self, gradient: Tensor) -> Tensor:
        """This rank's part of the gradient of the output."""
        return gradient

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of x, from what this rank adds to it."""
        return gradient

    def matrix_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of the matrix, from what this rank adds to it."""
        return gradient


class Products:
    """Multiplies in the place of `paddle.matmul`, by `Ops.matmul` and `Ops.operand`."""

    def __init__(self, ops: Ops):
        self.ops = ops

    def place(self, x: Tensor, matrix: Tensor, transpose_y: bool) -> Place:
        """How ranks compute x times a matrix; the same for all matrices that x is multiplied with at once."""
        return Place()

    def __call__(self, x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
        """x [..., I] times a matrix y [I, O], or with `transpose_y` [O, I], to [..., O].

        With `transpose_x`, x [N, I] and y [N, O] to [I, O], as for the gradient of a matrix: takes plain tensors, and
        has no gradient itself.
        """
        if transpose_x:
            return self.ops.matmul(x, y, True, transpose_y)
        return self.several(x, [y], transpose_y)[0]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `devices.ops.linear`."""
        y = self(x, weight)
        return y if bias is None else y + bias

    def several(
        self, x: Tensor, matrices: Sequence[Tensor], transpose_y: bool = False, gives_operands: bool = False
    ) -> list[Tensor]:
        """The products of x with several matrices; what is kept of x for their gradients is kept once.

        With `gives_operands` they are rounded as `Ops.operand` does, and so are their gradients. An x that is rounded
        already is taken as it is, and its gradient is rounded too.
        """
        if not paddle.in_dynamic_mode():
            return [self.in_program(x, matrix, transpose_y, gives_operands) for matrix in matrices]
        if not paddle.is_grad_enabled() or all(t.stop_gradient for t in (x, *matrices)):
            place = self.place(x, matrices[0], transpose_y)
            operand = self.ops.operand(place.input(x))
            pairs = ((operand, place.local(matrix)) for matrix in matrices)
            return [place.output(sum_of_products(self.ops, [pair], transpose_y, gives_operands)) for pair in pairs]
        return list(_Products.apply(x, *matrices, (self, transpose_y, gives_operands)))

    def in_program(self, x: Tensor, matrix: Tensor, transpose_y: bool, gives_operand: bool = False) -> Tensor:
        """The same while a program is made, whose backward pass runs no Python."""
        assert self.ops.program_matmul is not None, "refused before the run"
        return self.ops.program_matmul(x, matrix, transpose_y, gives_operand)

    def of_layers(self, layers: Sequence[nn.Layer], x: Tensor, then: nn.Layer | None = None) -> list[Tensor]:
        """As `blocks.products`."""
        linear: list[Any] = list(layers)
        is_known = all(type(layer) is nn.Linear or is_low_rank(layer) for layer in linear)
        if not is_known or any(layer._forward_pre_hooks for layer in linear):
            return [layer(x) for layer in layers]
        gives = self.ops.operand_matmul is not None and gives_operands(layers, then)
        if all(type(layer) is nn.Linear for layer in linear):
            return finish(linear, x, self.several(x, [layer.weight for layer in linear], gives_operands=gives))
        if not paddle.in_dynamic_mode() or x.is_dist() or not all(_sums_alone(layer) for layer in linear):
            return [self._apart(layer, x, gives) for layer in linear]
        parts = [(layer.weight, layer.factors() if is_low_rank(layer) else None) for layer in linear]
        return finish(linear, x, lora_products(self.ops, x, parts, gives))

    def _apart(self, layer: Any, x: Tensor, gives_operand: bool) -> Tensor:
        """The output of one layer by itself, rounded as in one operation with others: in programs, and over ranks."""
        if type(layer) is nn.Linear:
            (product,) = self.several(x, [layer.weight], gives_operands=gives_operand)
            return finish([layer], x, [product])[0]
        wide = x if x.dtype == paddle.float32 else x.astype("float32")  # its gradient is rounded when it is complete
        y: Tensor = type(layer).forward(layer, wide)
        return y.astype("bfloat16") if gives_operand else y


def gives_operands(layers: Sequence[Any], then: nn.Layer | None) -> bool:
    """Whether the outputs of linear layers may be rounded to operands: the layer `then`, whose input is made of them,
    rounds what it takes anyway, nothing is added to them, and no hook sees them."""
    if then is None or then._forward_pre_hooks or then._forward_post_hooks:
        return False
    if type(then) is not nn.Linear and not is_low_rank(then):
        return False
    return all(layer.bias is None and not layer._forward_post_hooks for layer in layers)


def is_low_rank(layer: Any) -> bool:
    """Whether a layer is a linear one with a low-rank adapter (`lora_layers.LoraLinear`) and nothing more."""
    is_plain = getattr(layer, "is_low_rank", None)
    return is_plain is not None and not layer._forward_pre_hooks and not layer._forward_post_hooks and is_plain()


def _sums_alone(layer: Any) -> bool:
    """Whether the sums of a layer are complete on this rank."""
    return type(layer) is nn.Linear or (layer.complete_sum is identity and not layer.weight.is_dist())


def finish(layers: Sequence[Any], x: Tensor, products: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of linear layers whose products were computed without calling them: adds their biases, and calls
    their forward hooks."""
    found = []
    for layer, product in zip(layers, products, strict=True):
        y = product if layer.bias is None else product + layer.bias
        for hook in layer._forward_post_hooks.values():
            changed = hook(layer, (x,), y)
            y = y if changed is None else changed
        found.append(y)
    return found


class _Products(PyLayer):
    """x W for several W. What is no tensor comes in a tuple, which PyLayer does not look into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *matrices, (products, transpose_y, gives_operands) = rest
        ctx.place = place = products.place(x, matrices[0], transpose_y)
        ctx.ops, ctx.transpose_y, ctx.takes_operand = products.ops, transpose_y, x.dtype != paddle.float32
        ctx.wants_x, ctx.wanted = not x.stop_gradient, [not matrix.stop_gradient for matrix in matrices]
        kept = products.ops.operand(place.input(x))
        # the parameters themselves: under sharding stage 3 they have other memory by the time of the backward pass
        ctx.save_for_backward(*matrices, *([kept] if any(ctx.wanted) else []))
        pairs = ((kept, place.local(matrix)) for matrix in matrices)
        return tuple(place.output(sum_of_products(ctx.ops, [p], transpose_y, gives_operands)) for p in pairs)

    @staticmethod
    @paddle.no_grad()
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        place, ops, transpose_y = ctx.place, ctx.ops, ctx.transpose_y
        saved = ctx.saved_tensor()
        matrices, kept = saved[: len(ctx.wanted)], saved[len(ctx.wanted) :]
        pairs, of_matrices = [], []
        for matrix, wanted, gradient in zip(matrices, ctx.wanted, gradients, strict=True):
            given = ops.operand(place.output_gradient(gradient))
            pairs.append((given, place.local(matrix)))
            found = None
            if wanted:
                rows = [part.reshape([-1, part.shape[-1]]) for part in (kept[0], given)]
                found = place.matrix_gradient(ops.matmul(*(rows[::-1] if transpose_y else rows), True, False))
            of_matrices.append(found)
        if not ctx.wants_x:
            return (None, *of_matrices)
        of_x = sum_of_products(ops, pairs, not transpose_y, ctx.takes_operand)
        return (place.input_gradient(of_x), *of_matrices)


class _Nll(PyLayer):
    """`cross_entropy` of x W. What is no tensor, and the targets, come in a tuple, which PyLayer does not look into.

    One operation: between two, Paddle would make the gradient of float32 logits float32 again (3.3.1).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, how: tuple[Ops, bool, Tensor]) -> Tensor:
        ctx.ops, ctx.transpose_y, targets = how
        ctx.takes_operand, ctx.wants_x = x.dtype != paddle.float32, not x.stop_gradient
        kept = ctx.ops.operand(x)
        ctx.save_for_backward(matrix, *([] if matrix.stop_gradient else [kept]))
        nll, ctx.gradient = ctx.ops.operand_cross_entropy(ctx.ops.matmul(kept, matrix, False, ctx.transpose_y), targets)
        return nll

    @staticmethod
    @paddle.no_grad()
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ops, transpose_y, (matrix, *kept) = ctx.ops, ctx.transpose_y, ctx.saved_tensor()
        given, ctx.gradient = ctx.gradient(gradient), None  # which frees the logits with `given`
        found = None
        if kept:
            rows = (*kept, given)
            found = ops.matmul(*(rows[::-1] if transpose_y else rows), True, False)
        if not ctx.wants_x:
            return None, found
        return sum_of_products(ops, [(given, matrix)], not transpose_y, ctx.takes_operand), found


class _TokenNll:
    """Computes in place of `CausalLM.token_nll`, where the logits are a product and nobody else sees them."""

    def __init__(self, model: Any, products: Products):
        self._model, self._ops = model, products.ops

    def __call__(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Hidden states [N, D] and targets [N] to [N]."""
        model, head = self._model, self._model.lm_head
        matrix = model.model.embed_tokens.weight if head is None else head.weight
        has_gradient = paddle.is_grad_enabled() and not (hidden.stop_gradient and matrix.stop_gradient)
        is_here = paddle.in_dynamic_mode() and not hidden.is_dist() and not matrix.is_dist()
        if not self._is_a_product() or not has_gradient or not is_here or 0 in hidden.shape:
            found: Tensor = type(model).token_nll(model, hidden, targets)
            return found
        nll: Tensor = _Nll.apply(hidden, matrix, (self._ops, head is None, targets))
        return nll

    def _is_a_product(self) -> bool:
        model, head = self._model, self._model.lm_head
        if "logits" in vars(model) or model.score is not None:  # such as what gathers a matrix for it
            return False
        if model.cross_entropy is not self._ops.cross_entropy:
            return False
        if head is None:
            return True
        hooks = head._forward_pre_hooks or head._forward_post_hooks
        return type(head) is nn.Linear and head.bias is None and not hooks


class _InPlace:
    """Computes in place of a layer. Those of all layers are equal: layers that are alike share a program."""

    def __init__(self, layer: Any, products: Products):
        self._layer, self._products = layer, products

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._products is self._products

    def __hash__(self) -> int:
        return hash(id(self._products))


class _Linear(_InPlace):
    """Computes in place of an `nn.Linear`."""

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        return self._products.linear(x, self._layer.weight, self._layer.bias)


class _Adapted(_InPlace):
    """Computes in place of a `LoraLinear`."""

    def __call__(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        layer = self._layer
        if not is_low_rank(layer):
            found: Tensor = type(layer).forward(layer, x)
            return found
        return self._products.of_layers([layer], x)[0]


def use_products(model: nn.Layer, products: Products, together: bool = True) -> None:
    """Let the linear layers of a model, its adapters, experts and head multiply by `products`; with `together`, layers
    that share an input do so in one operation."""
    for module in model.sublayers(include_self=True):
        if is_plain(module):
            module.__dict__["forward"] = _Linear(module, products)
        if hasattr(type(module), "is_low_rank"):
            module.__dict__["forward"] = _Adapted(module, products)
        # what a class of somebody else's calls so may be another thing
        if getattr(type(module), "matmul", None) is matmul:
            module.matmul = products
        if getattr(type(module), "linear", None) is linear:
            module.linear = products.linear
        if together and vars(module).get("products") is plain_products:
            module.products = products.of_layers
    if products.ops.operand_cross_entropy is not None and _has_plain_nll(model):
        model.__dict__["token_nll"] = _TokenNll(model, products)


def _has_plain_nll(model: nn.Layer) -> bool:
    """Whether the loss of a model is that of a `CausalLM`: its family has no logits of its own, such as scaled ones."""
    kind = type(model)
    return (
        isinstance(model, CausalLM)
        and kind.token_nll is CausalLM.token_nll
        and kind.logits is CausalLM.logits
        and kind.tied_logits is CausalLM.tied_logits
        and "token_nll" not in vars(model)
    )
