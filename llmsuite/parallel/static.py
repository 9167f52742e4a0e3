"""`engine.mode: to_static`: the decoder layers run as compiled programs, the rest of a step stays as it is.

Layers that differ only in the values of their parameters share one program and take their parameters as inputs: a
program is made once for each shape of batch, however many layers there are. Inputs and outputs are local tensors;
inside the program they are distributed tensors again, so that Paddle's SPMD rules decide the communication when the
program is made, not in every step. Sums over data ranks, pipelines, recompute, clipping and the optimizer are the
engine's in both modes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local
from paddle.distributed.auto_parallel.static import process_group

from llmsuite.errors import UserError
from llmsuite.models.exact import is_own, is_own_code, named_kind
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.mesh import Mesh
from llmsuite.typing import Tensor


def compile_layers(model: Any, plan: ShardPlan, mesh: Mesh, placements: list[Any]) -> list[LayerProgram]:
    """Let the layers of a model run as programs in training.

    Args:
        model: this rank's part, parallel already. Its layers have `forward_train(x, *context)`: activations [B, L, D]
            and tensors that are the same for every layer, to activations. Where a part of that depends on values, they
            have it in two halves: `attention_block`, which is compiled, of the modules in `attention_modules`, and
            `mlp_block`.
        plan: the family's shard plan.
        mesh: this rank's place.
        placements: placements over tp of the activations between layers.

    Returns:
        The different programs, each compiled when it is first called.
    """
    if mesh.tensor is not None:
        _make_ring(mesh.tensor.process_ids)
    programs: dict[Hashable, LayerProgram] = {}
    for number, layer in enumerate(dict(model.named_sublayers())[plan.layers]):
        if hasattr(layer, "attention_block") and not is_own_code(layer, "forward_train"):
            raise UserError(
                f"engine.mode: is to_static, which compiles the first half of a layer with experts, and "
                f"{named_kind(f'{plan.layers}.{number}', layer)} has a forward pass of its own; set it to dynamic"
            )
        structure = _structure(layer)
        if structure not in programs:
            programs[structure] = LayerProgram(layer, mesh, placements)
        compiled = programs[structure].of(layer)
        compiled = _then(compiled, layer.mlp_block) if hasattr(layer, "attention_block") else compiled
        if getattr(layer, "predicts_further", False):  # it joins its two inputs in front of that
            layer.forward_block = _alone(compiled)
        else:
            layer.forward_train = compiled
    return list(programs.values())


def _then(first: Callable[..., Tensor], second: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *context: second(first(x, *context), *context)


def _alone(run: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    return lambda x, *context: (run(x, *context), None)


class _Slot(NamedTuple):
    """Where a layer looks for a parameter."""

    name: str
    table: dict[str, Tensor]
    attribute: str

    @property
    def parameter(self) -> Tensor:
        return self.table[self.attribute]


def _slots(layer: Any) -> list[_Slot]:
    """The parameters of the compiled part of a layer, and those that it shares with all others."""
    inside = tuple(f"{module}." for module in layer.attention_modules) if hasattr(layer, "attention_block") else ("",)
    modules = dict(layer.named_sublayers(include_self=True))
    names = [name.rpartition(".") for name, _ in layer.named_parameters() if name.startswith(inside)]
    own = [_Slot(f"{owner}.{attribute}", modules[owner]._parameters, attribute) for owner, _, attribute in names]
    shared = [found for module in modules.values() if (found := getattr(module.__dict__.get("core"), "shared", None))]
    return own + [_Slot(name, of._parameters, name) for of in shared for name in of._parameters]


def _make_ring(ranks: Sequence[int]) -> None:
    """Programs use process groups of their own. Left alone, Paddle would give them the numbers of later groups."""
    number = _FIRST_RING + ranks[0] * _MOST_NEIGHBOURS + len(ranks)  # unique, as the ranks are neighbours
    process_group.new_process_group(list(ranks), group_id=number).instantiate()


_FIRST_RING, _MOST_NEIGHBOURS = 1_000_000, 1024


class LayerProgram:
    """The training pass of one layer, or of its first half, for the parameters of any layer of the same structure."""

    def __init__(self, layer: Any, mesh: Mesh, placements: list[Any]):
        self._slots = _slots(layer)
        self._forward_train = layer.attention_block if hasattr(layer, "attention_block") else layer.forward_train
        self._mesh, self._placements = mesh, placements
        self._parameter_placements = [
            slot.parameter.placements if slot.parameter.is_dist() else [] for slot in self._slots
        ]
        self.compiled = self._compile()

    def of(self, layer: Any) -> Callable[..., Tensor]:
        """`forward_train` of a layer, run by this program."""
        parameters = [slot.parameter for slot in _slots(layer)]

        def forward_train(x: Tensor, *context: Tensor | None) -> Tensor:
            if paddle.is_grad_enabled():
                return self._run(x, context, parameters)
            # the first pass under recompute: a program made without a graph could not serve the second one
            with paddle.enable_grad():
                return self._run(x, context, parameters).detach()

        return forward_train

    def _run(self, x: Tensor, context: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
        given, present = [t for t in context if t is not None], [t is not None for t in context]
        if self._mesh.tensor is None:
            return self.compiled([x, *given], parameters, present)
        inputs = [self._local(x, self._placements), *given]
        local = [self._local(parameter, p) for parameter, p in zip(parameters, self._parameter_placements)]
        return dtensor_from_local(self.compiled(inputs, local, present), self._mesh.tensor, self._placements)

    def _local(self, tensor: Tensor, placements: list[Any]) -> Tensor:
        return dtensor_to_local(tensor, self._mesh.tensor, placements)

    def _compile(self) -> Any:
        # runs while the program is made; nothing in a layer branches on values, so its code needs no translation
        @paddle.jit.not_to_static
        def trace(inputs: Sequence[Tensor], parameters: Sequence[Tensor], present: Sequence[bool]) -> Tensor:
            if self._mesh.tensor is not None:
                whole = [dist.Replicate()]
                of_inputs = [self._placements, *[whole] * (len(inputs) - 1)]
                inputs = [self._distributed(tensor, p) for tensor, p in zip(inputs, of_inputs)]
                parameters = [self._distributed(tensor, p) for tensor, p in zip(parameters, self._parameter_placements)]
            context = iter(inputs[1:])
            own = [slot.parameter for slot in self._slots]
            self._put(parameters)
            try:
                y = self._forward_train(inputs[0], *(next(context) if there else None for there in present))
            finally:
                self._put(own)
            _forget_layer_names()
            return y

        def run(inputs: Sequence[Tensor], parameters: Sequence[Tensor], present: Sequence[bool]) -> Tensor:
            return trace(inputs, parameters, present)

        return paddle.jit.to_static(run, full_graph=True)

    def _put(self, values: Sequence[Tensor]) -> None:
        for slot, value in zip(self._slots, values):
            slot.table[slot.attribute] = value

    def _distributed(self, local: Tensor, placements: list[Any]) -> Tensor:
        return dtensor_from_local(local, self._mesh.tensor, placements)


def _forget_layer_names() -> None:
    """Layers write their names on the operations they make; Paddle 3.3.1 later refuses a reshard that has one."""
    for operation in paddle.static.default_main_program().global_block().ops:
        if operation.name() == "dist_op.reshard" and operation.has_attr("struct_name"):
            operation.erase_attr("struct_name")


_EVERY_LAYER_HAS = frozenset(vars(nn.Layer()))


def _structure(layer: Any) -> Hashable:
    """Everything of a layer that decides its program: all but the values of its parameters."""
    modules = []
    compiled = tuple(layer.attention_modules) if hasattr(layer, "attention_block") else ("",)
    for name, module in layer.named_sublayers(include_self=True):
        if name and not f"{name}.".startswith(tuple(f"{part}." if part else part for part in compiled)):
            continue
        settings = sorted((key, value) for key, value in vars(module).items() if key not in _EVERY_LAYER_HAS)
        hooks = tuple(map(_kind_of, (*module._forward_pre_hooks.values(), *module._forward_post_hooks.values())))
        buffers = tuple((key, id(value)) for key, value in module._buffers.items() if value is not None)
        plain = tuple((key, value if isinstance(value, Hashable) else id(value)) for key, value in settings)
        modules.append((name, type(module), hooks, buffers, plain))
    return tuple(modules), tuple((s.name, tuple(s.parameter.shape), s.parameter.dtype) for s in _slots(layer))


def _kind_of(hook: Any) -> Hashable:
    """What tells a hook from another: those that llmsuite puts on layers are alike, somebody else's may not be."""
    return hook.__qualname__ if is_own(hook) else id(hook)
