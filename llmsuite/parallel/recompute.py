"""Activation recompute: activations are computed again in the backward pass, not kept (Chen et al. 2016, arXiv
1604.06174)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from llmsuite.errors import UserError
from llmsuite.models import token_values
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.typing import Tensor


def recompute_layers(model: Any, plan: ShardPlan, every: int) -> None:
    """Keep only the input of every n-th layer, counted from the first layer of the whole model."""
    for number, layer in _layers(model, plan):
        if number % every == 0:
            layer.forward_train, layer.is_computed_again = _again(layer.forward_train), True


def recompute_attention(model: Any, plan: ShardPlan) -> None:
    """Selective recompute: keep queries, keys and values, but not the scores of every pair of tokens. That frees most
    of the memory of long sequences for little work (Korthikanti et al. 2022, arXiv 2205.05198)."""
    for _, layer in _layers(model, plan):
        found = [module for module in layer.sublayers() if hasattr(module, "core")]
        if not found:
            raise UserError(
                "engine.recompute: is selective, and the layers of this family have no attention with a `core` to "
                "compute again; set it to full or none"
            )
        for module in found:
            module.core = _again(module.core)


def _layers(model: Any, plan: ShardPlan) -> list[tuple[int, Any]]:
    return [(int(number), layer) for number, layer in dict(model.named_sublayers())[plan.layers].named_children()]


def results_again_in_program(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function while a program is made, which does not keep the result either; for what takes no product.
    Within a function that is computed again as a whole it changes nothing."""

    def marked(*given: Tensor) -> Tensor:
        result = function(*given)
        paddle.shape(result)  # Paddle 3.3.1 keeps the result of an operation that no other one marked with it takes
        return result

    in_program = paddle.jit.not_to_static(marked)
    return lambda *given: paddle.distributed.fleet.utils.recompute(in_program, *given)


def _again(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    in_program = paddle.jit.not_to_static(lambda *given: function(*given))

    def computed_again(first: Tensor, *rest: Tensor | None) -> Tensor:
        if not paddle.in_dynamic_mode():  # a program is being made, which computes again what is marked here
            return paddle.distributed.fleet.utils.recompute(in_program, first, *rest)
        if not paddle.is_grad_enabled():
            return function(first, *rest)
        if first.stop_gradient:  # as behind a frozen embedding: recompute needs an input that has a gradient
            first = first.detach()
            first.stop_gradient = False
        # tensors without a gradient are not passed: under tensor parallel Paddle would keep a copy of each in a layer
        differentiable = [tensor for tensor in rest if _has_gradient(tensor)]
        shared = [None if _has_gradient(tensor) else (tensor,) for tensor in rest]

        keys = token_values.current()  # it runs again among passes of other tokens

        def run(first: Tensor, *differentiable: Tensor) -> Tensor:
            given = iter(differentiable)
            with token_values.tokens(keys):
                return function(first, *(next(given) if kept is None else kept[0] for kept in shared))

        return paddle.distributed.fleet.utils.recompute(run, first, *differentiable)

    return computed_again


def _has_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and not tensor.stop_gradient
