"""Rotary frequencies and their scalings, as config.json describes them. Imports no Paddle."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.strict_json import ABOVE_ZERO

_YARN_KEYS = {
    "rope_type",
    "type",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
}
_LONGROPE_KEYS = {
    "rope_type",
    "type",
    "short_factor",
    "long_factor",
    "factor",
    "attention_factor",
    "original_max_position_embeddings",
}


def read_hf(data: Mapping[str, Any], default_theta: float) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling in a config.json; transformers 5 stores both in `rope_parameters`."""
    rope = data.get("rope_parameters")
    if isinstance(rope, Mapping):
        theta = rope.get("rope_theta", data.get("rope_theta", default_theta))
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        return theta, scaling if _kind(scaling) != "default" else None
    return data.get("rope_theta", default_theta), data.get("rope_scaling")


def read_hf_by_layer_type(
    data: Mapping[str, Any], family: str, defaults: tuple[float, float]
) -> tuple[float, dict[str, Any] | None, float] | None:
    """Base and scaling of layers with full attention, and the base of layers with a window, in a config.json that has
    them by type of layer, as transformers 5 writes them; None for another one.

    Args:
        data: content of the config.json.
        family: name of the family, for the message.
        defaults: the bases where it names none, of both types of layers.

    Raises:
        UserError: layers with a window are scaled.
    """
    rope = data.get("rope_parameters")
    if not isinstance(rope, Mapping) or "full_attention" not in rope:
        return None
    theta, scaling = read_hf({"rope_parameters": rope["full_attention"]}, defaults[0])
    local, unknown = read_hf({"rope_parameters": rope.get("sliding_attention", {})}, defaults[1])
    if unknown is not None:
        raise UserError(f"config.json: rope_parameters.sliding_attention is {unknown}; {family} scales full attention")
    return theta, scaling, local


def frequencies(
    size: int, theta: float, scaling: Mapping[str, Any] | None, kinds: Sequence[str] = ("default", "linear", "llama3")
) -> list[float]:
    """Rotary frequency of each of the size / 2 pairs, in radians a position.

    Args:
        size: size of the part of a head that is rotated.
        theta: base of the frequencies.
        scaling: None, or `rope_scaling` of config.json.
        kinds: the rope types that the caller's family supports.

    Raises:
        UserError: the scaling is of another kind, or lacks a key.
    """
    plain = [theta ** (-2 * i / size) for i in range(size // 2)]
    if scaling is None:
        return plain
    kind = _kind(scaling)
    if kind not in kinds:
        raise UserError(f"rope_type {kind!r} is not supported; use {', '.join(kinds[:-1])} or {kinds[-1]}")
    if kind == "default":
        return plain
    if kind == "longrope":
        return _longrope(plain, scaling)
    if kind == "dynamic":
        return _with_alpha(size, theta, scaling)
    factor = _number(scaling, "factor")
    if kind == "linear":
        return [f / factor for f in plain]
    if kind == "llama3":
        return _llama3(plain, factor, scaling)
    return _yarn(plain, factor, theta, scaling)


def _with_alpha(size: int, theta: float, scaling: Mapping[str, Any]) -> list[float]:
    """NTK-aware scaling by a fixed `alpha`, which stretches the base (github.com/Tencent-Hunyuan/Hunyuan-7B)."""
    if "alpha" not in scaling:
        raise UserError("rope_type 'dynamic' needs alpha; without it frequencies depend on the length of a text")
    if size <= 2:
        raise UserError(f"alpha needs more than 2 rotated elements in a head, and there are {size}")
    base = theta * _number(scaling, "alpha") ** (size / (size - 2))
    return [base ** (-2 * i / size) for i in range(size // 2)]


def _llama3(plain: list[float], factor: float, scaling: Mapping[str, Any]) -> list[float]:
    """Scaling of Llama 3.1 (github.com/meta-llama/llama-models, models/llama3/model.py, `apply_scaling`): long
    wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    low = _number(scaling, "low_freq_factor")
    high = _number(scaling, "high_freq_factor")
    original = _number(scaling, "original_max_position_embeddings")
    if high <= low:
        raise UserError(f"high_freq_factor is {high}; it has to be above low_freq_factor = {low}")
    scaled = []
    for f in plain:
        turns = original * f / (2 * math.pi)  # in the original context
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append(f * keep + f / factor * (1 - keep))
    return scaled


def _yarn(plain: list[float], factor: float, theta: float, scaling: Mapping[str, Any]) -> list[float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): pairs that turn more than beta_fast times in the original context are
    kept, those that turn less than beta_slow times stretched by `factor`, those between interpolated by their index.
    With `truncate`, as by default, the bounds between them are whole indices."""
    if unknown := sorted(set(scaling) - _YARN_KEYS):
        raise UserError(f"has {', '.join(unknown)}, which yarn scaling does not know here")
    if theta <= 1:
        raise UserError(f"yarn scaling needs a rope_theta above 1, and it is {theta}")
    original = _number(scaling, "original_max_position_embeddings")
    half = len(plain)

    def index_of(turns: float) -> float:
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low = index_of(_number(scaling, "beta_fast", 32.0))
    high = index_of(_number(scaling, "beta_slow", 1.0))
    truncate = scaling.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UserError(f"truncate is {reprlib.repr(truncate)}; true or false is needed")
    if truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, 2 * half - 1)
    width = max(high - low, 0.001)
    stretch = [min(max((i - low) / width, 0.0), 1.0) for i in range(half)]
    return [f / factor * s + f * (1 - s) for f, s in zip(plain, stretch)]


def _longrope(plain: list[float], scaling: Mapping[str, Any]) -> list[float]:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753) in the original context: pair i is divided by `short_factor[i]`."""
    if unknown := sorted(set(scaling) - _LONGROPE_KEYS):
        raise UserError(f"has {', '.join(unknown)}, which longrope scaling does not know here")
    for key in ("short_factor", "long_factor"):
        factors = scaling.get(key)
        if not isinstance(factors, Sequence) or len(factors) != len(plain) or not all(map(ABOVE_ZERO.fits, factors)):
            raise UserError(f"{key} is {reprlib.repr(factors)}; {len(plain)} numbers above 0 are needed")
    return [f / factor for f, factor in zip(plain, scaling["short_factor"])]


def magnitude(scaling: Mapping[str, Any] | None) -> float:
    """Factor of cos and sin: 1, except with yarn and longrope.

    Raises:
        UserError: a value of the scaling is not a number above 0.
    """
    kind = None if scaling is None else _kind(scaling)
    if scaling is None or kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    factor = _number(scaling, "factor")
    if kind == "longrope":  # section 3.3 of its paper
        original = _number(scaling, "original_max_position_embeddings")
        return math.sqrt(1 + math.log(factor) / math.log(original)) if min(factor, original) > 1 else 1.0
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return yarn_mscale(factor, _number(scaling, "mscale")) / yarn_mscale(factor, _number(scaling, "mscale_all_dim"))
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Root of the factor by which attention logits grow for a context stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _kind(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type"))


def _number(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = scaling.get(key, default)
    if not ABOVE_ZERO.fits(value):
        raise UserError(f"{key} is {reprlib.repr(value)}; {ABOVE_ZERO.what} is needed")
    return float(value)
