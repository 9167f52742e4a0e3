"""Names and shapes of parameters that several families have in common. Imports no Paddle.

Our own names are HF's. In memory a linear weight is [inputs, outputs], as Paddle has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from llmsuite.models.head import head_shapes, is_tied
from llmsuite.models.hf_tensors import HfTensors
from llmsuite.models.mtp import num_layers, num_mtp_layers
from llmsuite.models.shape_spec import GatedDelta, GroupedQuery, Latent, ShapeSpec

Shapes = dict[str, tuple[int, ...]]

_LAYER = re.compile(r"model\.layers\.(\d+)\..*")

_STACKED = re.compile(r"(.*\.)mlp\.experts\.((?:gate|up|down)_proj)\.weight")


def decoder_shapes(config: Any, spec: ShapeSpec, layer: Callable[[int], Shapes]) -> Shapes:
    """Every parameter of a decoder, in the order of the layers, with its shape.

    Args:
        config: has num_hidden_layers, max_position_embeddings and what its head needs.
        spec: its description.
        layer: maps the index of a layer to its parameters.
    """
    shapes: Shapes = {"model.embed_tokens.weight": (spec.vocabulary, spec.hidden)}
    for i in range(num_layers(config)):
        shapes |= {f"model.layers.{i}.{part}": shape for part, shape in layer(i).items()}
    shapes |= {f"model.norm.{part}": shape for part, shape in norm_shapes(spec.hidden, spec.norm).items()}
    if spec.learned_positions:
        shapes["model.embed_positions.weight"] = (config.max_position_embeddings, spec.hidden)
    return {**shapes, **head_shapes(config)}


def norm_shapes(size: int, kind: str) -> Shapes:
    """The parameters of a norm of a kind of `shape_spec.Norm`."""
    shapes: Shapes = {"weight": (size,)}
    return shapes | {"bias": (size,)} if kind == "layer" else shapes


def attention_shapes(hidden: int, what: GroupedQuery) -> Shapes:
    """The parameters of `blocks.Attention` and `dense.DenseAttention`."""
    queries = what.heads * what.head_size
    keys = what.kv_heads * what.head_size
    shapes: Shapes = {}
    for part, size in zip("qkv", (2 * queries if what.gated else queries, keys, keys)):
        shapes |= _matrix(f"{part}_proj", hidden, size, what.biased)
    shapes |= _matrix("o_proj", queries, hidden, what.output_biased)
    if what.normed is None:
        return shapes
    sizes = (queries, keys) if what.normed == "whole" else (what.head_size, what.head_size)
    return shapes | {f"{part}_norm.weight": (size,) for part, size in zip("qk", sizes)}


def latent_shapes(hidden: int, what: Latent) -> Shapes:
    """The parameters of `latent_attention.LatentAttention`."""
    width = what.heads * (what.nope + what.rope)
    if what.q_rank is None:
        shapes = _matrix("q_proj", hidden, width, bias=False)
    else:
        shapes = _matrix("q_a_proj", hidden, what.q_rank, bias=False)
        shapes["q_a_layernorm.weight"] = (what.q_rank,)
        shapes |= _matrix("q_b_proj", what.q_rank, width, bias=False)
    shapes |= _matrix("kv_a_proj_with_mqa", hidden, what.kv_rank + what.rope, bias=False)
    shapes["kv_a_layernorm.weight"] = (what.kv_rank,)
    shapes |= _matrix("kv_b_proj", what.kv_rank, what.heads * (what.nope + what.value), bias=False)
    return shapes | _matrix("o_proj", what.heads * what.value, hidden, bias=False)


def gelu_mlp_shapes(hidden: int, width: int, bias: bool) -> Shapes:
    """The parameters of `blocks.GeluMLP`."""
    return _matrix("up_proj", hidden, width, bias) | _matrix("down_proj", width, hidden, bias)


def delta_shapes(hidden: int, what: GatedDelta) -> Shapes:
    """The parameters of `gated_delta.GatedDeltaAttention`, in its order: those of its own come before its modules'."""
    if what.joined:
        widths = {"qkvz": 2 * what.key_width + 2 * what.width, "ba": 2 * what.heads}
    else:
        widths = dict.fromkeys("qk", what.key_width) | dict.fromkeys("vz", what.width) | dict.fromkeys("ba", what.heads)
    shapes: Shapes = {"A_log": (what.heads,), "dt_bias": (what.heads,)}
    for part, width in widths.items():
        shapes |= _matrix(f"in_{part}_proj", hidden, width, bias=False)
    for part, width in zip("qkv", (what.key_width, what.key_width, what.width)):
        shapes[f"{part}_conv.weight"] = (what.taps, 1, width)
    return shapes | {"norm.weight": (what.head_size,)} | _matrix("out_proj", what.width, hidden, bias=False)


def mlp_shapes(hidden: int, width: int, bias: bool = False) -> Shapes:
    """The parameters of `blocks.GatedMLP`."""
    inner = _matrix("gate_proj", hidden, width, bias) | _matrix("up_proj", hidden, width, bias)
    return inner | _matrix("down_proj", width, hidden, bias)


def _matrix(name: str, inputs: int, outputs: int, bias: bool) -> Shapes:
    return {f"{name}.weight": (inputs, outputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def expert_shapes(hidden: int, width: int, count: int, bias: bool = False) -> Shapes:
    """The parameters of `experts.Experts`."""
    return {f"experts.{part}": (count, *shape) for part, shape in mlp_shapes(hidden, width, bias).items()}


def mtp_shapes(hidden: int) -> Shapes:
    """The parameters of `moe.MTPLayer` besides those of its decoder layer."""
    return {
        **{f"{part}.weight": (hidden,) for part in ("enorm", "hnorm")},
        "eh_proj.weight": (2 * hidden, hidden),
        "shared_head.norm.weight": (hidden,),
    }


def mtp_copies(config: Any) -> dict[str, list[str]]:
    """Parameters of which the MTP layers of a file have copies, with the names of the copies: the published ones have
    the embedding and the output projection."""
    layers = [f"model.layers.{config.num_hidden_layers + i}" for i in range(num_mtp_layers(config))]
    embeddings = [f"{layer}.embed_tokens.weight" for layer in layers]
    heads = [f"{layer}.shared_head.head.weight" for layer in layers]
    if is_tied(config):
        return {"model.embed_tokens.weight": embeddings + heads}
    return {"model.embed_tokens.weight": embeddings, "lm_head.weight": heads}


def belongs_to_model(name: str, config: Any) -> bool:
    """False for a tensor of an HF file that is a copy in an MTP layer, or of a layer after the last."""
    if any(name in copies for copies in mtp_copies(config).values()):
        return False
    match = _LAYER.fullmatch(name)
    return match is None or int(match[1]) < config.num_hidden_layers + config.num_nextn_predict_layers


def is_of_untrained_mtp(name: str, config: Any) -> bool:
    """True if a tensor of an HF file belongs to an MTP layer of a model that does not train them."""
    match = None if config.mtp else _LAYER.fullmatch(name)
    return match is not None and int(match[1]) >= config.num_hidden_layers


def expert_tensors(name: str, count: int, modules: Mapping[str, str] = MappingProxyType({})) -> HfTensors | None:
    """The tensors of HF's files, one per expert, that a parameter of routed experts stacks. None for any other
    parameter, and for experts that are one tensor in the files too.

    Args:
        name: the parameter.
        count: number of experts.
        modules: the modules of an expert in HF's files by ours, such as `mlp.experts.gate_proj`, where they are not
            `mlp.experts.N.gate_proj`; `{}` stands for the number of the expert. It may have parameters too, such as
            `mlp.experts.gate_proj.weight`: these are one tensor.
    """
    match = _STACKED.fullmatch(name)
    if match is None or f"mlp.experts.{match[2]}.weight" in modules:
        return None
    theirs = modules.get(f"mlp.experts.{match[2]}", f"mlp.experts.{{}}.{match[2]}")
    if "{}" not in theirs:
        return None
    return HfTensors(tuple(f"{match[1]}{theirs.format(i)}.weight" for i in range(count)), stacked=True)
