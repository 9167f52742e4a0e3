"""Names and shapes of a described decoder's parameters, in each file format. Imports neither Paddle nor NumPy.

Our own names are those of HF's Llama, and of its DeepSeek for experts, which we stack as [E, inputs, outputs]. In
memory a linear weight is [inputs, outputs], as Paddle has it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llmsuite.models import gguf_names
from llmsuite.models.decoder_config import DecoderConfig, DenseConfig
from llmsuite.models.decoder_names import (
    Shapes,
    attention_shapes,
    belongs_to_model,
    decoder_shapes,
    delta_shapes,
    expert_shapes,
    expert_tensors,
    gelu_mlp_shapes,
    is_of_untrained_mtp,
    latent_shapes,
    mlp_shapes,
    mtp_copies,
    mtp_shapes,
    norm_shapes,
)
from llmsuite.models.head import OUTPUT, SCORE
from llmsuite.models.hf_tensors import HfTensors
from llmsuite.models.shape_spec import GatedDelta, GatedMLP, GeluMLP, GroupedQuery, Latent, LayerSpec, MoE

if TYPE_CHECKING:
    import numpy as np

_LINEAR = (
    *("_proj.weight", "_proj_with_mqa.weight", "_conv.weight", ".mlp.gate.weight", "_expert_gate.weight"),
    *(OUTPUT, SCORE),
)
_IGNORED = re.compile(r".*rotary_emb\.inv_freq")
_LAYER = re.compile(r"model\.layers\.(?P<number>\d+)\.(?P<part>(?P<module>.+)\.(?P<kind>\w+))")


class DenseNames:
    """`ModelFamily.names` of a decoder whose config is a `DecoderConfig`."""

    def parameter_names(self, config: DecoderConfig) -> Iterator[str]:
        """Every parameter of the model, in the order of the layers."""
        yield from self.parameter_shapes(config)

    def parameter_shapes(self, config: DecoderConfig) -> Shapes:
        """Every parameter of the model, in the order of the layers, with its shape."""
        spec = config.shape_spec()
        return decoder_shapes(config, spec, lambda number: _layer_shapes(config.hidden_size, spec.layers[number]))

    def is_linear(self, name: str) -> bool:
        """True if HF stores this parameter transposed, as [outputs, inputs], or a convolution as [channels, 1, taps];
        if it is a stack, each of its matrices."""
        return name.endswith(_LINEAR)

    def hf_tensors(self, name: str, config: DecoderConfig) -> HfTensors:
        """The tensor of an HF model that holds a parameter, or the part of one, or those that are stacked in it."""
        stack = expert_tensors(name, config.num_routed_experts, config.hf_parts)
        if stack is not None:
            return stack
        match = _LAYER.fullmatch(name)
        if match is None:
            module, _, kind = name.rpartition(".")
            return HfTensors((f"{config.hf_modules.get(module, module)}.{kind}",))
        layer = f"{config.hf_modules.get('model.layers', 'model.layers')}.{match['number']}"
        ours = match["part"]
        end = ""
        if ours not in config.hf_parts:
            ours = match["module"]
            end = f".{match['kind']}"
        theirs = config.hf_parts.get(ours, ours)
        tensor = (f"{layer}.{theirs}{end}",)
        joined = [part for part, other in config.hf_parts.items() if other == theirs]
        is_reversed = match["module"] in config.hf_reversed
        if len(joined) < 2:
            return HfTensors(tensor, is_reversed=is_reversed)
        shapes = _layer_shapes(config.hidden_size, config.shape_spec().layers[int(match["number"])])
        return HfTensors(
            tensor,
            part=joined.index(ours),
            sizes=tuple(shapes[f"{part}{end}"][-1] for part in joined),
            alternates=theirs in config.hf_alternating,
            is_reversed=is_reversed,
        )

    def from_hf(self, name: str, config: DecoderConfig) -> str | None:
        """The full name of a tensor in an HF file; None for one that is computed, or that the model does not have."""
        return None if _IGNORED.fullmatch(name) or name.startswith(config.not_loaded) else name

    def paddlenlp_prefix(self, config: DecoderConfig) -> str | None:
        """The prefix that PaddleNLP writes instead of `model.`; None where it has no such model."""
        return config.paddlenlp_prefix


class DenseMtpNames(DenseNames):
    """`DenseNames` of a family whose files may have MTP layers (`llmsuite.models.mtp`)."""

    def hf_tensors(self, name: str, config: DecoderConfig) -> HfTensors:
        """The tensor of an HF model that holds a parameter; published MTP layers have copies of the embedding and the
        output projection."""
        copies = tuple(mtp_copies(config).get(name, ()))
        return dataclasses.replace(super().hf_tensors(name, config), copies=copies)

    def from_hf(self, name: str, config: DecoderConfig) -> str | None:
        """The full name of a tensor in an HF file; None for one that is computed, a copy, or of a layer after the
        last."""
        return super().from_hf(name, config) if belongs_to_model(name, config) else None

    def is_carried(self, name: str, config: DecoderConfig) -> bool:
        """True if a tensor of an HF file belongs to an MTP layer of a model that does not train them."""
        return is_of_untrained_mtp(name, config)


class PlainStackNames(DenseNames):
    """`DenseNames` of a family whose experts are [inputs, outputs] in HF's files too."""

    def is_linear(self, name: str) -> bool:
        """True if HF stores this parameter transposed: stacks of experts it does not."""
        return super().is_linear(name) and ".mlp.experts." not in name


class DenseGgufNames(DenseNames):
    """`DenseNames` of a family that llama.cpp has with the names in `gguf_names`."""

    def from_gguf(self, name: str) -> str | None:
        """Our name of a tensor in a GGUF file; None for one that is computed, not trained."""
        return gguf_names.from_gguf(name)

    def to_gguf(self, name: str) -> str | None:
        """The name of a parameter in GGUF."""
        return gguf_names.to_gguf(name)

    def gguf_to_hf(self, name: str, value: np.ndarray, config: DenseConfig) -> np.ndarray:
        """A GGUF matrix [outputs, inputs], or a bias, as HF has it: with halves of q and k where GGUF has neighbours.
        `name` is ours."""
        heads = _rotated_heads(name, config)
        if heads is None:
            return value
        pairs = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
        return pairs.swapaxes(1, 2).reshape(value.shape)

    def hf_to_gguf(self, name: str, value: np.ndarray, config: DenseConfig) -> np.ndarray:
        """The inverse of `gguf_to_hf`."""
        heads = _rotated_heads(name, config)
        if heads is None:
            return value
        halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
        return halves.swapaxes(1, 2).reshape(value.shape)


NAMES = DenseNames()
MTP_NAMES = DenseMtpNames()
PLAIN_STACK_NAMES = PlainStackNames()
GGUF_NAMES = DenseGgufNames()


def _layer_shapes(hidden: int, layer: LayerSpec) -> Shapes:
    """The parameters of a layer, in the order that `blocks.DecoderLayer` and `dense.DenseLayer` have them."""
    norm = norm_shapes(hidden, layer.norm)
    none: Shapes = {}
    after = norm if layer.norms in ("after", "both") else none
    modules = {
        "input_layernorm": none if layer.norms == "after" else norm,
        "self_attn": _attention_shapes(hidden, layer.attention),
        "post_attention_layernorm": norm if layer.norms in ("before", "both") else none,
        "mlp": _mlp_shapes(hidden, layer.mlp),
        "post_self_attn_layernorm": after,
        "post_mlp_layernorm": after,
    }
    found = {f"{module}.{part}": shape for module, shapes in modules.items() for part, shape in shapes.items()}
    return found | mtp_shapes(hidden) if layer.is_mtp else found


def _attention_shapes(hidden: int, attention: Any) -> Shapes:
    """The parameters of grouped-query, latent or linear attention."""
    if isinstance(attention, GatedDelta):
        return delta_shapes(hidden, attention)
    if isinstance(attention, Latent):
        return latent_shapes(hidden, attention)
    assert isinstance(attention, GroupedQuery)
    sinks: Shapes = {"sinks": (attention.heads,)} if attention.sinks else {}  # parameters come before modules
    return sinks | attention_shapes(hidden, attention)


def _mlp_shapes(hidden: int, mlp: Any) -> Shapes:
    """The parameters of an MLP, of `moe.MoE` or of `moe.GatedSharedMoE`."""
    if isinstance(mlp, GeluMLP):
        return gelu_mlp_shapes(hidden, mlp.width, mlp.biased)
    if isinstance(mlp, GatedMLP):
        return mlp_shapes(hidden, mlp.width, mlp.biased)
    assert isinstance(mlp, MoE)
    found: Shapes = {"gate.weight": (hidden, mlp.experts)}
    if mlp.gate_biased:
        found["gate.bias"] = (mlp.experts,)
    if mlp.choice_biased:
        found["gate.e_score_correction_bias"] = (1, mlp.experts) if mlp.bias_is_row else (mlp.experts,)
    found |= expert_shapes(hidden, mlp.width, mlp.experts, mlp.biased)
    if not mlp.shared_width:
        return found
    module = "shared_expert" if mlp.shared_gated else "shared_experts"
    found |= {f"{module}.{part}": shape for part, shape in mlp_shapes(hidden, mlp.shared_width).items()}
    return found | ({"shared_expert_gate.weight": (hidden, 1)} if mlp.shared_gated else {})


def _rotated_heads(name: str, config: DenseConfig) -> int | None:
    """Heads of a parameter whose outputs are rotated, and lie otherwise in GGUF; None for others."""
    if not config.gguf_interleaves:
        return None
    return {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
