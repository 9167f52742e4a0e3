"""A model family that is the description of a decoder."""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

from llmsuite.contract.specs import ModelFamily
from llmsuite.models import dense_plan, sparse_plan
from llmsuite.models.decoder_config import DecoderConfig
from llmsuite.models.shard_plan import ShardPlan


def dense_family(
    *,
    name: str,
    help: str,
    config_cls: type[DecoderConfig],
    smoke: Mapping[str, Any],
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    smoke_keeps: Sequence[str] = (),
    hf_model_types: Sequence[str] = (),
    gguf_architectures: Sequence[str] = (),
) -> ModelFamily:
    """Return the family of a config: its network, names, shard plan and shape spec come from `config_cls.shape_spec`.

    Args:
        name: value of the recipe key `model.family`.
        help: one-line description.
        config_cls: dataclass of the shape.
        smoke: tiny shape that `--smoke` trains.
        presets: published shapes by name.
        smoke_keeps: as `ModelFamily.smoke_keeps`.
        hf_model_types: as `ModelFamily.hf_model_types`.
        gguf_architectures: as `ModelFamily.gguf_architectures`; only for families that llama.cpp has with the names of
            `llmsuite.models.gguf_names`.
    """
    names = "llmsuite.models.dense_names:GGUF_NAMES" if gguf_architectures else config_cls.names
    return ModelFamily(
        name=name,
        help=help,
        config_cls=config_cls,
        presets=presets or {},
        smoke=smoke,
        smoke_keeps=smoke_keeps,
        factory=lambda: pkgutil.resolve_name(config_cls.network),
        names=lambda: pkgutil.resolve_name(names),
        shard_plan=_plan(config_cls),
        shape_spec=config_cls.shape_spec,
        hf_model_types=hf_model_types,
        gguf_architectures=gguf_architectures,
    )


def _plan(config_cls: type[DecoderConfig]) -> ShardPlan:
    if config_cls.experts_key is None:
        return dense_plan.PLAN
    return dataclasses.replace(sparse_plan.PLAN, num_experts=config_cls.experts_key)
