"""`engine.mode: to_static`: the decoder layers run as compiled programs, the rest of a step stays eager.

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

from llmsuite.adapters.layers.prefix import PrefixedCore
from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.models.blocks import LayerExecution, WithCore, check_layer
from llmsuite.models.exact import describe_module, is_own, is_own_code
from llmsuite.models.moe import MTPLayer
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.mesh import Mesh


def compile_layers(model: Any, plan: ShardPlan, mesh: Mesh, placements: list[Any]) -> list[LayerProgram]:
    """Compile the layers of a model into programs for training.

    Args:
        model: this rank's part, already parallel. Its layers are `blocks.DecoderLayer`s. Where a part of their pass
            depends on values, they have two halves: `attention_block`, which is compiled, of the modules in
            `attention_modules`, and `mlp_block`.
        plan: the family's shard plan.
        mesh: of the run, with this rank's coordinates.
        placements: placements over tp of the activations between layers.

    Returns:
        The different programs, each compiled when it is first called.

    Raises:
        UserError: a layer with experts has a forward pass of its own, or a layer is none of `blocks.DecoderLayer`.
    """
    if mesh.tensor is not None:
        _make_ring(mesh.tensor.process_ids)
    programs: dict[Hashable, LayerProgram] = {}
    for number, layer in enumerate(dict(model.named_sublayers())[plan.layers]):
        check_layer(f"{plan.layers}.{number}", layer, "engine.mode: to_static")
        if layer.attention_modules and not is_own_code(layer, "train_block"):
            raise UserError(
                f"engine.mode: is to_static, which compiles the first half of a layer with experts, and "
                f"{describe_module(f'{plan.layers}.{number}', layer)} has a forward pass of its own; set it to dynamic"
            )
        structure = _structure(layer)
        if structure not in programs:
            programs[structure] = LayerProgram(layer, mesh, placements)
        second_half = layer.mlp_block if layer.attention_modules else None
        execution = CompiledExecution(programs[structure].of(layer), second_half)
        if isinstance(layer, MTPLayer):  # it joins its two inputs before the compiled part
            layer.block_execution = execution
        else:
            layer.execution = execution
    return list(programs.values())


class CompiledExecution(LayerExecution):
    """Execution of a layer, or of its first half, by a program."""

    is_plain = False

    def __init__(self, compiled: Callable[..., Tensor], second_half: Callable[..., Tensor] | None):
        """
        Args:
            compiled: `LayerProgram.of` the layer.
            second_half: runs eagerly on the output of the program; None where the program is the full layer.
        """
        self._compiled = compiled
        self._second_half = second_half

    def run(self, function: Callable[..., Tensor], x: Tensor, *context: Tensor | None) -> Tensor:
        y = self._compiled(x, *context)
        return y if self._second_half is None else self._second_half(y, *context)


class _Slot(NamedTuple):
    """The place in a layer where it finds a parameter."""

    name: str
    table: dict[str, Tensor]
    attribute: str

    @property
    def parameter(self) -> Tensor:
        return self.table[self.attribute]


def _slots(layer: Any) -> list[_Slot]:
    """The parameters of the compiled part of a layer, and those that all layers share."""
    inside = tuple(f"{module}." for module in layer.attention_modules) or ("",)
    modules = dict(layer.named_sublayers(include_self=True))
    names = [name.rpartition(".") for name, _ in layer.named_parameters() if name.startswith(inside)]
    own = [_Slot(f"{owner}.{attribute}", modules[owner]._parameters, attribute) for owner, _, attribute in names]
    cores = [module.core for module in modules.values() if isinstance(module, WithCore)]
    shared = [core.shared for core in cores if isinstance(core, PrefixedCore) and core.shared is not None]
    return own + [_Slot(name, of._parameters, name) for of in shared for name in of._parameters]


def _make_ring(ranks: Sequence[int]) -> None:
    """Make the process group of the programs. Without this, Paddle would give it the number of a later group."""
    number = _FIRST_RING + ranks[0] * _MOST_NEIGHBOURS + len(ranks)  # unique, as the ranks are neighbours
    process_group.new_process_group(list(ranks), group_id=number).instantiate()


_FIRST_RING = 1_000_000
_MOST_NEIGHBOURS = 1024


class LayerProgram:
    """The training pass of one layer, or of its first half, for the parameters of any layer of the same structure."""

    def __init__(self, layer: Any, mesh: Mesh, placements: list[Any]):
        self._slots = _slots(layer)
        self._train_block = layer.attention_block if layer.attention_modules else layer.train_block
        self._mesh = mesh
        self._placements = placements
        self._parameter_placements = [
            slot.parameter.placements if slot.parameter.is_dist() else [] for slot in self._slots
        ]
        self.compiled = self._compile()

    def of(self, layer: Any) -> Callable[..., Tensor]:
        """The training pass of a layer, or of its first half, by this program."""
        parameters = [slot.parameter for slot in _slots(layer)]

        def run(x: Tensor, *context: Tensor | None) -> Tensor:
            if paddle.is_grad_enabled():
                return self._run(x, context, parameters)
            # the first pass under recompute: a program made without a graph could not serve the second one
            with paddle.enable_grad():
                return self._run(x, context, parameters).detach()

        return run

    def _run(self, x: Tensor, context: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
        given = [t for t in context if t is not None]
        present = [t is not None for t in context]
        if self._mesh.tensor is None:
            return self.compiled([x, *given], parameters, present)
        inputs = [self._local(x, self._placements), *given]
        local = [self._local(parameter, p) for parameter, p in zip(parameters, self._parameter_placements)]
        return dtensor_from_local(self.compiled(inputs, local, present), self._mesh.tensor, self._placements)

    def _local(self, tensor: Tensor, placements: list[Any]) -> Tensor:
        return dtensor_to_local(tensor, self._mesh.tensor, placements)

    def _compile(self) -> Any:
        # runs while the program is built; nothing in a layer branches on values, so its code needs no translation
        @paddle.jit.not_to_static
        def trace(inputs: Sequence[Tensor], parameters: Sequence[Tensor], present: Sequence[bool]) -> Tensor:
            if self._mesh.tensor is not None:
                replicated = [dist.Replicate()]
                input_placements = [self._placements, *[replicated] * (len(inputs) - 1)]
                inputs = [self._distributed(tensor, p) for tensor, p in zip(inputs, input_placements)]
                parameters = [self._distributed(tensor, p) for tensor, p in zip(parameters, self._parameter_placements)]
            context = iter(inputs[1:])
            own = [slot.parameter for slot in self._slots]
            self._put(parameters)
            try:
                y = self._train_block(inputs[0], *(next(context) if there else None for there in present))
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
    """Remove layer names from reshards. Layers write their names on the operations they make, and Paddle 3.3.1 later
    rejects a reshard with a name."""
    for operation in paddle.static.default_main_program().global_block().ops:
        if operation.name() == "dist_op.reshard" and operation.has_attr("struct_name"):
            operation.erase_attr("struct_name")


_LAYER_ATTRIBUTES = frozenset(vars(nn.Layer()))


def _structure(layer: Any) -> Hashable:
    """Everything of a layer that its program depends on: all but the values of its parameters."""
    modules = []
    compiled = tuple(layer.attention_modules) or ("",)
    for name, module in layer.named_sublayers(include_self=True):
        if name and not f"{name}.".startswith(tuple(f"{part}." if part else part for part in compiled)):
            continue
        # executions are around the program, not inside of it
        settings = sorted(
            (key, value)
            for key, value in vars(module).items()
            if key not in _LAYER_ATTRIBUTES and not isinstance(value, LayerExecution)
        )
        hooks = tuple(map(_kind_of, (*module._forward_pre_hooks.values(), *module._forward_post_hooks.values())))
        buffers = tuple((key, id(value)) for key, value in module._buffers.items() if value is not None)
        plain = tuple((key, value if isinstance(value, Hashable) else id(value)) for key, value in settings)
        modules.append((name, type(module), hooks, buffers, plain))
    return tuple(modules), tuple((s.name, tuple(s.parameter.shape), s.parameter.dtype) for s in _slots(layer))


def _kind_of(hook: Any) -> Hashable:
    """Identity of a hook: hooks of llmsuite with one name do the same, hooks from elsewhere may not."""
    return hook.__qualname__ if is_own(hook) else id(hook)
