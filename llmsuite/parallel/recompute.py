"""Activation recompute: the backward pass recomputes activations, so they are not kept (Chen et al. 2016, arXiv
1604.06174)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.models import token_context
from llmsuite.models.blocks import LayerExecution, WithCore, check_layer
from llmsuite.models.shard_plan import ShardPlan


def recompute_layers(model: Any, plan: ShardPlan, every: int) -> None:
    """Keep only the input of every n-th layer, counted from the first layer of the full model."""
    for number, layer in _layers(model, plan):
        check_layer(f"{plan.layers}.{number}", layer, "engine.recompute")
        if number % every == 0:
            layer.execution = RecomputedExecution(layer.execution)


def recompute_attention(model: Any, plan: ShardPlan) -> None:
    """Selective recompute: keep queries, keys and values, but not the scores of every pair of tokens. That frees most
    of the memory of long sequences for little work (Korthikanti et al. 2022, arXiv 2205.05198)."""
    for _, layer in _layers(model, plan):
        found = [module for module in layer.sublayers() if isinstance(module, WithCore)]
        if not found:
            raise UserError(
                "engine.recompute: is selective, and the layers of this family have no attention with a core to "
                "compute again (llmsuite.models.blocks.WithCore); set it to full or none"
            )
        for module in found:
            module.use_core(functools.partial(_recompute, module.core))


def _layers(model: Any, plan: ShardPlan) -> list[tuple[int, Any]]:
    return [(int(number), layer) for number, layer in dict(model.named_sublayers())[plan.layers].named_children()]


def recompute_in_program(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that a program recomputes, for cheap functions without matrix products. The program keeps neither its
    intermediate values nor its result. Inside a function that is itself recomputed it changes nothing."""

    def with_result_used(*given: Tensor) -> Tensor:
        result = function(*given)
        # Paddle 3.3.1 keeps the result of a recomputed operation unless another such operation uses it: this one does
        paddle.shape(result)
        return result

    in_program = paddle.jit.not_to_static(with_result_used)
    return lambda *given: paddle.distributed.fleet.utils.recompute(in_program, *given)


class RecomputedExecution(LayerExecution):
    """Execution that keeps only the input of a layer, and runs another execution again in the backward pass."""

    is_plain = False
    is_recomputed = True

    def __init__(self, inner: LayerExecution):
        self._inner = inner

    def run(self, function: Callable[..., Tensor], x: Tensor, *context: Tensor | None) -> Tensor:
        return _recompute(functools.partial(self._inner.run, function), x, *context)


def _recompute(function: Callable[..., Tensor], first: Tensor, *rest: Tensor | None) -> Tensor:
    """The output of a function, which the backward pass calls again."""
    if not paddle.in_dynamic_mode():  # a program is being built: this marks operations that it recomputes
        in_program = paddle.jit.not_to_static(lambda *given: function(*given))
        return paddle.distributed.fleet.utils.recompute(in_program, first, *rest)
    if not paddle.is_grad_enabled():
        return function(first, *rest)
    if first.stop_gradient:  # such as after a frozen embedding: recompute needs an input that has a gradient
        first = first.detach()
        first.stop_gradient = False
    # tensors without a gradient are not passed: under tensor parallel Paddle would keep a copy of each per layer
    differentiable = [tensor for tensor in rest if _has_gradient(tensor)]
    shared = [None if _has_gradient(tensor) else (tensor,) for tensor in rest]

    keys = token_context.current()  # kept, because it runs again between passes of other tokens

    def run(first: Tensor, *differentiable: Tensor) -> Tensor:
        given = iter(differentiable)
        with token_context.tokens(keys):
            return function(first, *(next(given) if kept is None else kept[0] for kept in shared))

    return paddle.distributed.fleet.utils.recompute(run, first, *differentiable)


def _has_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and not tensor.stop_gradient
