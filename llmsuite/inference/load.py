"""Loading of a model in any format, ready for generation: on one device, or sharded over several."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsuite.base.errors import UserError
from llmsuite.base.typing import ReadSlice
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.contract.specs import ModelFamily
from llmsuite.devices.base import DeviceBackend
from llmsuite.inference.export_manifest import is_exported
from llmsuite.models.head import head_of

if TYPE_CHECKING:
    from llmsuite.contract.schema.degrees import Degrees
    from llmsuite.parallel.mesh import Mesh


AS_TRAINED = "as trained"
"""Packing of a rollout model (`refresh.RefreshableModel`) so that it computes exactly as the model that is trained in
the precision. Where the device has matmuls of its own, and a decoder kernel that rounds as they do, matrices are packed
for this kernel; else they are not packed."""


def open_any(
    path: Path,
    families: Mapping[str, ModelFamily],
    base: Path | None = None,
    config: Path | None = None,
    allow_pickle: bool = False,
    runs: bool = False,
) -> ModelDirectory:
    """Open the model of a run, of a model or checkpoint directory in any layout, or of an adapter and its base.

    Args:
        path: the directory or file.
        families: known model families.
        base: base model of an adapter; None for the one that the adapter names.
        config: the config.json of files that have none.
        allow_pickle: read pickles too.
        runs: the caller supports interventions and prefixes; else they are refused.

    Raises:
        UserError: nothing there can be read.
    """
    from llmsuite.checkpoint.adapter_base import Base, base_path, check_base
    from llmsuite.checkpoint.convert.adapter import add_adapter
    from llmsuite.checkpoint.convert.side_adapters import open_any_side_adapter
    from llmsuite.checkpoint.convert.sources import open_source
    from llmsuite.checkpoint.directory import find_adapter

    if is_exported(path):
        raise UserError(
            f"{path}: is an exported program, not a model; `generate` and `serve` run it with --engine static"
        )
    adapter = find_adapter(path)
    if adapter is None:
        if base is not None:
            raise UserError(f"--base: {path} is no LoRA adapter")
        return open_source(path, families, parameter_shapes, config, allow_pickle)
    place = base or base_path(adapter)
    model = open_source(place, families, parameter_shapes, config, allow_pickle)
    if base is None:
        check_base(adapter, Base(str(place), model.digest()))
    side_adapter = open_any_side_adapter(adapter, model.family, model.config, allow_pickle) if runs else None
    if side_adapter is not None:
        return dataclasses.replace(model, side_adapter=side_adapter, adapter=adapter)
    return add_adapter(model, adapter, allow_pickle)


def check_answers(family: ModelFamily) -> None:
    """Check that models of a family can generate. Raises UserError for a family whose models can only be trained."""
    if family.shard_plan is not None and family.shard_plan.is_auto_parallel:
        raise UserError(
            f"family {family.name} places its parameters on meshes of its own, over the ranks of a run: its models can "
            "be trained, and called by their own code only"
        )


def load_model(
    source: ModelDirectory,
    backend: DeviceBackend,
    precision: str = "fp32",
    mesh: Mesh | None = None,
    packed: str | None = None,
) -> Any:
    """Build the model on the current device, in evaluation mode.

    Args:
        source: the values; each tensor is read, and sliced, when it is needed.
        backend: of the device.
        precision: of parameters and activations.
        mesh: this rank's coordinates, for a model that is sharded over ranks (`llmsuite.parallel.mesh.Mesh`).
        packed: precision in which matrices are packed, one of `backend.weight_only_precisions`, or `AS_TRAINED`; None
            for unpacked matrices. For one rank only.

    Raises:
        UserError: the device does not have this precision, the shape cannot be cut for the mesh, or it is a reward
            model.
    """
    side_adapter = source.side_adapter
    metadata = None if side_adapter is None else side_adapter.metadata
    check_precision(source, backend, precision, as_trained=packed == AS_TRAINED)
    values = values_of(source, mesh)
    return build_model(source.family, source.config, backend, precision, mesh, values, metadata, packed)


def check_precision(source: ModelDirectory, backend: DeviceBackend, precision: str, as_trained: bool = False) -> None:
    """Check the precision of a model on a device.

    Args:
        source: the model.
        backend: of the device.
        precision: of parameters and activations.
        as_trained: the device has to train in the precision.

    Raises:
        UserError: the device does not have it, or the model is a reward model.
    """
    if head_of(source.config) == "score":
        raise UserError(f"{source.path}: is a reward model: it scores answers and cannot generate")
    known = backend.precisions_of(trains=as_trained)
    if precision not in known:
        raise UserError(f"--precision {precision}: {backend.name} has {', '.join(known)}")


def values_of(source: ModelDirectory, mesh: Mesh | None) -> Callable[[Any], ReadSlice]:
    """The argument `values` of `build_model` for a model in files, on the rank of a mesh."""
    from llmsuite.adapters.parameters import is_factor
    from llmsuite.checkpoint.int8 import input_scales
    from llmsuite.checkpoint.shapes import check_shapes
    from llmsuite.models.qat import fake_quantize_layers, fake_quantized
    from llmsuite.parallel.vocabulary import is_padded

    def values(model: Any) -> ReadSlice:
        padded = mesh is not None and is_padded(source.config, mesh.degrees.tp)
        found = {name: tuple(p.shape) for name, p in model.named_parameters() if not is_factor(name)}
        if padded:
            found = parameter_shapes(source.family, source.config)
        check_shapes(source, found)
        if side_adapter is not None:
            side_adapter.check({name: tuple(p.shape) for name, p in model.named_parameters() if is_factor(name)})
        scales = input_scales(source)
        fake_quantize_layers(model, list(scales), rounds_weight=False)
        for name, layer in fake_quantized(model):
            layer.input_scale = scales[name]

        def read(name: str, shape: Any, index: Any) -> Any:
            if is_factor(name):
                assert side_adapter is not None
                return side_adapter.files.read(name, index)
            return source.read(name, index)

        return read

    side_adapter = source.side_adapter
    return values


def build_model(
    family: ModelFamily,
    config: Any,
    backend: DeviceBackend,
    precision: str,
    mesh: Mesh | None,
    values: Callable[[Any], ReadSlice],
    side_adapter: Any = None,
    packed: str | None = None,
) -> Any:
    """Build a model on the current device, in evaluation mode.

    Args:
        family: of the model.
        config: its shape.
        backend: of the device.
        precision: of parameters and activations.
        mesh: this rank's coordinates, for a model that is sharded over ranks.
        values: called with the model, which has no memory yet; returns a function that reads slices of parameters.
        side_adapter: interventions or prefixes (`reft_dir.Interventions` or `prefix_dir.Prefixes` of
            `llmsuite.checkpoint`); None for none.
        packed: as for `load_model`.

    Raises:
        UserError: the shape cannot be cut for the mesh, or the matrices cannot be packed.
    """
    import paddle

    from llmsuite.adapters.layers.prefix import add_prefixes
    from llmsuite.adapters.layers.reft import add_interventions
    from llmsuite.checkpoint.prefix_dir import Prefixes
    from llmsuite.checkpoint.reft_dir import Interventions
    from llmsuite.contract.schema.degrees import Degrees
    from llmsuite.inference.pack_model import pack_bf16, pack_matrices
    from llmsuite.inference.stages import keep_stage_layers
    from llmsuite.models.shard_plan import UNSHARDED
    from llmsuite.parallel.mesh import Mesh
    from llmsuite.parallel.parallelize import parallelize_inference
    from llmsuite.parallel.vocabulary import build_padded, is_padded, pad_values

    mesh = mesh or Mesh(Degrees(1, 1, 1, 1), 0)
    plan = family.shard_plan or UNSHARDED
    check_cut(family, config, mesh.degrees)
    with paddle.LazyGuard():  # no memory for the full model: a rank reads only its shards of the values
        model = build_padded(family, config, generation_ops(backend, precision), mesh.degrees.tp)
        if isinstance(side_adapter, Interventions):
            add_interventions(model, side_adapter.layers, side_adapter.rank, side_adapter.ends)
        elif isinstance(side_adapter, Prefixes):
            add_prefixes(model, side_adapter.tokens)
    check_decode_overrides(model)
    read = values(model)
    if is_padded(config, mesh.degrees.tp):
        read = pad_values(read, parameter_shapes(family, config))
    decoding = backend.ops(precision).decoding
    packed_ops = decoding.packed
    if packed == AS_TRAINED:
        decoder_for = decoding.decoder_for
        if backend.has_bf16_rollout_weights(precision) and decoder_for is not None and decoder_for(model) is not None:
            assert packed_ops is not None, "the device has weights for rollouts"
            pack_bf16(model, read, packed_ops)
    elif packed is not None:
        if packed_ops is None:
            raise UserError(f"--precision {packed}: needs kernels that are built by g++; install it, or use fp32")
        pack_matrices(model, read, packed, packed_ops)
    if mesh.degrees.pp > 1:
        keep_stage_layers(model, family, mesh, parameter_shapes(family, config))
    parallelize_inference(model, plan, mesh, read, backend.parameter_dtype(precision))
    model.eval()
    return model


_TWINS = {"embed": "embed_at", "layer_inputs": "layer_inputs_at", "decode": "decode_step"}
"""Methods of a model that training calls, each with the one that generation calls instead."""


def check_decode_overrides(model: Any) -> None:
    """Check that a model overrides both methods of each of `_TWINS`, or none. Raises UserError for a model that
    overrides only the method of training: it would generate with another network."""
    from llmsuite.models.exact import is_own

    for trained, answering in _TWINS.items():
        kinds = [kind for kind in type(model).__mro__ if trained in vars(kind) or answering in vars(kind)]
        if kinds and not is_own(kinds[0]) and answering not in vars(kinds[0]):
            raise UserError(
                f"{type(model).__name__}: defines {trained}, which training calls, and not {answering}, which "
                "generation calls instead: it would answer from another network. Define both"
            )


def check_cut(family: ModelFamily, config: Any, degrees: Degrees, option: str = "--num_devices") -> None:
    """Check that a model can generate and can be cut over the tensor parallel ranks.

    Args:
        family: of the model.
        config: its shape.
        degrees: number of ranks.
        option: the option that sets the tensor parallel degree where there is no pipeline, for messages.

    Raises:
        UserError: it cannot.
    """
    from llmsuite.models.shard_plan import UNSHARDED

    check_answers(family)
    if problem := next((family.shard_plan or UNSHARDED).problems(config, degrees.tp), None):
        if degrees.pp > 1:
            option = "--tensor_parallel_degree"
        raise UserError(f"{option} {problem}")


def generation_ops(backend: DeviceBackend, precision: str) -> Any:
    """The operations for generation (`inference.attention.with_cached_attention`)."""
    from llmsuite.inference.attention import grouped_attention, rounded_grouped_attention, with_cached_attention

    live = backend.ops(precision)
    attention: Any = grouped_attention
    if live.matmuls.rounds_attention_inputs:
        attention = functools.partial(rounded_grouped_attention, live.matmuls.round_attention_input)
    ops = backend.program_ops(precision)
    matmuls = dataclasses.replace(ops.matmuls, round_attention_input=live.matmuls.round_attention_input)
    return with_cached_attention(dataclasses.replace(ops, matmuls=matmuls), attention)


def broadcast_tokens(tokens: list[int]) -> list[int]:
    """The tokens of rank 0, on every rank. Rounding may differ by rank, and all ranks have to continue with the same
    tokens, or their collective calls would no longer match."""
    from llmsuite.parallel import collective

    values = collective.broadcast_from_rank0([float(token) for token in tokens])
    return [int(value) for value in values]


def parameter_shapes(family: ModelFamily, config: Any) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of a model, by llmsuite's names; no memory is allocated."""
    import paddle

    from llmsuite.devices.ops import Ops

    with paddle.LazyGuard():
        model = family.factory()(config, Ops())
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
