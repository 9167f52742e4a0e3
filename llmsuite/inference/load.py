"""Loads a model in any format, ready to answer: on one device, or sharded over several."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.devices.base import DeviceBackend
from llmsuite.errors import UserError
from llmsuite.inference.exported import is_exported
from llmsuite.models.head import head_of
from llmsuite.specs import ModelFamily

if TYPE_CHECKING:
    from llmsuite.parallel.fill import ReadSlice
    from llmsuite.parallel.mesh import Mesh
    from llmsuite.schema.degrees import Degrees


AS_TRAINED = "as trained"
"""How the matrices are stored of a model that draws for one that is trained in the precision, and is to be made
refreshable (`refresh.RefreshableModel`): so that it computes as that does. Where the device has a form of its own for
products, and a kernel for the model that rounds as that form does, they are stored for this kernel."""


def open_any(
    path: Path,
    families: Mapping[str, ModelFamily],
    base: Path | None = None,
    config: Path | None = None,
    allow_pickle: bool = False,
    runs: bool = False,
) -> ModelDirectory:
    """The model of a run, a model or checkpoint directory of any layout, or of an adapter and its base.

    Args:
        path: of it.
        families: that may be there.
        base: of an adapter, where it is not to be looked up.
        config: of files that have none.
        allow_pickle: whether pickles are read.
        runs: whether the caller runs interventions and prefixes beside a model; else they are refused.

    Raises:
        UserError: nothing there can be read.
    """
    from llmsuite.checkpoint.adapter_base import Base, base_path, check_base
    from llmsuite.checkpoint.directory import find_adapter
    from llmsuite.convert.adapter import add_adapter
    from llmsuite.convert.beside import open_any_beside
    from llmsuite.convert.sources import open_source

    if is_exported(path):
        raise UserError(
            f"{path}: is an exported program, and no model; `generate` and `serve` run it with --engine static"
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
    if runs and (beside := open_any_beside(adapter, model.family, model.config, allow_pickle)) is not None:
        return dataclasses.replace(model, beside=beside, adapter=adapter)
    return add_adapter(model, adapter, allow_pickle)


def check_answers(family: ModelFamily) -> None:
    """Raise UserError for a family whose models can only be trained."""
    if family.shard_plan is not None and family.shard_plan.is_annotated:
        raise UserError(
            f"family {family.name} places its parameters on meshes of its own, over the ranks of a run: its models are "
            "trained, and called by their own code"
        )


def load_model(
    source: ModelDirectory,
    backend: DeviceBackend,
    precision: str = "fp32",
    mesh: Mesh | None = None,
    stored: str | None = None,
) -> Any:
    """Build the model on the current device, in evaluation mode.

    Args:
        source: the values; each tensor is read, and sliced, when its turn comes.
        backend: of the device.
        precision: of parameters and activations.
        mesh: this rank's place, for a model that is sharded over ranks (`llmsuite.parallel.mesh.Mesh`).
        stored: what matrices are stored in, one of `backend.stored_precisions`, or `AS_TRAINED`; None for the
            precision. For one rank.

    Raises:
        UserError: the device does not have this precision, the shape cannot be cut so, or it is a reward model.
    """
    beside = source.beside
    told = None if beside is None else beside.told
    check_precision(source, backend, precision, as_trained=stored == AS_TRAINED)
    return build_model(source.family, source.config, backend, precision, mesh, values_of(source, mesh), told, stored)


def check_precision(source: ModelDirectory, backend: DeviceBackend, precision: str, as_trained: bool = False) -> None:
    """Raise UserError for a device that does not have a precision, or does not train in it, and for models that give no
    answers."""
    if head_of(source.config) == "score":
        raise UserError(f"{source.path}: is a reward model, which scores answers and gives none")
    known = backend.precisions_of(trains=as_trained)
    if precision not in known:
        raise UserError(f"--precision {precision}: {backend.name} has {', '.join(known)}")


def values_of(source: ModelDirectory, mesh: Mesh | None) -> Callable[[Any], ReadSlice]:
    """`values` of `build_model` for a model of files, on the rank of a mesh."""
    from llmsuite.checkpoint.int8 import input_scales
    from llmsuite.checkpoint.shapes import check_shapes
    from llmsuite.models.qat import fake_quantize_layers, fake_quantized
    from llmsuite.models.targets import is_factor
    from llmsuite.parallel.vocabulary import is_padded

    def values(model: Any) -> ReadSlice:
        padded = mesh is not None and is_padded(source.config, mesh.degrees.tp)
        found = {name: tuple(p.shape) for name, p in model.named_parameters() if not is_factor(name)}
        check_shapes(source, parameter_shapes(source.family, source.config) if padded else found)
        if beside is not None:
            beside.check({name: tuple(p.shape) for name, p in model.named_parameters() if is_factor(name)})
        scales = input_scales(source)
        fake_quantize_layers(model, list(scales), rounds_weight=False)
        for name, layer in fake_quantized(model):
            layer.input_scale = scales[name]
        return lambda name, shape, index: (beside.files if is_factor(name) else source).read(name, index)

    beside = source.beside
    return values


def build_model(
    family: ModelFamily,
    config: Any,
    backend: DeviceBackend,
    precision: str,
    mesh: Mesh | None,
    values: Callable[[Any], ReadSlice],
    beside: Any = None,
    stored: str | None = None,
) -> Any:
    """Build a model on the current device, in evaluation mode.

    Args:
        family: of the model.
        config: its shape.
        backend: of the device.
        precision: of parameters and activations.
        mesh: this rank's place, for a model that is sharded over ranks.
        values: called with the model, which has no memory yet; returns a function that reads slices of parameters.
        beside: what runs beside it (`reft_dir.Interventions` or `prefix_dir.Prefixes` of `llmsuite.checkpoint`).
        stored: as for `load_model`.

    Raises:
        UserError: the shape cannot be cut so, or the model not be stored so.
    """
    import paddle

    from llmsuite.checkpoint.prefix_dir import Prefixes
    from llmsuite.checkpoint.reft_dir import Interventions
    from llmsuite.inference.next_logits import uncovered
    from llmsuite.inference.stages import keep_stage
    from llmsuite.inference.stored import store, store_rounding
    from llmsuite.models.prefix import add_prefixes
    from llmsuite.models.reft import add_interventions
    from llmsuite.models.shard_plan import WHOLE
    from llmsuite.parallel.mesh import Mesh
    from llmsuite.parallel.parallelize import parallelize_inference
    from llmsuite.parallel.vocabulary import build_padded, is_padded, pad_values
    from llmsuite.schema.degrees import Degrees

    mesh = mesh or Mesh(Degrees(1, 1, 1, 1), 0)
    plan = family.shard_plan or WHOLE
    check_cut(family, config, mesh.degrees)
    with paddle.LazyGuard():
        model = build_padded(family, config, plain_ops(backend, precision), mesh.degrees.tp)
        if isinstance(beside, Interventions):
            add_interventions(model, beside.layers, beside.rank, beside.ends)
        elif isinstance(beside, Prefixes):
            add_prefixes(model, beside.tokens)
    check_twins(model)
    read = values(model)
    if is_padded(config, mesh.degrees.tp):
        read = pad_values(read, parameter_shapes(family, config))
    ops = backend.ops(precision)
    if stored == AS_TRAINED:
        if backend.stores_as_trained(precision) and uncovered(model) is None:
            store_rounding(model, read, ops)
    elif stored is not None:
        if ops.stored_product is None:
            raise UserError(f"--precision {stored}: needs kernels that are built by g++; install it, or use fp32")
        store(model, read, stored, ops)
    if mesh.degrees.pp > 1:
        keep_stage(model, family, mesh, parameter_shapes(family, config))
    parallelize_inference(model, plan, mesh, read, backend.parameter_dtype(precision))
    model.eval()
    return model


_TWINS = {"embed": "embed_at", "layer_inputs": "layer_inputs_at", "decode": "decode_step"}
"""Methods of a model that training calls, and those that generation calls in their place."""


def check_twins(model: Any) -> None:
    """Raise UserError for a model whose author has changed how it is trained and left how it answers as it was."""
    from llmsuite.models.exact import is_own

    for trained, answering in _TWINS.items():
        kinds = [kind for kind in type(model).__mro__ if trained in vars(kind) or answering in vars(kind)]
        if kinds and not is_own(kinds[0]) and answering not in vars(kinds[0]):
            raise UserError(
                f"{type(model).__name__}: defines {trained}, which training calls, and not {answering}, which "
                "generation calls in its place: it would answer from another network. Define both"
            )


def check_cut(family: ModelFamily, config: Any, degrees: Degrees, option: str = "--num_devices") -> None:
    """Raise UserError for models that give no answers, or cannot be cut over so many tensor parallel ranks; `option` is
    what they are asked for with, where there is no pipeline."""
    from llmsuite.models.shard_plan import WHOLE

    check_answers(family)
    if problem := next((family.shard_plan or WHOLE).problems(config, degrees.tp), None):
        raise UserError(f"{'--tensor_parallel_degree' if degrees.pp > 1 else option} {problem}")


def plain_ops(backend: DeviceBackend, precision: str) -> Any:
    """The operations for generation: the kernels of training know neither a padding on the left nor positions of each
    row."""
    from llmsuite.devices.ops import Ops, causal_mask, rotary
    from llmsuite.inference.attention import grouped_attention, rounded_grouped_attention

    operand = backend.ops(precision).attention_operand
    is_plain = operand is Ops.attention_operand
    return dataclasses.replace(
        backend.ops(precision) if backend.kernels_in_programs else Ops(),
        causal_mask=causal_mask,
        attention=grouped_attention if is_plain else functools.partial(rounded_grouped_attention, operand),
        attention_operand=operand,
        rotary=rotary,
        heads_first=True,
    )


def as_first_rank(tokens: list[int]) -> list[int]:
    """The tokens of rank 0, on every rank: rounding may differ by rank, and all have to continue with the same."""
    from llmsuite.parallel import collective

    return [int(token) for token in collective.from_first_rank([float(token) for token in tokens])]


def parameter_shapes(family: ModelFamily, config: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of a model, by our names; no parameter is made."""
    import paddle

    from llmsuite.devices.ops import Ops

    with paddle.LazyGuard():
        model = family.factory()(config, Ops())
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
