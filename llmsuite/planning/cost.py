"""FLOPs and time of a step: FLOPs from the matrices, a range of times from a device's data sheet.

A time is a range because two things are not known before a run: the fraction of a device's peak FLOPS its kernels
reach, and the fraction of a link's bandwidth its collectives reach. `FAST` and `SLOW` are the assumed bounds of both;
`llmsuite plan` prints them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from llmsuite.adapters.prefix_shapes import INNER, NETWORK, OUTER
from llmsuite.base.errors import UserError
from llmsuite.models.shape_spec import GatedDelta, GeluMLP, GroupedQuery, Latent, LayerSpec, MoE, ShapeSpec
from llmsuite.parallel.mesh import DP, EXPERT, GROUP_AXES, LOADER_RANKS, MODEL, TENSOR, TIED, Mesh
from llmsuite.planning.activations import MicroBatch
from llmsuite.planning.communication import PIPELINE, Message
from llmsuite.planning.head import recomputes_logits
from llmsuite.planning.layout import Layout
from llmsuite.planning.teacher import Teacher
from llmsuite.recipe.plans import TrainPlan


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A device and its links."""

    flops: float
    """Peak of dense bf16 matrix products, FLOP/s."""
    memory: float
    """Bytes of device memory."""
    local: float
    """Bytes/s from one device to another of the same machine, one way."""
    network: float
    """Bytes/s from a device to a device of another machine, one way."""
    memory_bandwidth: float | None = None
    """Bytes/s from device memory."""


HARDWARE = {
    # NVIDIA's data sheets: dense bf16, NVLink one way, memory; one 400 Gb/s (H) or 200 Gb/s (A) port a device
    "h100": Hardware(989e12, 80e9, 450e9, 50e9, 3.35e12),
    "h800": Hardware(989e12, 80e9, 200e9, 50e9, 3.35e12),
    "h200": Hardware(989e12, 141e9, 450e9, 50e9, 4.8e12),
    "a100": Hardware(312e12, 80e9, 300e9, 25e9, 2.039e12),
    "a800": Hardware(312e12, 80e9, 200e9, 25e9, 2.039e12),
}


MEMORY_LEFT = 2 << 30
"""Bytes of a device that its driver and NCCL take, and freed memory in pieces that no later tensor fits into."""
HOST_LINK = 50e9
"""Bytes/s between a device and its host, over PCIe 5."""
NAMES = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H800": "h800",
    "NVIDIA H200": "h200",
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-PCIE-40GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA A800-SXM4-80GB": "a800",
    "NVIDIA A800 80GB PCIe": "a800",
}
"""Devices of `HARDWARE` by the names that their drivers report, those with the peak of the table only: an H100 with a
PCIe connector has a lower one."""


def peak_flops(device_name: str | None, precision: str) -> float | None:
    """Peak of a device's matrix products in FLOP/s, by the name that its driver reports; None where it is unknown, and
    in float32, whose peak is another one."""
    if device_name not in NAMES or precision not in ("bf16", "fp16"):
        return None
    return HARDWARE[NAMES[device_name]].flops


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Fractions of the peaks that a step reaches."""

    flops: float
    bandwidth: float


FAST = Efficiency(0.55, 0.8)
SLOW = Efficiency(0.3, 0.4)


def hardware(name: str | None, **given: float | None) -> Hardware | None:
    """A device by name, with `given` figures instead of its own; None when too little is given to compute a time.

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


def layer_flops(layer: LayerSpec, hidden: int, batch: MicroBatch, prefix: int = 0) -> float:
    """FLOPs of a layer's forward pass, over all ranks: 2 for each weight a token is multiplied with, plus attention, of
    which a causal kernel computes half of the pairs of tokens. Attention also computes with `prefix` more tokens
    (prefix tuning), which are not multiplied with matrices."""
    length = float(batch.length + prefix)
    unseen = max(length - layer.window, 0.0) if layer.window else 0.0
    attention = attention_width(layer) * batch.rows * (length**2 - unseen**2)
    return 2.0 * token_weights(layer, hidden) * batch.tokens + attention


def token_weights(layer: LayerSpec, hidden: int) -> float:
    """Number of weights of a layer that a token is multiplied with; of linear attention also that of the numbers of its
    state and its chunk."""
    what = layer.attention
    mlp = layer.mlp
    if isinstance(what, Latent):
        queries = what.heads * (what.nope + what.rope)
        first = hidden * queries if what.q_rank is None else what.q_rank * (hidden + queries)
        weights = first + hidden * (what.kv_rank + what.rope)
        weights += what.kv_rank * what.heads * (what.nope + what.value) + what.heads * what.value * hidden
    elif isinstance(what, GatedDelta):
        channels = 2 * what.key_width + what.width
        weights = hidden * (channels + 2 * what.width + 2 * what.heads) + what.taps * channels
        weights += what.heads * _delta_products(what)
    else:
        assert isinstance(what, GroupedQuery)
        weights = hidden * what.head_size * (2 * what.heads + 2 * what.kv_heads)
        if what.gated:
            weights += hidden * what.head_size * what.heads
    if isinstance(mlp, MoE):
        weights += hidden * (3 * (mlp.chosen * mlp.width + mlp.shared_width) + mlp.experts)
    else:
        weights += hidden * mlp.width * (2 if isinstance(mlp, GeluMLP) else 3)
    if layer.is_mtp:
        weights += 2 * hidden * hidden
    return float(weights)


def _delta_products(what: GatedDelta) -> int:
    """Products of a token in a head of the gated delta rule: with the keys of its chunk twice and with the values, with
    half of them in the triangular system, and with the state three times (`models.delta_rule`)."""
    both = what.key_size + what.head_size
    return what.chunk * (what.key_size + both) + what.chunk * both // 2 + 3 * what.key_size * what.head_size


def attention_width(layer: LayerSpec) -> int:
    """FLOPs of a layer's attention for each square of a length in tokens: 2 for each of the two products of each
    element of a head, of half of the pairs of tokens. 0 for linear attention."""
    what = layer.attention
    if isinstance(what, GatedDelta):
        return 0
    if isinstance(what, Latent):
        return what.heads * (what.nope + what.rope + what.value)
    return 2 * what.heads * what.head_size


def head_flops(shape_spec: ShapeSpec, batch: MicroBatch) -> float:
    """FLOPs of the logits."""
    return logit_flops(shape_spec) * batch.supervised


def logit_flops(shape_spec: ShapeSpec) -> float:
    """FLOPs of the logits of a token."""
    return 2.0 * shape_spec.hidden * shape_spec.vocabulary


@dataclasses.dataclass(frozen=True)
class PartCost:
    """FLOPs of a part of the model for one micro-batch, over the ranks of a tensor parallel group."""

    forward: float
    backward: float


def part_costs(layout: Layout, train_plan: TrainPlan, shape_spec: ShapeSpec, batch: MicroBatch) -> list[PartCost]:
    """FLOPs of each part. A backward pass costs two forward passes (one if only adapters are trained), plus recomputed
    layers, plus the logits of a trained head if its loss is computed in chunks. A teacher runs forward with the last
    part."""
    engine = layout.parallel_plan.engine
    model_plan = layout.model_plan
    last = len(layout.bounds) - 2
    prefix = model_plan.prefix.tokens or 0
    for_prefix = prefix_flops(layout)
    times = 1 if model_plan.is_frozen else 2
    costs = []
    for part in range(last + 1):
        each = {
            i: layer_flops(shape_spec.layers[i], shape_spec.hidden, batch, prefix) + for_prefix
            for i in layout.layers_of(part)
        }
        again = sum(f for i, f in each.items() if engine.recomputes_layer(i))
        head = 0.0
        if part == last and not model_plan.is_scored:
            head = head_flops(shape_spec, batch)
        forward = sum(each.values()) + head
        taught = taught_head = 0.0
        if part == last and train_plan.teacher is not None:
            spec = Teacher(layout, train_plan).shape_spec
            taught_head = head_flops(spec, batch)
            taught = sum(layer_flops(layer, spec.hidden, batch) for layer in spec.layers) + taught_head
        if recomputes_logits(layout, batch, train_plan.profile.has_several_losses):
            again += head + taught_head
        backward = times * forward + again
        if model_plan.is_frozen and layout.trains_head:
            backward += head
        costs.append(PartCost(forward + taught, backward))
    return costs


def prefix_flops(layout: Layout) -> float:
    """FLOPs with which the network that makes prefixes makes that of one layer, for a micro-batch; 0 without one."""
    sizes = {n: math.prod(shape) for n, shape in layout.shapes.items() if n.rpartition(".")[2] in (INNER, *OUTER)}
    shared = sizes.get(f"{NETWORK}.{INNER}", 0)  # a matrix that all layers share
    made = (sum(sizes.values()) - shared) / layout.num_layers
    # each of these parameters is multiplied with each token of the prefix
    return 2.0 * (layout.model_plan.prefix.tokens or 0) * (shared + made)


def wire_bytes(message: Message, size: int) -> float:
    """Bytes that a rank sends for a message in a group of `size` ranks; collectives are assumed to be rings."""
    factor = {
        "all_reduce": 2 * (size - 1) / size,
        "reduce_scatter": (size - 1) / size,
        "all_to_all": (size - 1) / size,
        "all_gather": size - 1,
    }.get(message.operation, 1)
    return float(message.total_bytes * factor)


@dataclasses.dataclass(frozen=True)
class CommunicationTime:
    """Seconds of a step that a rank spends in collectives."""

    in_passes: float
    """Along tp and ep, inside forward and backward passes."""
    at_the_end: float
    """Gradients and updated parameters."""
    pipeline_message: float
    """One activation to the next pipeline stage."""


def communication_time(
    layout: Layout, counts: Mapping[Message, int], device: Hardware, efficiency: Efficiency
) -> CommunicationTime:
    """Time of a rank's messages. Only messages to pipeline neighbours are assumed to overlap with compute."""
    in_passes = at_the_end = pipeline_message = 0.0
    for message, count in counts.items():
        size = axis_size(layout, message)
        seconds = wire_bytes(message, size) / (bandwidth(layout, message, device) * efficiency.bandwidth)
        if message.axis == PIPELINE:
            pipeline_message = max(pipeline_message, seconds)
        elif message.axis in (TENSOR, EXPERT):
            in_passes += seconds * count
        else:
            at_the_end += seconds * count
    return CommunicationTime(in_passes, at_the_end, pipeline_message)


def axis_size(layout: Layout, message: Message) -> int:
    """Number of ranks in a message's group."""
    degrees = layout.parallel_plan.degrees
    if message.axis == EXPERT:
        return degrees.ep
    if message.axis in GROUP_AXES:
        mesh = Mesh(degrees, 0)
        return (mesh.expert_mesh if message.is_expert else mesh).group_size(message.axis)
    return {PIPELINE: 2, TIED: 2, LOADER_RANKS: degrees.num_ranks // degrees.pp * 2}.get(
        message.axis, degrees.num_ranks
    )


def bandwidth(layout: Layout, message: Message, device: Hardware) -> float:
    """Bytes/s of the slowest link in a group: that of the network if its ranks are on several machines."""
    degrees = layout.parallel_plan.degrees
    per_machine = layout.parallel_plan.devices_per_machine
    size = axis_size(layout, message)
    neighbours = 1 if message.axis == TENSOR else degrees.tp  # how far apart the group's ranks are
    if message.axis in (PIPELINE, TIED):
        neighbours = degrees.num_ranks // degrees.pp
    elif message.axis == MODEL:
        neighbours = 1
        if degrees.pp > 1:
            neighbours = degrees.num_ranks // size
    elif message.axis == DP:
        neighbours *= degrees.num_data_ranks // axis_size(layout, message)
    if neighbours * size <= per_machine:
        return device.local
    return device.network


def total_bytes(counts: Mapping[Message, int]) -> int:
    """Bytes of all messages of a rank."""
    return sum(m.total_bytes * count for m, count in counts.items())
