"""Exports a model as a program of Paddle Inference: model.json, model.pdiparams, config and tokenizer.

The program is one decoding step with dynamic batch and lengths: from token ids, padding and the cache to the logits of
the last column and the extended cache. Generation starts with a cache of no columns. A second program with the same
parameters may hold the whole decoding loop (`llmsuite.inference.loop`).

On a device that multiplies with stored matrices (`DeviceBackend.stored_precisions`) a program has these, and operations
of llmsuite's for their products. The sources of the operations are written beside it, for predictors elsewhere.

For several ranks each has a program and parameters of its own, in `rank_N`. Sums over tensor parallel ranks are
operations of the programs. The programs of a pipeline pass hidden states on: those behind the first take them as a
further input, those before the last give them in place of logits.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.static import InputSpec

from llmsuite import __version__
from llmsuite.align.activations import Record
from llmsuite.checkpoint.finite_model import checked
from llmsuite.checkpoint.int8 import SCALES
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
from llmsuite.data.tokenizer import ends_of
from llmsuite.devices.base import DeviceBackend
from llmsuite.errors import UserError
from llmsuite.files import committed_directory, sha256_of, write_json
from llmsuite.inference.exported import (
    ALONE,
    FORMAT,
    KERNELS,
    KIND,
    LOOP,
    PARAMETERS,
    PROGRAM,
    Exported,
    rank_directory,
)
from llmsuite.inference.exported_readme import predictor_calls, readme
from llmsuite.inference.forms import ALONE as ALONE_MESH
from llmsuite.inference.forms import Rows, as_program
from llmsuite.inference.fused import fold_gains, fuse
from llmsuite.inference.load import check_cut, check_precision, load_model
from llmsuite.inference.loop import SPEC, GreedyLoop
from llmsuite.inference.rank_parts import join_parts, load_part, ring_of
from llmsuite.inference.static_experts import make_static
from llmsuite.inference.stored import keep_matrices
from llmsuite.models.exact import is_plain
from llmsuite.models.shard_plan import WHOLE
from llmsuite.parallel.mesh import Mesh
from llmsuite.regular import copy_regular, exists, is_file
from llmsuite.schema.degrees import Degrees
from llmsuite.typing import Tensor

_RECOMMENDED = "generation_config.json"


class DecodeStep(nn.Layer):
    """One step of generation, which becomes the program."""

    def __init__(self, model: Any, is_last: bool = True):
        """`is_last`: whether the model has its last layers, and so logits."""
        super().__init__()
        self.model, self._is_last = model, is_last

    def forward(
        self, input_ids: Tensor, padding: Tensor, cache: list[Tensor], hidden: Tensor | None = None
    ) -> list[Tensor]:
        """Ids [B, L], padding [B] and cache [B, …, S, …] to logits [B, V] in float32 and the cache of S + L columns.

        `hidden` [B, L, D] is what the pipeline stage before gave; one that is not the last gives such in place of
        logits.
        """
        pairs = list(zip(cache[::2], cache[1::2]))
        hidden, present = self.model.decode_step(input_ids, padding, pairs, entering=hidden)
        result = self.model.logits(hidden[:, -1]).astype("float32") if self._is_last else hidden
        return [result, *(tensor for pair in present for tensor in pair)]


def export(
    source: ModelDirectory,
    target: Path,
    backend: DeviceBackend,
    tokenizer: Path,
    precision: str = "fp32",
    decoding_loop: bool = False,
    degrees: Degrees = ALONE,
    adapter: Path | None = None,
) -> Exported:
    """Write the program of a model into a new directory, with its tokenizer and config, all of it or nothing; with
    `decoding_loop` also one that makes whole greedy answers. For several ranks, of tensor and pipeline parallel
    `degrees`, write the programs of each; one part of the model is in memory at a time. `adapter` is the directory of
    what was added to the model, if something was.

    Raises:
        UserError: the target exists, the device cannot run the precision, the model not be cut or stored so, a value is
            not finite, or no predictor runs on the device.
    """
    if exists(target):
        raise UserError(f"{target} exists; choose another --output, or remove it first")
    _check_precision(precision, backend)
    predictor_calls(backend)  # refused before anything is computed
    if (has_kernels := _is_stored(precision, backend)) and degrees.num_ranks > 1:
        raise UserError(
            f"--precision {precision}: on {backend.name} for one device; leave out --tensor_parallel_degree and "
            "--pipeline_parallel_degree"
        )
    if decoding_loop and degrees.pp > 1:
        raise UserError("--decoding_loop: is a program of one pipeline stage; leave out --pipeline_parallel_degree")
    check_precision(source, backend, "fp32" if has_kernels else "bf16" if precision == "int8" else precision)
    check_cut(source.family, source.config, degrees, "--tensor_parallel_degree")
    source = checked(source)
    files = {path.name: sha256_of(path) for path in _files(source)}
    manifest = {"format": FORMAT, "kind": KIND, "llmsuite": __version__, "paddle": paddle.__version__}
    shapes: list[list[int]] = []
    stages: list[int] = []
    with committed_directory(target, manifest) as directory:
        for rank in range(degrees.num_ranks):
            mesh = Mesh(degrees, rank)
            found = _write_part(source, rank_directory(directory, mesh), backend, precision, mesh, decoding_loop)
            if mesh.coordinate["tp"] == 0:
                stages.append(len(shapes))
                shapes += found
        write_json(directory / "config.json", source.config.to_hf())
        copy_tokenizer(tokenizer, directory)
        recommended = source.path / _RECOMMENDED
        if is_file(recommended) and not is_file(directory / _RECOMMENDED):  # an adapter has its own tokenizer
            copy_regular(recommended, directory / _RECOMMENDED)
        for path in sorted(source.path.glob(f"{SCALES}*")):  # for runtimes that multiply integers
            copy_regular(path, directory / path.name)
        if has_kernels:
            _write_kernels(directory / KERNELS, backend)
        place, added = str(source.path.absolute()), str(adapter.absolute()) if adapter else None
        exported = Exported(precision, shapes, place, files, degrees.tp, degrees.pp, stages, has_kernels, added)
        if degrees.num_ranks == 1:
            ends = ends_of(directory, source.config.vocab_size)
            (directory / "README.md").write_text(readme(exported, ends, backend))
        manifest |= dataclasses.asdict(exported)
    return exported


def _write_part(
    source: ModelDirectory, directory: Path, backend: DeviceBackend, precision: str, mesh: Mesh, decoding_loop: bool
) -> list[list[int]]:
    """Write the programs of a rank; returns the shapes of its cache, see `Exported.cache_shapes`."""
    model, dtype = _fused(source, backend, precision, mesh)
    stage, last = mesh.coordinate["pp"], mesh.degrees.pp - 1
    hidden = InputSpec([None, None, source.config.hidden_size], dtype, "hidden")
    shapes = cache_shapes(model, None if stage == 0 else paddle.zeros([1, 1, source.config.hidden_size], dtype))
    spec = [
        InputSpec([None, None], "int64", "input_ids"),
        InputSpec([None], "int64", "padding"),
        [InputSpec([None, *shape[:-2], None, shape[-1]], dtype, f"cache_{i}") for i, shape in enumerate(shapes)],
        *([hidden] if stage else []),
    ]
    _make_program_form(model, source, backend, mesh)
    directory.mkdir(exist_ok=True)
    _save(DecodeStep(model, stage == last), directory / PROGRAM, spec)
    if decoding_loop:
        _save(GreedyLoop(model, shapes, dtype), directory / LOOP, SPEC)
        parameters = (directory / LOOP).with_suffix(".pdiparams")
        assert sha256_of(parameters) == sha256_of(directory / PARAMETERS), "the programs have other parameters"
        parameters.unlink()
    return shapes


def _fused(source: ModelDirectory, backend: DeviceBackend, precision: str, mesh: Mesh) -> tuple[Any, str]:
    """The model of a rank, fused, and the dtype of its cache."""
    has_kernels = _is_stored(precision, backend)
    if has_kernels:
        model = load_model(source, backend, stored=precision)
        keep_matrices(model)
    else:
        model = load_part(source, backend, "bf16" if precision == "int8" else precision, mesh)
    fuse(model)
    if precision == "int8" and not has_kernels:
        _quantise(model)
    return model, Exported(precision, [], "", {}, has_kernels=has_kernels).dtype


def _make_program_form(model: Any, source: ModelDirectory, backend: DeviceBackend, mesh: Mesh) -> None:
    """Give a fused model the forms that only programs have."""
    join_parts(model, source.family.shard_plan or WHOLE, mesh, ring_of(mesh))
    make_static(model)
    fold_gains(model)
    _skip_transcription(model, backend.kernel_module)


def recorded(source: ModelDirectory, backend: DeviceBackend, precision: str, rows: Rows) -> Record:
    """What the modules of a model give as a program for one device, which is made here and not written."""
    model, dtype = _fused(source, backend, precision, ALONE_MESH)
    shapes = cache_shapes(model)
    _make_program_form(model, source, backend, ALONE_MESH)
    step = DecodeStep(model)
    step.eval()
    return as_program(model, step, rows, shapes, dtype)


def _is_stored(precision: str, backend: DeviceBackend) -> bool:
    """Whether the matrices of a program are stored in a precision and multiplied by kernels of llmsuite's."""
    return precision in backend.stored_precisions and precision not in backend.precisions


def _check_precision(precision: str, backend: DeviceBackend) -> None:
    """Raise UserError for a precision that programs for a device do not have."""
    known = [*backend.precisions, *(p for p in backend.stored_precisions if p not in backend.precisions)]
    if "bf16" in backend.precisions:
        known.append("int8")  # weights only, with scales of columns
    if precision not in known:
        raise UserError(f"--precision {precision}: {backend.name} has {', '.join(known)}")


def _write_kernels(directory: Path, backend: DeviceBackend) -> None:
    """Write what registers the operations of programs with stored matrices, and how such programs are run."""
    directory.mkdir()
    for path in backend.program_kernels():
        shutil.copyfile(path, directory / path.name)


def _save(program: nn.Layer, path: Path, spec: list[Any]) -> None:
    program.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        paddle.jit.save(program, str(path.with_suffix("")), input_spec=spec)


def cache_shapes(model: Any, entering: Tensor | None = None) -> list[list[int]]:
    """Shape of each tensor of a model's cache, without the batch and with 0 columns; found by a pass. `entering` as for
    `CausalLM.decode_step`."""
    ids, padding = paddle.zeros([1, 1], "int64"), paddle.zeros([1], "int64")
    with paddle.no_grad():
        _, present = model.decode_step(ids, padding, None, entering=entering)
    return [[*tensor.shape[1:-2], 0, tensor.shape[-1]] for pair in present for tensor in pair]


def _files(source: ModelDirectory) -> list[Path]:
    """The files that the exported program depends on."""
    recipe = [path / "recipe.json" for path in source.path.parents[:2]]
    return [source.path / "config.json", *source.files.paths, *(path for path in recipe if is_file(path))]


def _skip_transcription(model: Any, kernels: str) -> None:
    """Keep Paddle from rewriting the Python code of a pass: no branch depends on the values of a tensor, and rewriting
    takes long and would turn decisions by shape into branches of the program."""
    kinds = {kind for layer in model.sublayers(include_self=True) for kind in type(layer).__mro__}
    ours = {kind.__module__ for kind in kinds if not kind.__module__.startswith(("paddle.", "builtins"))}
    ours |= {
        "llmsuite.models.blocks",
        "llmsuite.models.rotation",
        "llmsuite.devices.ops",
        "llmsuite.inference.attention",
        "llmsuite.inference.fused",
        "llmsuite.inference.fusible",
        "llmsuite.inference.loop",
        "llmsuite.inference.rank_parts",
        "llmsuite.inference.static_experts",
        __name__,
        kernels,
    }
    paddle.jit.ignore_module([sys.modules[name] for name in sorted(ours & sys.modules.keys())])


def _quantise(model: Any) -> None:
    """Make the weights of linear layers int8 with one scale per column, the format of Paddle's kernels for GPUs."""
    from paddle.nn.quant import weight_only_linear, weight_quantize

    for layer in model.sublayers():
        if is_plain(layer):
            weight, scale = weight_quantize(layer.weight, algo="weight_only_int8")
            bias = layer.bias

            def forward(x: Tensor, weight: Tensor = weight, scale: Tensor = scale, bias: Tensor = bias) -> Tensor:
                return weight_only_linear(x, weight, bias=bias, weight_scale=scale, weight_dtype="int8")

            layer.forward = forward
