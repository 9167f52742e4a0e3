"""Arithmetic and time of a step: FLOPs from the matrices, a range of times from a device's figures.

A time is a range because two things are not known before a run: which part of a device's peak its kernels reach, and
which part of a link's bandwidth collectives do. What is assumed of both, `FAST` and `SLOW`, is said by the command.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from llmsuite.errors import UserError
from llmsuite.models.anatomy import Anatomy, GroupedQuery, Latent, LayerAnatomy, MoE, Plain
from llmsuite.planning.activations import Pass
from llmsuite.planning.communication import AXES, PIPELINE, TENSOR, Message
from llmsuite.planning.layout import Layout


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A device and its links."""

    flops: float
    """Peak of dense bf16 products, FLOP/s."""
    memory: float
    """Bytes."""
    local: float
    """Bytes/s from a device to another of its machine, one way."""
    network: float
    """Bytes/s from a device to one of another machine, one way."""


HARDWARE = {
    # NVIDIA's data sheets: dense bf16, NVLink one way; one 400 Gb/s (H) or 200 Gb/s (A) port a device
    "h100": Hardware(989e12, 80e9, 450e9, 50e9),
    "h800": Hardware(989e12, 80e9, 200e9, 50e9),
    "h200": Hardware(989e12, 141e9, 450e9, 50e9),
    "a100": Hardware(312e12, 80e9, 300e9, 25e9),
    "a800": Hardware(312e12, 80e9, 200e9, 25e9),
}


@dataclasses.dataclass(frozen=True)
class Reached:
    """Parts of the peaks that a step reaches."""

    flops: float
    bandwidth: float


FAST, SLOW = Reached(0.55, 0.8), Reached(0.3, 0.4)


def hardware(name: str | None, **given: float | None) -> Hardware | None:
    """A device by name, with single figures of one's own; None when too little is given for a time.

    Raises:
        UserError: there is no such device.
    """
    if name is not None and name not in HARDWARE:
        raise UserError(
            f"--hardware: {name!r} is not known; known: {', '.join(HARDWARE)}; or give --flops and --bandwidth"
        )
    own = {key: value for key, value in given.items() if value is not None}
    if name is not None:
        return dataclasses.replace(HARDWARE[name], **own)
    if "flops" not in own or "network" not in own:
        return None
    return Hardware(**{"memory": math.inf, "local": own["network"], **own})


def layer_flops(layer: LayerAnatomy, hidden: int, batch: Pass) -> float:
    """Of a forward pass of a layer, over all ranks: 2 for each weight a token meets, and the products of attention,
    of whose pairs of tokens a causal kernel computes half."""
    what, mlp = layer.attention, layer.mlp
    if isinstance(what, Latent):
        queries = what.heads * (what.nope + what.rope)
        first = hidden * queries if what.q_rank is None else what.q_rank * (hidden + queries)
        weights = first + hidden * (what.kv_rank + what.rope)
        weights += what.kv_rank * what.heads * (what.nope + what.value) + what.heads * what.value * hidden
        each = what.heads * (what.nope + what.rope + what.value)
    else:
        assert isinstance(what, GroupedQuery)
        weights = hidden * what.head_size * (2 * what.heads + 2 * what.kv_heads)
        each = 2 * what.heads * what.head_size
    if isinstance(mlp, MoE):
        weights += hidden * (3 * (mlp.chosen * mlp.width + mlp.shared_width) + mlp.experts)
    else:
        weights += hidden * mlp.width * (2 if isinstance(mlp, Plain) else 3)
    return 2.0 * weights * batch.tokens + each * batch.rows * float(batch.length) ** 2


def head_flops(anatomy: Anatomy, batch: Pass) -> float:
    """Of the logits."""
    return 2.0 * anatomy.hidden * anatomy.vocabulary * batch.supervised


@dataclasses.dataclass(frozen=True)
class PartCost:
    """FLOPs of a part of the model for one micro-batch, over the ranks of a tensor parallel group."""

    forward: float
    backward: float


def part_costs(layout: Layout, anatomy: Anatomy, batch: Pass) -> list[PartCost]:
    """Of each part. A backward pass is two forward ones, with adapters one, and what is computed again."""
    engine, last = layout.plan.recipe.engine, len(layout.bounds) - 2
    times = 1 if layout.plan.recipe.lora.rank is not None else 2
    costs = []
    for part in range(last + 1):
        each = {i: layer_flops(anatomy.layers[i], anatomy.hidden, batch) for i in layout.layers_of(part)}
        again = sum(f for i, f in each.items() if engine.computes_again(i))
        head = head_flops(anatomy, batch) if part == last and layout.plan.stage.head != "score" else 0.0
        forward = sum(each.values()) + head
        costs.append(PartCost(forward, times * forward + again))
    return costs


def wire_bytes(message: Message, size: int) -> float:
    """What a rank puts on the wire: of ring collectives the parts that travel, between so many ranks."""
    payload = math.prod(message.shape) * message.num_bytes
    factor = {
        "all_reduce": 2 * (size - 1) / size,
        "reduce_scatter": (size - 1) / size,
        "all_to_all": (size - 1) / size,
        "all_gather": size - 1,
    }.get(message.operation, 1)
    return float(payload * factor)


@dataclasses.dataclass(frozen=True)
class CommunicationTime:
    """Seconds of a step that a rank spends in collectives."""

    in_passes: float
    """Along tp and ep, between the products of a pass."""
    at_the_end: float
    """Gradients and updated parameters."""
    a_message: float
    """Of one activation to a neighbour in the pipeline."""


def communication_time(
    layout: Layout, counts: Mapping[Message, int], device: Hardware, reached: Reached
) -> CommunicationTime:
    """Nothing is taken to overlap with arithmetic, but for what goes to neighbours in a pipeline."""
    in_passes = at_the_end = a_message = 0.0
    for message, count in counts.items():
        size = axis_size(layout, message)
        seconds = wire_bytes(message, size) / (bandwidth(layout, message, device) * reached.bandwidth)
        if message.axis == PIPELINE:
            a_message = max(a_message, seconds)
        elif message.axis in (TENSOR, "ep"):
            in_passes += seconds * count
        else:
            at_the_end += seconds * count
    return CommunicationTime(in_passes, at_the_end, a_message)


def axis_size(layout: Layout, message: Message) -> int:
    """Ranks of a message's group."""
    degrees = layout.plan.degrees
    if message.axis in AXES:
        ep = degrees.ep if message.of_experts else 1
        sharding = max(1, degrees.sharding // ep)
        dp = degrees.num_data_ranks // (ep * sharding)
        return {"tp": degrees.tp, "ep": degrees.ep, "sharding": sharding, "dp": dp, "data": sharding * dp}[message.axis]
    return {"pp": 2, "tied": 2, "readers": degrees.num_ranks // degrees.pp * 2}.get(message.axis, degrees.num_ranks)


def bandwidth(layout: Layout, message: Message, device: Hardware) -> float:
    """Of the slowest link between the ranks of a group: that of the network as soon as they are on two machines."""
    degrees, per_machine = layout.plan.degrees, layout.plan.recipe.launch.num_devices
    size = axis_size(layout, message)
    neighbours = 1 if message.axis == TENSOR else degrees.tp  # how far apart the group's ranks are
    if message.axis in (PIPELINE, "tied"):
        neighbours = degrees.num_ranks // degrees.pp
    elif message.axis == "dp":
        neighbours *= degrees.num_data_ranks // axis_size(layout, message)
    return device.local if neighbours * size <= per_machine else device.network


def total_bytes(counts: Mapping[Message, int], axes: Iterable[str] | None = None) -> int:
    """What a rank gives to all of them."""
    return sum(
        math.prod(m.shape) * m.num_bytes * count for m, count in counts.items() if axes is None or m.axis in axes
    )
