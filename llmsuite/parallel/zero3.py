"""Sharding stage 3 (ZeRO-3): a module's parameters are gathered while it computes, and sharded otherwise.

In a forward pass, a module's parameters are gathered right before it runs and freed right after. In a backward pass,
they are gathered when the gradient of its output arrives. Each is freed when its own gradient is complete (see
`ParameterShard`), at the latest when the backward pass reaches the previous module, or ends: frozen parameters have no
gradient.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle
from paddle.autograd import PyLayer

from llmsuite.adapters.prefix_shapes import is_shared_by_all_ranks
from llmsuite.base.typing import Tensor
from llmsuite.models.blocks import DecoderLayer, LayerExecution, TiedHead
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.zero3_units import GatherUnit, gather_units

OnNames = Callable[[Sequence[str]], None]
_program_callbacks: list[tuple[OnNames, OnNames]] = []


@contextlib.contextmanager
def program_gathering(gather: OnNames, free: OnNames) -> Iterator[None]:
    """While active, a step program is built: these functions gather parameters in it and free them, by their names, in
    a model that `hook_program_gathering` has prepared."""
    _program_callbacks.append((gather, free))
    try:
        yield
    finally:
        _program_callbacks.pop()


def hook_program_gathering(model: Any, plan: ShardPlan, is_tied: bool) -> None:
    """Prepare a model for step programs, in which its parameters are slices: the callbacks of
    `program_gathering` are called around the modules that `Zero3Hooks` gathers for. Eager passes do not change."""
    modules = dict(model.named_sublayers())
    names = [name for name, _ in model.named_parameters()]

    def gather(unit: GatherUnit) -> None:
        for gather_names, _ in _program_callbacks:
            gather_names(unit.parameters)

    def free(unit: GatherUnit) -> None:
        for _, free_names in _program_callbacks:
            free_names(unit.parameters)

    def watch(module: Any, unit: GatherUnit) -> None:
        module.register_forward_pre_hook(lambda module, inputs: gather(unit))
        module.register_forward_post_hook(lambda module, inputs, output: free(unit))

    def gathered_head(head: TiedHead, unit: GatherUnit) -> TiedHead:
        def after(logits: Tensor) -> None:
            free(unit)

        return _GatheredHead(head, functools.partial(gather, unit), after)

    for unit in gather_units(plan, names, is_tied):
        if unit.position == "logits":
            model.tied_head = gathered_head(model.tied_head, unit)
        elif modules.get(unit.module) is not None:  # else on another pipeline stage, or not in this model
            watch(modules[unit.module], unit)


class Zero3Hooks:
    """Hooks that gather the parameters of a model's modules before they compute, and free them afterwards."""

    def __init__(self, model: Any, plan: ShardPlan, shards: Sequence[ParameterShard], is_tied: bool):
        """
        Args:
            model: this rank's part.
            plan: the family's shard plan, from which `gather_units` makes the units.
            shards: of the parameters of the model.
            is_tied: whether the logits are made with the weight of the embedding.
        """
        self._model = model
        self._open: list[ParameterShard] = []
        """The shards that were last gathered for a backward pass."""
        modules = dict(model.named_sublayers())
        by_name = {shard.name: shard for shard in shards}
        used: set[str] = set()
        for unit in gather_units(plan, list(by_name), is_tied):
            inside = [by_name[name] for name in unit.parameters]
            if unit.position == "logits":
                model.tied_head = self._gathered_head(model.tied_head, inside)
            elif modules.get(unit.module) is not None:  # else on another pipeline stage, or not in this model
                self._watch(modules[unit.module], inside, [by_name[name] for name in unit.in_backward])
                used.update(unit.parameters)
        outside = [shard.name for shard in shards if shard.name not in used and not is_shared_by_all_ranks(shard.name)]
        assert not outside, f"the family's shard plan has no module for {outside}"
        model.after_backward = self._backward_ended

    def _watch(self, module: Any, shards: list[ParameterShard], in_backward: list[ParameterShard]) -> None:
        def before(module: Any, inputs: Any) -> Any:
            if not paddle.in_dynamic_mode():
                return None
            if _is_recomputed(module):
                self._gather_for_backward(in_backward)
            else:
                _gather(shards)
            return _joined(inputs)

        def after(module: Any, inputs: Any, output: Any) -> None:
            if not paddle.in_dynamic_mode():
                return
            if not _is_recomputed(module):
                _free(shards)
            if in_backward:
                self._expect_backward(output[0] if isinstance(output, tuple) else output, in_backward)

        module.register_forward_pre_hook(before)
        module.register_forward_post_hook(after)
        if isinstance(module, DecoderLayer) and not module.execution.is_plain:
            # compiled: a program calls no hook when it runs
            module.execution = _GatheredExecution(module.execution, module, before, after)

    def _gathered_head(self, head: TiedHead, shards: list[ParameterShard]) -> TiedHead:
        def before() -> None:
            if paddle.in_dynamic_mode():
                _gather(shards)

        def after(logits: Tensor) -> None:
            if paddle.in_dynamic_mode():
                _free(shards)
                self._expect_backward(logits, shards)

        return _GatheredHead(head, before, after)

    def _expect_backward(self, output: Tensor, shards: list[ParameterShard]) -> None:
        def hook(gradient: Tensor) -> None:
            self._gather_for_backward(shards)

        if not output.stop_gradient:
            output.register_hook(hook)

    def _gather_for_backward(self, shards: list[ParameterShard]) -> None:
        if self._open is not shards:
            _free(self._open)
        self._open = shards
        _gather(shards)

    def _backward_ended(self) -> None:
        _free(self._open)
        self._open = []


class _GatheredExecution(LayerExecution):
    """Another execution of a layer, whose parameters are gathered around it."""

    is_plain = False

    def __init__(
        self, inner: LayerExecution, layer: DecoderLayer, before: Callable[..., Any], after: Callable[..., None]
    ):
        """`before` and `after` are the forward hooks of `Zero3Hooks`."""
        self._inner = inner
        self._layer = layer
        self._before = before
        self._after = after

    def run(self, function: Callable[..., Tensor], x: Tensor, *context: Tensor | None) -> Tensor:
        self._before(self._layer, (x, *context))
        output = self._inner.run(function, x, *context)
        self._after(self._layer, (x, *context), output)
        return output


class _GatheredHead(TiedHead):
    """Another tied head, whose matrix is gathered around it."""

    def __init__(self, inner: TiedHead, before: Callable[[], None], after: Callable[[Tensor], None]):
        """`before` gathers the matrix, and `after` frees it; it gets the logits."""
        super().__init__()
        self._inner = inner
        self._before = before
        self._after = after

    def __call__(self, hidden: Tensor, embedding: Any) -> Tensor:
        self._before()
        logits = self._inner(hidden, embedding)
        self._after(logits)
        return logits


def _is_recomputed(module: Any) -> bool:
    """True where recompute runs this forward pass, inside a backward pass; the first one under recompute has no
    graph."""
    is_recomputed = isinstance(module, DecoderLayer) and module.execution.is_recomputed
    return is_recomputed and module.training and paddle.is_grad_enabled()


def _joined(inputs: Sequence[Any]) -> Any:
    """The inputs of a module; where several have a gradient, copies that share one backward node.

    Then the backward pass of the module ends before that of an earlier module starts, whose gathering frees the
    parameters of this one.
    """
    positions = [i for i, given in enumerate(inputs) if isinstance(given, paddle.Tensor) and not given.stop_gradient]
    if len(positions) < 2:
        return None
    joined = dict(zip(positions, _Joined.apply(*(inputs[i] for i in positions))))
    return tuple(joined.get(i, given) for i, given in enumerate(inputs))


class _Joined(PyLayer):
    """Copies of several tensors, made by one operation."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.clone() for gradient in gradients)


def _gather(shards: Sequence[ParameterShard]) -> None:
    # one all-gather for each parameter, in the order of the model, which is the same on all ranks
    for shard in shards:
        shard.gather()


def _free(shards: Sequence[ParameterShard]) -> None:
    for shard in shards:
        shard.free()
