"""Memory and time of generation on a rank, in rollouts and evaluations: an unsharded model and its KV cache; and the
weights of reward and reference models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llmsuite.adapters.parameters import is_factor
from llmsuite.base.safe_files import is_file
from llmsuite.models.shape_spec import GatedDelta, GatedMLP, GroupedQuery, Latent, LayerSpec, ShapeSpec
from llmsuite.parallel.mesh import Mesh
from llmsuite.planning.activations import MicroBatch
from llmsuite.planning.cost import Efficiency, Hardware, layer_flops
from llmsuite.planning.layout import Layout, LocalParameter, element_bytes
from llmsuite.recipe.plans import ParallelPlan, TrainPlan
from llmsuite.recipe.shape import local_weights

_COPIES = 2
"""The cache is copied where completions join it or leave it."""


def decoder_bytes(layout: Layout, train_plan: TrainPlan, shape_spec: ShapeSpec, mesh: Mesh) -> float:
    """Bytes of the weights for generation, unsharded on each rank that loads data; 0 for a stage that generates
    nothing, or where servers sample."""
    if not _generates(train_plan, mesh):
        return 0.0
    return _weight_bytes(layout, shape_spec)


def stores_matrices(parallel_plan: ParallelPlan, shape_spec: ShapeSpec) -> bool:
    """True where the model that samples on a rank has its matrices in bfloat16, see `AS_TRAINED` in
    `inference.load`."""
    backend = parallel_plan.device.factory()
    return backend.has_bf16_rollout_weights(parallel_plan.engine.precision) and shape_spec.is_plain


def reward_bytes(parallel_plan: ParallelPlan, train_plan: TrainPlan, mesh: Mesh) -> float:
    """Bytes of the weights of a reward model, unsharded on each rank that scores completions."""
    if not mesh.loads_data or not train_plan.samples_in_training_processes:
        return 0.0
    return float(_reward_values(train_plan.reward) * element_bytes(parallel_plan))


def _weight_bytes(layout: Layout, shape_spec: ShapeSpec, each_token: bool = False) -> float:
    """Bytes of the weights for generation. With `each_token` only those that every token reads: of an embedding that is
    stored in addition to the head it reads a row."""
    if not stores_matrices(layout.parallel_plan, shape_spec):
        values = sum(math.prod(shape) for name, shape in layout.shapes.items() if not is_factor(name))
        if not each_token:
            values += _kept_up_values(layout.parallel_plan, shape_spec)
        return float(values * element_bytes(layout.parallel_plan))
    words = layout.model_shapes[f"{layout.shard_plan.embedding}.weight"]
    vectors = sum(math.prod(shape) for shape in layout.model_shapes.values() if len(shape) == 1)
    stored = [sizes for layer in shape_spec.layers for sizes in _stored_sizes(shape_spec.hidden, layer)]
    stored.append((shape_spec.hidden, words[0]))  # the head, also where it is tied
    parallel_plan = layout.parallel_plan
    kernels = parallel_plan.device.factory().kernels_of("packed_matmul", parallel_plan.engine.precision)
    assert kernels is not None, "see `stores_matrices`"
    num_bytes = 4 * vectors + sum(kernels.packed_bytes("bf16", inputs, outputs) for inputs, outputs in stored)
    return float(num_bytes if each_token else num_bytes + 4 * math.prod(words))


def _kept_up_values(parallel_plan: ParallelPlan, shape_spec: ShapeSpec) -> int:
    """Number of values that latent attentions hold in addition to their weights, see `keep_up_matrices` of
    `models.latent_attention`."""
    if "round_attention_input" in parallel_plan.device.factory().fused(parallel_plan.engine.precision):
        return 0
    latent = [layer.attention for layer in shape_spec.layers if isinstance(layer.attention, Latent)]
    return sum(own.kv_rank * own.heads * (own.nope + own.value) for own in latent)


def _stored_sizes(hidden: int, layer: LayerSpec) -> list[tuple[int, int]]:
    """Inputs and outputs of the stored matrices of a plain layer: queries, keys and values are one matrix, and so are
    gate and up."""
    attention = layer.attention
    mlp = layer.mlp
    assert isinstance(attention, GroupedQuery), "see `ShapeSpec.is_plain`"
    assert isinstance(mlp, GatedMLP), "likewise"
    queries, keys = (heads * attention.head_size for heads in (attention.heads, attention.kv_heads))
    return [(hidden, queries + 2 * keys), (queries, hidden), (hidden, 2 * mlp.width), (mlp.width, hidden)]


def _reward_values(reward: Any) -> int:
    """Number of parameters of the reward model, which is also unsharded; 0 where there is none, or its files are not on
    this machine."""
    from llmsuite.checkpoint.tensors import TensorFiles

    weights = None
    if reward is not None and "model" in reward.functions:
        weights = reward.model.weights
    if weights is None or not is_file(local_weights(weights) / "config.json"):
        return 0
    files = TensorFiles(local_weights(weights), "model")
    return sum(math.prod(files.spec(name).shape) for name in files.names)


def _generates(train_plan: TrainPlan, mesh: Mesh) -> bool:
    """True where a rank samples completions of rollouts, or generates in evaluations."""
    return mesh.loads_data and (train_plan.samples_in_training_processes or _generates_in_evaluation(train_plan))


def _generates_in_evaluation(train_plan: TrainPlan) -> bool:
    return train_plan.generation.max_new_tokens is not None


def reference_bytes(train_plan: TrainPlan, held: Sequence[LocalParameter]) -> float:
    """Bytes of the weights of the reference model, sharded as the trained weights; 0 for a stage without one."""
    if all(prepass.kind != "reference" for prepass in train_plan.profile.prepasses):
        return 0.0
    return float(sum(h.parameter_bytes for h in held))


def cache_bytes(
    parallel_plan: ParallelPlan, train_plan: TrainPlan, max_length: int, shape_spec: ShapeSpec, mesh: Mesh
) -> float:
    """Bytes of the keys, values and states of the completions that a rank generates together, all of the maximum
    length."""
    if not _generates(train_plan, mesh):
        return 0.0
    rows = 0
    if _generates_in_evaluation(train_plan):
        rows = train_plan.generation.batch_size
    if train_plan.samples_in_training_processes:
        rows = max(rows, _share(train_plan, mesh)[1])
    of_row = max_length * _token_bytes(parallel_plan, shape_spec) + _state_bytes(parallel_plan, shape_spec)
    return float(_COPIES * rows * of_row)


def _share(train_plan: TrainPlan, mesh: Mesh) -> tuple[int, int]:
    """Number of prompts of a rank in a rollout, and number of completions that it samples together."""
    rollout = train_plan.rollout
    prompts = -(-train_plan.section.global_batch_size * train_plan.profile.updates // len(mesh.loader_ranks))
    return prompts, min(max(rollout.batch_size, rollout.num_generations), prompts * rollout.num_generations)


def _token_bytes(parallel_plan: ParallelPlan, shape_spec: ShapeSpec) -> int:
    """Bytes of a token in the cache; the states of linear attention do not grow with it (`_state_bytes`)."""
    each = 0
    for layer in shape_spec.layers:
        attention = layer.attention
        if isinstance(attention, GatedDelta):
            continue
        if isinstance(attention, GroupedQuery):
            each += 2 * attention.kv_heads * attention.head_size
        else:  # the latent from which keys and values are computed, and the rotary part of the keys, for all heads
            each += attention.kv_rank + attention.rope
    return each * element_bytes(parallel_plan)


def _state_bytes(parallel_plan: ParallelPlan, shape_spec: ShapeSpec) -> int:
    """Bytes of the states of linear attention of a text: matrices in float32, and inputs of the convolutions."""
    each = 0
    for layer in shape_spec.layers:
        what = layer.attention
        if isinstance(what, GatedDelta):
            each += 4 * what.key_size * what.width
            each += (what.taps - 1) * (2 * what.key_width + what.width) * element_bytes(parallel_plan)
    return each


def rollout_seconds(
    layout: Layout, train_plan: TrainPlan, max_length: int, shape_spec: ShapeSpec, device: Hardware, by: Efficiency
) -> float | None:
    """Seconds of a step that a rank samples, when its prompts and completions have the maximum length. None where it
    does not sample, or the speed of its memory is not known.

    The prefill takes as long as a forward pass of training. Decoding a token of all completions in the batch takes as
    long as its products, or as reading weights and cache from memory: the longer of both.
    """
    if not train_plan.samples_in_training_processes or device.memory_bandwidth is None:
        return None
    num = train_plan.rollout.num_generations
    longest = train_plan.rollout.max_completion_length
    mesh = Mesh(layout.parallel_plan.degrees, 0)
    prompts, rows = _share(train_plan, mesh)
    before = max_length - longest
    prefill = _row_flops(shape_spec, before)
    full = _row_flops(shape_spec, max_length)
    decode = num * (full - prefill + longest * 2.0 * shape_spec.hidden * shape_spec.vocabulary)
    times = prompts * num * longest / rows
    cached = rows * (before + longest / 2) * _token_bytes(layout.parallel_plan, shape_spec)
    cached += rows * _state_bytes(layout.parallel_plan, shape_spec)
    read_bytes = times * (_weight_bytes(layout, shape_spec, each_token=True) + cached)
    fetched = read_bytes / (device.memory_bandwidth * by.bandwidth)
    speed = device.flops * by.flops
    seconds = float(prompts * prefill / speed + max(prompts * decode / speed, fetched))
    return seconds * train_plan.profile.on_policy / train_plan.profile.updates


def _row_flops(shape_spec: ShapeSpec, length: int) -> float:
    """FLOPs of a forward pass of one row of `length` tokens, without logits."""
    row = MicroBatch(1, length, 0)
    return sum(layer_flops(layer, shape_spec.hidden, row) for layer in shape_spec.layers if not layer.is_mtp)
