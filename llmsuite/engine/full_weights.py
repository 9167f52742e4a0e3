"""Full weights of a run, gathered from all ranks and with adapters merged: for generation during training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import paddle

from llmsuite.adapters.parameters import is_factor, parameter_of
from llmsuite.base.typing import Tensor
from llmsuite.contract.schema.lora import LoraSection
from llmsuite.engine.build import BuiltModel
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.pipeline_split import owner_stage
from llmsuite.parallel.vocabulary import without_padding
from llmsuite.recipe.plans import ModelPlan

Read = Callable[[str], Tensor]


@paddle.no_grad()
def full_weights(model_plan: ModelPlan, built: BuiltModel, dtype: str, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the full parameters by name, with adapters merged; they are gathered one after the other.

    Gathering is collective: every rank of the run has to exhaust the iterator. A parameter that is not sharded is the
    model's own tensor, not a copy.

    Args:
        model_plan: plan of the model; the base model of adapters is not quantised.
        built: the model.
        dtype: dtype of the parameters.
        mesh: coordinates of this rank.
    """
    shard_plan = model_plan.shard_plan
    shapes = built.every_shape
    shards = {shard.name: shard for shard in built.every_shard}

    def read(name: str) -> Tensor:
        owner = owner_stage(name, shard_plan, built.bounds, mesh.degrees.pp)
        value = None
        if owner == mesh.coordinate["pp"]:
            value = without_padding(shards[name].gather_parameter(), shapes[name])
            if value.dtype == paddle.bfloat16 and dtype == "float32":  # frozen parameters, see `Strategy.bf16_frozen`
                value = value.astype(dtype)
        parameter_dtype = "float32" if shard_plan.is_gate_bias(name) else dtype
        # only one pipeline stage has the parameter
        return collective.broadcast_from_stage(value, shapes[name], parameter_dtype, owner)

    adapted = {name.rpartition(".")[0] for name in shapes if parameter_of(name) is not None}
    for name in shapes:
        if is_factor(name):
            continue
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module in adapted:
            yield name, _merged(read, module, model_plan.lora, shapes.keys())
        else:
            yield name, read(name)


def _merged(read: Read, module: str, lora: LoraSection, names: Collection[str]) -> Tensor:
    """Merge the adapter of a matrix. Computed in float32 and rounded once, to the dtype of W."""
    config = lora.adapter_config
    weight = read(f"{module}.weight")
    kinds = [kind for kind in config.method.parameters if f"{module}.{kind}" in names]
    parameters = {kind: read(f"{module}.{kind}").astype("float32") for kind in kinds}
    return config.method.merged(weight, parameters, config.scale).astype(weight.dtype)
