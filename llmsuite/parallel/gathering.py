"""Sharding stage 3 (ZeRO-3): a module's parameters are whole while it computes, and sharded otherwise.

Forward, a module's parameters are gathered right before it runs and freed right after. Backward, they are gathered
when the gradient of its output is there; each is freed when its own gradient is complete (see `ParameterShard`), at the
latest when the backward pass reaches the module in front, or ends: frozen ones have no gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle
from paddle.autograd import PyLayer

from llmsuite.models.prefix_shapes import is_in_every_part
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.gather_units import GatherUnit, gather_units
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.typing import Tensor

OfNames = Callable[[Sequence[str]], None]
_of_program: list[tuple[OfNames, OfNames]] = []


@contextlib.contextmanager
def in_program(gather: OfNames, free: OfNames) -> Iterator[None]:
    """While active, a program of whole steps is made: these functions make parameters whole in it and let go of them,
    by their names, where `gather_in_programs` has prepared a model."""
    _of_program.append((gather, free))
    try:
        yield
    finally:
        _of_program.pop()


def gather_in_programs(model: Any, plan: ShardPlan, is_tied: bool) -> None:
    """Prepare a model for programs of whole steps, in which its parameters are slices: the modules that `Zero3Hooks`
    gathers for are told to `in_program`. Op by op nothing changes."""
    modules, names = dict(model.named_sublayers()), [name for name, _ in model.named_parameters()]

    def gather(unit: GatherUnit) -> None:
        for make_whole, _ in _of_program:
            make_whole(unit.parameters)

    def free(unit: GatherUnit) -> None:
        for _, let_go in _of_program:
            let_go(unit.parameters)

    def watch(module: Any, unit: GatherUnit) -> None:
        module.register_forward_pre_hook(lambda module, inputs: gather(unit))
        module.register_forward_post_hook(lambda module, inputs, output: free(unit))

    def around(function: Callable[[Tensor], Tensor], unit: GatherUnit) -> Callable[[Tensor], Tensor]:
        def gathered(hidden: Tensor) -> Tensor:
            gather(unit)
            output = function(hidden)
            free(unit)
            return output

        return gathered

    for unit in gather_units(plan, names, is_tied):
        if unit.place == "logits":
            model.logits = around(model.logits, unit)
        elif modules.get(unit.module) is not None:  # else on another pipeline stage, or not in this model
            watch(modules[unit.module], unit)


class Zero3Hooks:
    """Gathers the parameters of a model's modules before they compute, and frees them afterwards."""

    def __init__(self, model: Any, plan: ShardPlan, shards: Sequence[ParameterShard], is_tied: bool):
        """
        Args:
            model: this rank's part.
            plan: the family's shard plan; `gather_units` says by it what is gathered at once.
            shards: of the parameters of the model.
            is_tied: whether the logits are made with the weight of the embedding.
        """
        self._model = model
        self._open: list[ParameterShard] = []
        """The shards that were gathered last for a backward pass."""
        modules, by_name = dict(model.named_sublayers()), {shard.name: shard for shard in shards}
        used: set[str] = set()
        for unit in gather_units(plan, list(by_name), is_tied):
            inside = [by_name[name] for name in unit.parameters]
            if unit.place == "logits":
                model.logits = self._around(model.logits, inside)
            elif modules.get(unit.module) is not None:  # else on another pipeline stage, or not in this model
                self._watch(modules[unit.module], inside, [by_name[name] for name in unit.in_backward])
                used.update(unit.parameters)
        outside = [shard.name for shard in shards if shard.name not in used and not is_in_every_part(shard.name)]
        assert not outside, f"the family's shard plan has no module for {outside}"
        model.after_backward = self._backward_ended

    def _watch(self, module: Any, shards: list[ParameterShard], in_backward: list[ParameterShard]) -> None:
        def before(module: Any, inputs: Any) -> Any:
            if not paddle.in_dynamic_mode():
                return None
            if _is_computed_again(module):
                self._gather_for_backward(in_backward)
            else:
                _gather(shards)
            return _joined(inputs)

        def after(module: Any, inputs: Any, output: Any) -> None:
            if not paddle.in_dynamic_mode():
                return
            if not _is_computed_again(module):
                _free(shards)
            if in_backward:
                self._expect_backward(output[0] if isinstance(output, tuple) else output, in_backward)

        module.register_forward_pre_hook(before)
        module.register_forward_post_hook(after)
        if "forward_train" in vars(module):  # compiled
            compiled = module.forward_train

            def forward_train(*inputs: Tensor | None) -> Tensor:
                before(module, inputs)
                output = compiled(*inputs)
                after(module, inputs, output)
                return output

            module.forward_train = forward_train

    def _around(self, function: Callable[[Tensor], Tensor], shards: list[ParameterShard]) -> Callable[[Tensor], Tensor]:
        def gathered(hidden: Tensor) -> Tensor:
            if not paddle.in_dynamic_mode():
                return function(hidden)
            _gather(shards)
            output = function(hidden)
            _free(shards)
            self._expect_backward(output, shards)
            return output

        return gathered

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


def _is_computed_again(module: Any) -> bool:
    """Whether recompute runs this forward pass, inside a backward pass; the first one under recompute has no graph."""
    return getattr(module, "is_computed_again", False) and module.training and paddle.is_grad_enabled()


def _joined(inputs: Sequence[Any]) -> Any:
    """The inputs of a module; of several that have a gradient, copies with one backward pass.

    That of the module is done then before that of anything in front begins, whose gathering frees its parameters.
    """
    places = [i for i, given in enumerate(inputs) if isinstance(given, paddle.Tensor) and not given.stop_gradient]
    if len(places) < 2:
        return None
    joined = dict(zip(places, _Joined.apply(*(inputs[i] for i in places))))
    return tuple(joined.get(i, given) for i, given in enumerate(inputs))


class _Joined(PyLayer):
    """Copies of several tensors."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.clone() for gradient in gradients)


def _gather(shards: Sequence[ParameterShard]) -> None:
    for shard in shards:
        shard.gather()


def _free(shards: Sequence[ParameterShard]) -> None:
    for shard in shards:
        shard.free()
