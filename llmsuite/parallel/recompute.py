"""What is not kept for the backward pass but computed again in it (Chen et al. 2016, arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from llmsuite.models.shard_plan import ShardPlan
from llmsuite.typing import Tensor


def recompute_layers(model: Any, plan: ShardPlan, every: int) -> None:
    """Keep only the input of every n-th layer, counted from the first layer of the whole model."""
    for number, layer in _layers(model, plan):
        if number % every == 0:
            layer.forward_train, layer.is_computed_again = _again(layer.forward_train), True


def recompute_attention(model: Any, plan: ShardPlan) -> None:
    """Keep queries, keys and values, but not the scores of every pair of tokens: most of the memory of long sequences
    for little work ("selective", Korthikanti et al. 2022, arXiv 2205.05198)."""
    for _, layer in _layers(model, plan):
        found = [module for module in layer.sublayers() if hasattr(module, "core")]
        assert found, "the family's attention has no `core` to compute again"
        for module in found:
            module.core = _again(module.core)


def _layers(model: Any, plan: ShardPlan) -> list[tuple[int, Any]]:
    return [(int(number), layer) for number, layer in dict(model.named_sublayers())[plan.layers].named_children()]


def _again(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def computed_again(first: Tensor, *rest: Tensor | None) -> Tensor:
        if not paddle.is_grad_enabled():
            return function(first, *rest)
        if first.stop_gradient:  # as behind a frozen embedding: without one input to differentiate there is no graph
            first = first.detach()
            first.stop_gradient = False
        # what has no gradient is no argument: of each Paddle would keep a copy a layer, distributed over tp
        learnt = [tensor for tensor in rest if _has_gradient(tensor)]
        shared = [None if _has_gradient(tensor) else (tensor,) for tensor in rest]

        def run(first: Tensor, *learnt: Tensor) -> Tensor:
            given = iter(learnt)
            return function(first, *(next(given) if of_all is None else of_all[0] for of_all in shared))

        return paddle.distributed.fleet.utils.recompute(run, first, *learnt)

    return computed_again


def _has_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and not tensor.stop_gradient
