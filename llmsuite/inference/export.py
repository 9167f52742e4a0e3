"""Export of a model as a program of Paddle Inference: model.json, model.pdiparams, config and tokenizer.

The program is one decoding step with dynamic batch and lengths: from token ids, padding and the cache to the logits of
the last position and the extended cache. Generation starts with an empty cache. A second program with the same
parameters may have the full decoding loop (`llmsuite.inference.greedy_loop`).

On a device that multiplies with packed matrices (`DeviceBackend.weight_only_precisions`) a program has these, and
llmsuite's operations for their matmuls. The sources of the operations are exported too, for predictors elsewhere.

For several ranks each has a program and parameters of its own, in `rank_N`. Sums over tensor parallel ranks are
operations of the programs. The programs of a pipeline exchange hidden states: all but the first have them as an
additional input, all but the last return them instead of logits.
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
from llmsuite.base.errors import UserError
from llmsuite.base.files import committed_directory, sha256_of, write_json
from llmsuite.base.interrupts import held_interrupts
from llmsuite.base.safe_files import copy_regular, exists, is_file
from llmsuite.base.typing import Tensor
from llmsuite.checkpoint.finite_model import with_finite_check
from llmsuite.checkpoint.int8 import SCALES
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
from llmsuite.contract.registry import left_out_precision
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.data.tokenizer import stop_token_ids_of
from llmsuite.devices.base import DeviceBackend
from llmsuite.inference.export_manifest import (
    ALONE,
    FORMAT,
    KERNELS,
    KIND,
    LOOP,
    PARAMETERS,
    PROGRAM,
    ExportManifest,
    rank_directory,
)
from llmsuite.inference.exported_readme import predictor_calls, readme
from llmsuite.inference.fused import fold_norm_weights, fuse
from llmsuite.inference.greedy_loop import SPEC, GreedyLoop
from llmsuite.inference.load import check_cut, check_precision, load_model
from llmsuite.inference.pack_model import register_packed_buffers
from llmsuite.inference.parity import ALONE as ALONE_MESH
from llmsuite.inference.parity import TokenRows, record_program
from llmsuite.inference.rank_shards import add_collectives, load_shard, ring_of
from llmsuite.inference.static_experts import make_static
from llmsuite.models.linear import Linear, LinearKernel, adopt_linears, is_plain_linear
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.observe.activations.recording import RankRecord
from llmsuite.parallel.mesh import Mesh

_GENERATION_CONFIG = "generation_config.json"


class DecodeStep(nn.Layer):
    """One step of generation, which becomes the program."""

    def __init__(self, model: Any, is_last: bool = True):
        """`is_last`: the model has its last layers, and so logits."""
        super().__init__()
        self.model = model
        self._is_last = is_last

    def forward(
        self, input_ids: Tensor, padding: Tensor, cache: list[Tensor], hidden: Tensor | None = None
    ) -> list[Tensor]:
        """Decode one step.

        Args:
            input_ids: [B, L].
            padding: [B], number of padding positions at the beginning of each row.
            cache: [B, …, S, …] each.
            hidden: [B, L, D], the output of the previous pipeline stage; None for the first stage.

        Returns:
            Logits [B, V] in float32, of stages before the last hidden states [B, L, D]; then the cache of S + L
            positions.
        """
        pairs = list(zip(cache[::2], cache[1::2]))
        hidden, present = self.model.decode_step(input_ids, padding, pairs, stage_input=hidden)
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
    moved_to: Path | None = None,
) -> ExportManifest:
    """Write the program of a model into a new directory, with its tokenizer and config, atomically.

    Args:
        source: the model.
        target: the new directory.
        backend: of the device that the program is for.
        tokenizer: directory of the tokenizer.
        precision: of the program.
        decoding_loop: write a second program, which decodes complete greedy answers.
        degrees: tensor and pipeline parallel degrees. There is a program for each rank; one shard of the model is in
            memory at a time.
        moved_to: directory that the model is moved to afterwards, for the manifest; None where it stays.

    Returns:
        The manifest.

    Raises:
        UserError: the target exists, the device does not support the precision, the model cannot be cut for the
            degrees or stored in the precision, it has linear attention, a value is not finite, or no predictor runs
            on the device.
    """
    if exists(target):
        raise UserError(f"{target} exists; choose another --output, or remove it first")
    _check_precision(precision, backend)
    _check_cache(source)
    predictor_calls(backend)  # raises, if no predictor runs there, before anything is computed
    has_kernels = _is_packed(precision, backend)
    if has_kernels and degrees.num_ranks > 1:
        raise UserError(
            f"--precision {precision}: on {backend.name} for one device; leave out --tensor_parallel_degree and "
            "--pipeline_parallel_degree"
        )
    if decoding_loop and degrees.pp > 1:
        raise UserError("--decoding_loop: is a program of one pipeline stage; leave out --pipeline_parallel_degree")
    if has_kernels:
        live_precision = "fp32"
    elif precision == "int8":
        live_precision = "bf16"
    else:
        live_precision = precision
    check_precision(source, backend, live_precision)
    check_cut(source.family, source.config, degrees, "--tensor_parallel_degree")
    source = with_finite_check(source)
    files = {path.name: sha256_of(path) for path in _source_files(source)}
    manifest = {"format": FORMAT, "kind": KIND, "llmsuite": __version__, "paddle": paddle.__version__}
    shapes: list[list[int]] = []
    stages: list[int] = []
    with committed_directory(target, manifest) as directory:
        for rank in range(degrees.num_ranks):
            mesh = Mesh(degrees, rank)
            found = _write_rank(source, rank_directory(directory, mesh), backend, precision, mesh, decoding_loop)
            if mesh.coordinate["tp"] == 0:
                stages.append(len(shapes))
                shapes += found
        write_json(directory / "config.json", source.config.to_hf())
        copy_tokenizer(tokenizer, directory)
        recommended = source.path / _GENERATION_CONFIG
        # the copied tokenizer directory may have brought one, if it is that of an adapter
        if is_file(recommended) and not is_file(directory / _GENERATION_CONFIG):
            copy_regular(recommended, directory / _GENERATION_CONFIG)
        for scales in sorted(source.path.glob(f"{SCALES}*")):  # for runtimes that multiply integers
            copy_regular(scales, directory / scales.name)
        if has_kernels:
            _write_kernels(directory / KERNELS, backend)
        path = str((moved_to or source.path).absolute())
        added = str(source.adapter.absolute()) if source.adapter else None
        exported = ExportManifest(precision, shapes, path, files, degrees.tp, degrees.pp, stages, has_kernels, added)
        if degrees.num_ranks == 1:
            ends = stop_token_ids_of(directory, source.config.vocab_size)
            (directory / "README.md").write_text(readme(exported, ends, backend))
        manifest |= dataclasses.asdict(exported)
    return exported


def _write_rank(
    source: ModelDirectory, directory: Path, backend: DeviceBackend, precision: str, mesh: Mesh, decoding_loop: bool
) -> list[list[int]]:
    """Write the programs of a rank; returns the shapes of its cache, as in `ExportManifest.cache_shapes`."""
    model, dtype = _load_fused(source, backend, precision, mesh)
    stage = mesh.coordinate["pp"]
    last = mesh.degrees.pp - 1
    hidden = InputSpec([None, None, source.config.hidden_size], dtype, "hidden")
    shapes = cache_shapes(model, None if stage == 0 else paddle.zeros([1, 1, source.config.hidden_size], dtype))
    spec = [
        InputSpec([None, None], "int64", "input_ids"),
        InputSpec([None], "int64", "padding"),
        [InputSpec([None, *shape[:-2], None, shape[-1]], dtype, f"cache_{i}") for i, shape in enumerate(shapes)],
        *([hidden] if stage else []),
    ]
    _prepare_for_program(model, source, backend, mesh)
    directory.mkdir(exist_ok=True)
    _save(DecodeStep(model, stage == last), directory / PROGRAM, spec)
    if decoding_loop:
        _save(GreedyLoop(model, shapes, dtype), directory / LOOP, SPEC)
        parameters = (directory / LOOP).with_suffix(".pdiparams")
        assert sha256_of(parameters) == sha256_of(directory / PARAMETERS), "the programs differ in their parameters"
        parameters.unlink()
    return shapes


def _load_fused(source: ModelDirectory, backend: DeviceBackend, precision: str, mesh: Mesh) -> tuple[Any, str]:
    """Load and fuse the model of a rank; returns it with the dtype of its cache."""
    has_kernels = _is_packed(precision, backend)
    if has_kernels:
        model = load_model(source, backend, packed=precision)
        register_packed_buffers(model)
    else:
        model = load_shard(source, backend, "bf16" if precision == "int8" else precision, mesh)
    fuse(model)
    if precision == "int8" and not has_kernels:
        _quantise_int8(model)
    return model, ExportManifest(precision, [], "", {}, has_kernels=has_kernels).dtype


def _prepare_for_program(model: Any, source: ModelDirectory, backend: DeviceBackend, mesh: Mesh) -> None:
    """Replace parts of a fused model by the forms that only programs have."""
    add_collectives(model, source.family.shard_plan or UNSHARDED, mesh, ring_of(mesh))
    make_static(model)
    fold_norm_weights(model)
    _skip_transcription(model, backend.kernel_modules())


def record_export(source: ModelDirectory, backend: DeviceBackend, precision: str, rows: TokenRows) -> RankRecord:
    """Record the outputs of a model's modules in a program for one device, which is built here and not written."""
    _check_cache(source)
    model, dtype = _load_fused(source, backend, precision, ALONE_MESH)
    shapes = cache_shapes(model)
    _prepare_for_program(model, source, backend, ALONE_MESH)
    step = DecodeStep(model)
    step.eval()
    return record_program(model, step, rows, shapes, dtype)


def _is_packed(precision: str, backend: DeviceBackend) -> bool:
    """True where the matrices of a program are packed in a precision, and multiplied by llmsuite's kernels."""
    return precision in backend.weight_only_precisions and precision not in backend.precisions


def _check_precision(precision: str, backend: DeviceBackend) -> None:
    """Check the precision of programs for a device. Raises UserError for an unsupported one."""
    known = [*backend.precisions, *(p for p in backend.weight_only_precisions if p not in backend.precisions)]
    if "bf16" in backend.precisions:
        known.append("int8")  # weights only, with one scale for each output
    if precision not in known:
        hint = left_out_precision(backend.name, precision)
        raise UserError(f"--precision {precision}: {backend.name} has {', '.join(known)}{hint}")


def _check_cache(source: ModelDirectory) -> None:
    """Raise UserError for a model whose cache has states without positions, which no program of a step has as input."""
    shape_spec = source.family.shape_spec
    if shape_spec is not None and shape_spec(source.config).has_states:
        raise UserError(
            f"{source.path}: the {source.family.name} family has linear attention, whose state an exported program "
            "does not carry; generate and serve run the model itself"
        )


def _write_kernels(directory: Path, backend: DeviceBackend) -> None:
    """Write the sources of the operations of programs with packed matrices, and the script that registers them."""
    kernels = backend.program_kernels()
    assert kernels is not None, "the device has weights for programs"
    directory.mkdir()
    for path in kernels.program_files():
        shutil.copyfile(path, directory / path.name)


def _save(program: nn.Layer, path: Path, spec: list[Any]) -> None:
    program.eval()
    with warnings.catch_warnings(), held_interrupts():
        warnings.simplefilter("ignore")
        paddle.jit.save(program, str(path.with_suffix("")), input_spec=spec)


def cache_shapes(model: Any, stage_input: Tensor | None = None) -> list[list[int]]:
    """Shape of each tensor of a model's cache, without the batch and with 0 positions; found by a pass. `stage_input`
    as for `CausalLM.decode_step`."""
    ids = paddle.zeros([1, 1], "int64")
    padding = paddle.zeros([1], "int64")
    with paddle.no_grad():
        _, present = model.decode_step(ids, padding, None, stage_input=stage_input)
    return [[*tensor.shape[1:-2], 0, tensor.shape[-1]] for pair in present for tensor in pair]


def _source_files(source: ModelDirectory) -> list[Path]:
    """Files that the exported program depends on."""
    recipe = [path / "recipe.json" for path in source.path.parents[:2]]
    return [source.path / "config.json", *source.files.paths, *(path for path in recipe if is_file(path))]


def _skip_transcription(model: Any, kernels: set[str]) -> None:
    """Keep Paddle from rewriting the Python code of a pass: no branch depends on the values of a tensor, and rewriting
    is slow and would turn decisions by shape into branches of the program."""
    classes: set[type] = set()
    for layer in model.sublayers(include_self=True):
        classes.update(type(layer).__mro__)
    ours = {cls.__module__ for cls in classes if not cls.__module__.startswith(("paddle.", "builtins"))}
    ours |= {
        "llmsuite.models.blocks",
        "llmsuite.models.rotation",
        "llmsuite.devices.decoding_ops",
        "llmsuite.devices.expert_ops",
        "llmsuite.devices.masks",
        "llmsuite.devices.matmul_ops",
        "llmsuite.devices.ops",
        "llmsuite.devices.paddle_kernels",  # a plugin's kernel module may take some of them
        "llmsuite.inference.attention",
        "llmsuite.inference.fused",
        "llmsuite.inference.fusible",
        "llmsuite.inference.greedy_loop",
        "llmsuite.inference.rank_shards",
        "llmsuite.inference.static_experts",
        __name__,
        *kernels,
    }
    paddle.jit.ignore_module([sys.modules[name] for name in sorted(ours & sys.modules.keys())])


def _quantise_int8(model: Any) -> None:
    """Make the weights of linear layers int8, with one scale for each output: the format of Paddle's GPU kernels."""
    from paddle.nn.quant import weight_only_linear, weight_quantize

    def kernel_of(int8_weight: Tensor, scale: Tensor) -> LinearKernel:
        def kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return weight_only_linear(x, int8_weight, bias=bias, weight_scale=scale, weight_dtype="int8")

        return kernel

    adopt_linears(model)
    for layer in model.sublayers():
        if isinstance(layer, Linear) and is_plain_linear(layer):
            layer.kernel = kernel_of(*weight_quantize(layer.weight, algo="weight_only_int8"))
