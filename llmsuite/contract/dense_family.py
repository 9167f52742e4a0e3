"""A model family that is the description of a decoder."""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

from llmsuite.contract.specs import ModelFamily
from llmsuite.models import sparse_plan
from llmsuite.models.decoder_config import DenseConfig
from llmsuite.models.dense_plan import DELTA_DIMS, PLAN
from llmsuite.models.shard_plan import ShardPlan


def dense_family(
    *,
    name: str,
    help: str,
    config_cls: type[DenseConfig],
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
    names = "MTP_NAMES" if config_cls.stores_mtp else "NAMES"
    if config_cls.hf_plain_stacks:
        names = "PLAIN_STACK_NAMES"
    if gguf_architectures:
        names = "GGUF_NAMES"
    return ModelFamily(
        name=name,
        help=help,
        config_cls=config_cls,
        presets=presets or {},
        smoke=smoke,
        smoke_keeps=smoke_keeps,
        factory=lambda: pkgutil.resolve_name(config_cls.network),
        names=lambda: pkgutil.resolve_name(f"llmsuite.models.dense_names:{names}"),
        shard_plan=_plan(config_cls),
        shape_spec=config_cls.shape_spec,
        hf_model_types=hf_model_types,
        gguf_architectures=gguf_architectures,
    )


def _plan(config_cls: type[DenseConfig]) -> ShardPlan:
    plan = PLAN
    if config_cls.experts_key is not None:
        plan = dataclasses.replace(sparse_plan.PLAN, num_experts=config_cls.experts_key)
    if config_cls.has_linear_attention:
        plan = dataclasses.replace(plan, shard_dims=(*plan.shard_dims, *DELTA_DIMS))
    return plan
