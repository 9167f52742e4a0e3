"""The weights of a run as one whole model without adapters, whatever its strategy: for generation beside training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import paddle

from llmsuite.models.shard_plan import (
    BEHIND,
    BETWEEN,
    FIRST_FACTOR,
    KRON_OUTER,
    MAGNITUDE,
    MIXER,
    SECOND_FACTOR,
    SQUARE,
    START_FIRST,
    START_SECOND,
    STRUCTURES,
    WHOLE,
)
from llmsuite.models.structured import kron_update, mora_update
from llmsuite.models.targets import is_factor
from llmsuite.parallel import collective
from llmsuite.parallel.cut import owner_stage
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.vocabulary import without_padding
from llmsuite.recipe.resolve import RunPlan
from llmsuite.train.build import BuiltModel
from llmsuite.typing import Tensor

Read = Callable[[str], Tensor]


@paddle.no_grad()
def whole_weights(plan: RunPlan, built: BuiltModel, dtype: str, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by its name, whole, adapters merged into their matrices; one is gathered after the other.

    Every rank of the run has to go through all of them. What is not cut is the model's own tensor, not a copy.

    Args:
        plan: of the run; the base of adapters is not quantised.
        built: the model.
        dtype: of the parameters.
        mesh: this rank's place.
    """
    shard_plan, shapes = plan.family.shard_plan or WHOLE, built.every_shape
    shards = {shard.name: shard for shard in built.every_shard}

    def read(name: str) -> Tensor:
        owner = owner_stage(name, shard_plan, built.bounds, mesh.degrees.pp)
        value = None
        if owner == mesh.coordinate["pp"]:
            value = without_padding(shards[name].gather_parameter(), shapes[name])
            if value.dtype == paddle.bfloat16 and dtype == "float32":  # see `Strategy.narrow`
                value = value.astype(dtype)
        return collective.from_stage(value, shapes[name], "float32" if shard_plan.is_gate_bias(name) else dtype, owner)

    for name in shapes:
        if is_factor(name):
            continue
        module, _, kind = name.rpartition(".")
        is_adapted = kind == "weight" and any(
            f"{module}.{own}" in shapes for own in (FIRST_FACTOR, BETWEEN, SQUARE, KRON_OUTER)
        )
        yield name, _merged(read, module, plan, shapes.keys()) if is_adapted else read(name)


def _merged(read: Read, module: str, plan: RunPlan, names: Collection[str]) -> Tensor:
    """W + scale A M B of an adapted matrix, for DoRA with the lengths of its columns, for PiSSA and LoRA-GA without
    what they began with, and of MoRA and LoKr W with their update; see `models.lora_layers`."""
    lora = plan.recipe.lora
    weight = read(f"{module}.weight")
    if kinds := [kind for kind in STRUCTURES if f"{module}.{kind}" in names]:
        own = [read(f"{module}.{kind}").astype("float32") for kind in kinds]
        update = _structured_update(own, weight.shape, lora.scale)
        return (weight.astype("float32") + update).astype(weight.dtype)
    is_vera = f"{module}.{BETWEEN}" in names
    pair = (START_FIRST, START_SECOND) if is_vera else (FIRST_FACTOR, SECOND_FACTOR)
    first, second = (read(f"{module}.{kind}").astype("float32") for kind in pair)
    if f"{module}.{MIXER}" in names:
        first = paddle.matmul(first, read(f"{module}.{MIXER}").astype("float32"))
    update = paddle.matmul(first, second)
    if is_vera:
        between, behind = (read(f"{module}.{kind}").astype("float32") for kind in (BETWEEN, BEHIND))
        update = paddle.matmul(first * between, second) * behind
    elif f"{module}.{START_FIRST}" in names:
        start = (read(f"{module}.{kind}").astype("float32") for kind in (START_FIRST, START_SECOND))
        update = update - paddle.matmul(*start)
    whole = weight + update * lora.scale  # in float32
    if f"{module}.{MAGNITUDE}" in names:
        lengths = (whole.square().sum(-2) + 1e-12).sqrt()
        whole = whole * (read(f"{module}.{MAGNITUDE}").astype("float32") / lengths).unsqueeze(-2)
    return whole.astype(weight.dtype)


def _structured_update(own: Sequence[Tensor], shape: Sequence[int], scale: float) -> Tensor:
    """What MoRA (of one parameter) or LoKr adds to a matrix [I, O], or to each of a stack."""
    if len(shape) > 2:
        return paddle.stack([_structured_update(of_one, shape[1:], scale) for of_one in zip(*own)])
    every = paddle.eye(shape[0])
    return mora_update(every, own[0], shape[1]) if len(own) == 1 else kron_update(every, *own) * scale
