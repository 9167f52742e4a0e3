"""Opens a model in any format: directories of llmsuite, HF and PaddleNLP, .distcp and .pdparams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import is_dir, is_file
from llmsuite.checkpoint.convert.distcp import metadata_file, open_distcp
from llmsuite.checkpoint.convert.pdparams import join_ranks, open_pdparams, pdparams_files
from llmsuite.checkpoint.directory import adapter_hint, find_adapter, find_model, gguf_hint, is_run
from llmsuite.checkpoint.fused import Heads, UnfusedTensors
from llmsuite.checkpoint.model_dir import ModelDirectory, describe_model, hf_name, open_model, read_config, rename
from llmsuite.checkpoint.model_writer import TensorLayout
from llmsuite.checkpoint.shapes import Shapes, check_shapes
from llmsuite.checkpoint.tensors import TensorSource, TensorSpec
from llmsuite.contract.specs import ModelFamily
from llmsuite.models.head import EMBEDDING, OUTPUT
from llmsuite.models.protocols import HasPaddleNLPNames, HasTiedEmbedding

_DISTCP_BELOW = (".", "dist_ckpt", "model")  # names used by PaddleNLP's trainers
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")


def open_source(
    path: Path,
    families: Mapping[str, ModelFamily],
    shapes_of: Callable[[ModelFamily, Any], Shapes],
    config: Path | None = None,
    allow_pickle: bool = False,
) -> ModelDirectory:
    """Open the model in a directory, or the newest checkpoint of a run.

    Args:
        path: the directory.
        families: known model families.
        shapes_of: returns the shape, by our names, of every parameter of a family's model with a config.
        config: directory of config.json and tokenizer, where they are not in `path` or its parent.
        allow_pickle: read .pdparams files.

    Raises:
        UserError: there is no readable model, or it is incomplete.
    """
    if not is_dir(path):
        raise UserError(gguf_hint(path) or f"{path}: is not a directory")
    if find_adapter(path) is not None:
        raise UserError(adapter_hint(path))
    distcp = next((path / name for name in _DISTCP_BELOW if metadata_file(path / name)), None)
    if is_run(path) or any(is_file(path / name) for name in _SAFETENSORS):
        model = open_model(find_model(path), families, check=True)
    elif distcp is not None:
        place = _config_directory(distcp, config)
        family, settings = read_config(place, families)
        model = describe_model(place, family, settings, open_distcp(distcp), from_paddle=True)
    elif pdparams_files(path):
        if not allow_pickle:
            raise UserError(
                f"{path}: its .pdparams files are pickles. With --allow-pickle they are read by a reader that runs no "
                "code and refuses anything but tensors"
            )
        model = _open_pdparams(path, _config_directory(path, config), families, shapes_of)
    else:
        raise UserError(
            gguf_hint(path)
            or f"{path}: holds no model; looked for {_SAFETENSORS[0]} and its index, checkpoints/latest, *.metadata of "
            "dist.save_state_dict, model_state*.pdparams, and mp_00_sharding_00_pp_00/model.pdparams"
        )
    check_shapes(model, shapes_of(model.family, model.config))
    return model


def _config_directory(path: Path, config: Path | None) -> Path:
    if config is not None:
        return config
    found = next((p for p in (path, path.parent) if is_file(p / "config.json")), None)
    if found is None:
        raise UserError(f"{path}: has no config.json, nor has the directory above; name one with --config DIR")
    return found


def _open_pdparams(
    path: Path,
    place: Path,
    families: Mapping[str, ModelFamily],
    shapes_of: Callable[[ModelFamily, Any], Shapes],
) -> ModelDirectory:
    family, config = read_config(place, families)
    has_own_names = isinstance(family.names(), HasPaddleNLPNames)
    if family.names().paddlenlp_prefix(config) is None and not has_own_names:
        model_type = config.to_hf()["model_type"]
        raise UserError(f"{path}: PaddleNLP's layout of a {model_type} is not supported; merge it from HF's files")
    ranks = open_pdparams(path)
    if len(ranks) == 1:
        return describe_model(place, family, config, ranks[0], from_paddle=True)
    heads = Heads.of(config, len(ranks))
    parts = [UnfusedTensors(rename(family, config, rank) or rank, heads) for rank in ranks]
    stored = list(dict.fromkeys(name for part in parts for name in part.names))
    specs = [TensorSpec(name, tuple(shape), "float32") for name, shape in shapes_of(family, config).items()]
    stored_specs = specs if has_own_names else TensorLayout(family, config, specs, "paddlenlp").specs
    full_shapes = {spec.name: spec.shape for spec in stored_specs}
    may_be_tied = isinstance(config, HasTiedEmbedding) and config.tie_word_embeddings
    if may_be_tied and OUTPUT in stored:  # it is compared with the embedding
        full_shapes[OUTPUT] = _shape_of_head(parts, tuple(shapes_of(family, config)[EMBEDDING]))
    known = {name: full_shapes[name] for name in stored if name in full_shapes}
    unexpected = []
    for name in stored:
        if name not in full_shapes and (has_own_names or hf_name(family, config, name) is not None):
            unexpected.append(name)
    if unexpected:
        raise UserError(
            f"{path}: has {len(unexpected)} tensors that a {family.name} lacks: {', '.join(unexpected[:5])}"
        )
    labels = [f"tp{rank:02d}" for rank in range(len(ranks))]
    return describe_model(place, family, config, join_ranks(path, parts, known, labels), from_paddle=True)


def _shape_of_head(parts: Sequence[TensorSource], embedding: tuple[int, ...]) -> tuple[int, ...]:
    """The full shape of a sharded tied head: that of the embedding [V, D], or its transpose."""
    part = next(part.spec(OUTPUT) for part in parts if OUTPUT in part.names)
    if part.shape[-1] == embedding[-1]:
        return embedding
    return embedding[::-1]
