"""What a rank needs beside training: a whole model, its cache and time for generation, in rollouts and evaluations; and
the weights of reward and reference models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llmsuite.models.anatomy import Anatomy, GatedMLP, GroupedQuery, Latent, LayerAnatomy
from llmsuite.models.targets import is_factor
from llmsuite.parallel.mesh import Mesh
from llmsuite.planning.activations import MicroBatch
from llmsuite.planning.cost import Efficiency, Hardware, layer_flops
from llmsuite.planning.layout import Layout, LocalParameter, element_bytes
from llmsuite.recipe.resolve import RunPlan
from llmsuite.recipe.shape import local_weights
from llmsuite.regular import is_file

_COPIES = 2
"""The cache is copied where completions join it or leave it."""
_STORED_BYTES, _TILE = 2, 32
"""Bytes of a number of a stored matrix, and outputs of a tile of it: those of `inference.packing` for bfloat16."""


def decoder_bytes(layout: Layout, anatomy: Anatomy, mesh: Mesh) -> float:
    """The weights for generation, whole on each rank that reads data; 0 for a stage that generates nothing, or where
    servers draw."""
    plan = layout.plan
    if not _generates(plan, mesh):
        return 0.0
    return _weight_bytes(layout, anatomy)


def stores_matrices(plan: RunPlan, anatomy: Anatomy) -> bool:
    """Whether what draws on a rank has its matrices in bfloat16, see `AS_TRAINED` in `inference.load`."""
    return plan.device.factory().stores_as_trained(plan.recipe.engine.precision) and anatomy.is_plain


def reward_bytes(plan: RunPlan, mesh: Mesh) -> float:
    """The weights of a reward model, whole on each rank that scores completions."""
    if not mesh.reads_data or not _draws_here(plan):
        return 0.0
    return float(_reward_values(plan.recipe) * element_bytes(plan))


def _weight_bytes(layout: Layout, anatomy: Anatomy, each_token: bool = False) -> float:
    """Bytes of the weights for generation. With `each_token` those that every token reads: of an embedding beside the
    stored head it reads a row."""
    if not stores_matrices(layout.plan, anatomy):
        values = sum(math.prod(shape) for name, shape in layout.shapes.items() if not is_factor(name))
        values += 0 if each_token else _kept_up_values(layout.plan, anatomy)
        return float(values * element_bytes(layout.plan))
    words = layout.model_shapes[f"{layout.shard_plan.embedding}.weight"]
    vectors = sum(math.prod(shape) for shape in layout.model_shapes.values() if len(shape) == 1)
    stored = [sizes for layer in anatomy.layers for sizes in _stored_sizes(anatomy.hidden, layer)]
    stored.append((anatomy.hidden, words[0]))  # the head, also where it is tied
    num_bytes = 4 * vectors + sum(_STORED_BYTES * inputs * _tiled(outputs) for inputs, outputs in stored)
    return float(num_bytes if each_token else num_bytes + 4 * math.prod(words))


def _kept_up_values(plan: RunPlan, anatomy: Anatomy) -> int:
    """Numbers that latent attentions hold beside their weights, see `keep_up_matrices` of `models.deepseek.layers`."""
    if "attention_operand" in plan.device.factory().kernels(plan.recipe.engine.precision):
        return 0
    latent = [layer.attention for layer in anatomy.layers if isinstance(layer.attention, Latent)]
    return sum(own.kv_rank * own.heads * (own.nope + own.value) for own in latent)


def _stored_sizes(hidden: int, layer: LayerAnatomy) -> list[tuple[int, int]]:
    """Inputs and outputs of the matrices that a plain layer is stored in: queries, keys and values are one, and so are
    gate and up."""
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, GroupedQuery), "see `Anatomy.is_plain`"
    assert isinstance(mlp, GatedMLP), "likewise"
    queries, keys = (heads * attention.head_size for heads in (attention.heads, attention.kv_heads))
    return [(hidden, queries + 2 * keys), (queries, hidden), (hidden, 2 * mlp.width), (mlp.width, hidden)]


def _tiled(outputs: int) -> int:
    """Outputs of a stored matrix with those that fill its last tile, see `inference.packing`."""
    return -(-outputs // _TILE) * _TILE


def _reward_values(recipe: Any) -> int:
    """Parameters of the reward model, which is whole on such a rank too; 0 where there is none, or it is not there."""
    from llmsuite.checkpoint.tensors import TensorFiles

    weights = recipe.reward.model.weights if "model" in recipe.reward.functions else None
    if weights is None or not is_file(local_weights(weights) / "config.json"):
        return 0
    files = TensorFiles(local_weights(weights), "model")
    return sum(math.prod(files.spec(name).shape) for name in files.names)


def _generates(plan: RunPlan, mesh: Mesh) -> bool:
    """Whether a rank draws completions of rollouts, or answers in evaluations."""
    return mesh.reads_data and (_draws_here(plan) or _answers(plan))


def _draws_here(plan: RunPlan) -> bool:
    return plan.rollout_engine is not None and not plan.rollout_engine.remote


def _answers(plan: RunPlan) -> bool:
    return plan.recipe.generation.max_new_tokens is not None


def reference_bytes(plan: RunPlan, held: Sequence[LocalParameter]) -> float:
    """The weights of the reference of a stage that keeps some, sharded as those that are trained."""
    if all(prepass.kind != "reference" for prepass in plan.profile.prepasses):
        return 0.0
    return float(sum(h.parameter_bytes for h in held))


def cache_bytes(layout: Layout, anatomy: Anatomy, mesh: Mesh) -> float:
    """The keys and values of the completions or answers that a rank draws at once, all as long as can be."""
    plan = layout.plan
    if not _generates(plan, mesh):
        return 0.0
    rows = plan.recipe.generation.batch_size if _answers(plan) else _share(plan, mesh)[1]
    return float(_COPIES * rows * plan.recipe.data.max_length * _token_bytes(plan, anatomy))


def _share(plan: RunPlan, mesh: Mesh) -> tuple[int, int]:
    """Prompts that a rank draws for in a rollout, and completions that it draws at once."""
    recipe: Any = plan.recipe  # whose section `rollout` only such stages have
    rollout = recipe.rollout
    prompts = -(-plan.recipe.train.global_batch_size * plan.profile.updates // len(mesh.readers))
    return prompts, min(max(rollout.batch_size, rollout.num_generations), prompts * rollout.num_generations)


def _token_bytes(plan: RunPlan, anatomy: Anatomy) -> int:
    """Bytes that a token has in the cache."""
    each = 0
    for layer in anatomy.layers:
        attention = layer.attention
        if isinstance(attention, GroupedQuery):
            each += 2 * attention.kv_heads * attention.head_size
        else:  # what keys and values are made of, and the keys' part with positions, for all heads
            each += attention.kv_rank + attention.rope
    return each * element_bytes(plan)


def rollout_seconds(layout: Layout, anatomy: Anatomy, device: Hardware, by: Efficiency) -> float | None:
    """Time a step that a rank draws, when its prompts and completions are as long as can be. None where it does not
    draw, or the speed of its memory is not known.

    Prompts are read as a training pass reads them. A token of all completions in the batch takes as long as its
    products, or as reading weights and cache from memory: the longer of both.
    """
    plan = layout.plan
    if not _draws_here(plan) or device.memory_bandwidth is None:
        return None
    recipe: Any = plan.recipe
    num, longest = recipe.rollout.num_generations, recipe.rollout.max_completion_length
    mesh = Mesh(plan.degrees, 0)
    prompts, rows = _share(plan, mesh)
    before = recipe.data.max_length - longest
    read, whole = (_row_flops(anatomy, length) for length in (before, recipe.data.max_length))
    drawn = num * (whole - read + longest * 2.0 * anatomy.hidden * anatomy.vocabulary)
    times = prompts * num * longest / rows
    cached = rows * (before + longest / 2) * _token_bytes(plan, anatomy)
    read_bytes = times * (_weight_bytes(layout, anatomy, each_token=True) + cached)
    fetched = read_bytes / (device.memory_bandwidth * by.bandwidth)
    speed = device.flops * by.flops
    return float(prompts * read / speed + max(prompts * drawn / speed, fetched)) / plan.profile.updates


def _row_flops(anatomy: Anatomy, length: int) -> float:
    """FLOPs to read one row of so many tokens, without logits."""
    row = MicroBatch(1, length, 0)
    return sum(layer_flops(layer, anatomy.hidden, row) for layer in anatomy.layers if not layer.predicts_further)
