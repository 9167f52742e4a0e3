"""Sharding stage 3 (ZeRO-3): a module's parameters are gathered while it computes, and sharded otherwise.

In a forward pass, a module's parameters are gathered before it runs and freed right after. In a backward pass, they
are gathered when the gradient of its output arrives. Each is freed when its own gradient is complete (see
`ParameterShard`), at the latest when the backward pass reaches the previous module, or ends: frozen parameters have no
gradient.

Where the device can communicate while it computes, the parameters of the next layer start to arrive when one begins
(Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277, call this prefetching). Two layers are gathered then, not one.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from llmsuite.parallel.zero3_units import GatherUnit, gather_units, layer_ahead

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


@dataclasses.dataclass(eq=False)
class _GatheredModule:
    """A module of this rank as stage 3 gathers it."""

    shards: list[ParameterShard]
    in_backward: list[ParameterShard]
    """The shards whose values a backward pass needs."""
    next: _GatheredModule | None = None
    """The layer whose parameters arrive while this one computes forward."""
    previous: _GatheredModule | None = None
    """The layer whose parameters arrive while it computes backward."""
    passes_back: bool = False
    """True where the last forward pass of the module has an input with a gradient: a backward pass goes on from it to
    the previous module."""


class Zero3Hooks:
    """Hooks that gather the parameters of a model's modules before they compute, and free them afterwards."""

    def __init__(self, model: Any, plan: ShardPlan, shards: Sequence[ParameterShard], is_tied: bool, ahead: bool):
        """
        Args:
            model: this rank's part.
            plan: the family's shard plan, from which `gather_units` makes the units.
            shards: of the parameters of the model.
            is_tied: whether the logits are made with the weight of the embedding.
            ahead: whether the parameters of the next layer arrive while one computes.
        """
        self._model = model
        self._open: _GatheredModule | None = None
        """The module that was last gathered for a backward pass."""
        self._shards = list(shards)
        modules = dict(model.named_sublayers())
        by_name = {shard.name: shard for shard in shards}
        # a unit without a module is on another pipeline stage, or not in this model
        units = [unit for unit in gather_units(plan, list(by_name), is_tied) if modules.get(unit.module) is not None]

        def of(names: Sequence[str]) -> list[ParameterShard]:
            return [by_name[name] for name in names]

        gathered = [_GatheredModule(of(unit.parameters), of(unit.in_backward)) for unit in units]
        if ahead:
            of_layer: dict[GatherUnit | None, _GatheredModule | None] = dict(zip(units, gathered))
            of_layer[None] = None
            # not all passes run the layers for multi-token prediction, and what arrives in vain would be old by then
            for unit in units:
                module = modules[unit.module]
                if isinstance(module, DecoderLayer) and module.is_mtp:
                    of_layer[unit] = None
            for i, of_unit in enumerate(gathered):
                of_unit.next = of_layer[layer_ahead(units, i)]
                of_unit.previous = of_layer[layer_ahead(units, i, backward=True)]
        used: set[str] = set()
        for unit, of_unit in zip(units, gathered):
            if unit.position == "logits":
                model.tied_head = self._gathered_head(model.tied_head, of_unit)
            else:
                self._watch(modules[unit.module], of_unit)
                used.update(unit.parameters)
        outside = [shard.name for shard in shards if shard.name not in used and not is_shared_by_all_ranks(shard.name)]
        assert not outside, f"the family's shard plan has no module for {outside}"
        model.after_backward = self._backward_ended

    def _watch(self, module: Any, gathered: _GatheredModule) -> None:
        def before(module: Any, inputs: Any) -> Any:
            if not paddle.in_dynamic_mode():
                return None
            gathered.passes_back = any(isinstance(x, paddle.Tensor) and not x.stop_gradient for x in inputs)
            if _is_recomputed(module):
                self._gather_for_backward(gathered)
            else:
                _gather(gathered.shards)
                if gathered.next is not None:
                    _start_gather(gathered.next.shards)
            return _joined(inputs)

        def after(module: Any, inputs: Any, output: Any) -> None:
            if not paddle.in_dynamic_mode():
                return
            if not _is_recomputed(module):
                _free(gathered.shards)
            if gathered.in_backward:
                self._expect_backward(output[0] if isinstance(output, tuple) else output, gathered)

        module.register_forward_pre_hook(before)
        module.register_forward_post_hook(after)
        if isinstance(module, DecoderLayer) and not module.execution.is_plain:
            # compiled: a program calls no hook when it runs
            module.execution = _GatheredExecution(module.execution, module, before, after)

    def _gathered_head(self, head: TiedHead, gathered: _GatheredModule) -> TiedHead:
        def before() -> None:
            if paddle.in_dynamic_mode():
                _gather(gathered.shards)

        def after(logits: Tensor) -> None:
            if paddle.in_dynamic_mode():
                _free(gathered.shards)
                self._expect_backward(logits, gathered)

        return _GatheredHead(head, before, after)

    def _expect_backward(self, output: Tensor, gathered: _GatheredModule) -> None:
        def hook(gradient: Tensor) -> None:
            self._gather_for_backward(gathered)

        if not output.stop_gradient:
            output.register_hook(hook)

    def _gather_for_backward(self, gathered: _GatheredModule) -> None:
        if self._open is not None and self._open is not gathered:
            _free(self._open.in_backward)
        self._open = gathered
        _gather(gathered.in_backward)
        if gathered.previous is not None and gathered.passes_back:
            _start_gather(gathered.previous.in_backward)

    def _backward_ended(self) -> None:
        self._open = None
        _free(self._shards)


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


def _start_gather(shards: Sequence[ParameterShard]) -> None:
    # asynchronous, in the same order on all ranks: while one layer computes, the parameters of another arrive
    for shard in shards:
        shard.start_gather()


def _free(shards: Sequence[ParameterShard]) -> None:
    for shard in shards:
        shard.free()
