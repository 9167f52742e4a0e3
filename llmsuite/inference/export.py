"""Exports a model as a program of Paddle Inference: model.json, model.pdiparams, config and tokenizer.

The program is one decoding step with dynamic batch and lengths: from token ids, padding and the cache to the logits of
the last column and the extended cache. Generation starts with a cache of no columns. A second program with the same
parameters may hold the whole decoding loop (`llmsuite.inference.loop`).
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.static import InputSpec

from llmsuite import __version__
from llmsuite.checkpoint.int8 import SCALES
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.model_writer import copy_tokenizer
from llmsuite.devices.base import PADDLE_DTYPE, DeviceBackend
from llmsuite.errors import UserError
from llmsuite.files import MANIFEST, committed_directory, read_json_file, sha256_of, write_json
from llmsuite.inference.fused import fuse
from llmsuite.inference.load import load_model
from llmsuite.inference.loop import SPEC, GreedyLoop
from llmsuite.inference.static_experts import make_static
from llmsuite.models.adapter import is_plain_linear
from llmsuite.regular import copy_regular
from llmsuite.typing import Tensor

FORMAT = 2
KIND = "llmsuite static program"
PROGRAM, PARAMETERS = "model.json", "model.pdiparams"
LOOP = "loop.json"
"""The program with the decoding loop, where it was exported."""


@dataclasses.dataclass(frozen=True)
class Exported:
    """The manifest of an exported model."""

    precision: str
    cache_shapes: list[list[int]]
    """Shape of each tensor of the cache, without the batch and with 0 columns."""
    source: str
    """Directory of the model that was exported."""
    source_sha256: dict[str, str]
    """Digest of each file of the model, and of the recipe of its run where there is one."""


class DecodeStep(nn.Layer):
    """One step of generation, which becomes the program."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, padding: Tensor, cache: list[Tensor]) -> list[Tensor]:
        """Ids [B, L], padding [B] and cache [B, …, S, …] to logits [B, V] in float32 and the cache of S + L columns."""
        hidden, present = self.model.decode_step(input_ids, padding, list(zip(cache[::2], cache[1::2])))
        logits = self.model.logits(hidden[:, -1]).astype("float32")
        return [logits, *(tensor for pair in present for tensor in pair)]


def export(
    source: ModelDirectory,
    target: Path,
    backend: DeviceBackend,
    tokenizer: Path,
    precision: str = "fp32",
    decoding_loop: bool = False,
) -> Exported:
    """Write the program of a model into a new directory, with its tokenizer and config, all of it or nothing; with
    `decoding_loop` also one that makes whole greedy answers.

    Raises:
        UserError: the target exists, or the device cannot run the precision.
    """
    if target.exists():
        raise UserError(f"{target} exists; choose another --output, or remove it first")
    if precision == "int8" and backend.name == "cpu":
        raise UserError("--precision int8: Paddle 3.3.1 has no kernel for int8 weights on cpu; use fp32, or a gpu")
    model = load_model(source, backend, "bf16" if precision == "int8" else precision)
    fuse(model)
    if precision == "int8":
        _quantise(model)
    shapes = cache_shapes(model)
    dtype = PADDLE_DTYPE["bf16" if precision == "int8" else precision]
    spec = [
        InputSpec([None, None], "int64", "input_ids"),
        InputSpec([None], "int64", "padding"),
        [InputSpec([None, *shape[:-2], None, shape[-1]], dtype, f"cache_{i}") for i, shape in enumerate(shapes)],
    ]
    files = {path.name: sha256_of(path) for path in _files(source)}
    exported = Exported(precision, shapes, str(source.path.absolute()), files)
    manifest = {"format": FORMAT, "kind": KIND, **dataclasses.asdict(exported), "llmsuite": __version__}
    with committed_directory(target, {**manifest, "paddle": paddle.__version__}) as directory:
        make_static(model)
        _skip_transcription(model)
        _save(DecodeStep(model), directory / PROGRAM, spec)
        if decoding_loop:
            _save(GreedyLoop(model, shapes), directory / LOOP, SPEC)
            parameters = (directory / LOOP).with_suffix(".pdiparams")
            assert sha256_of(parameters) == sha256_of(directory / PARAMETERS), "the programs have other parameters"
            parameters.unlink()
        write_json(directory / "config.json", source.config.to_hf())
        copy_tokenizer(tokenizer, directory)
        for path in sorted(source.path.glob(f"{SCALES}*")):  # for runtimes that multiply integers
            copy_regular(path, directory / path.name)
    return exported


def _save(program: nn.Layer, path: Path, spec: list[Any]) -> None:
    program.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        paddle.jit.save(program, str(path.with_suffix("")), input_spec=spec)


def cache_shapes(model: Any) -> list[list[int]]:
    """Shape of each tensor of a model's cache, without the batch and with 0 columns; found by a pass."""
    with paddle.no_grad():
        _, present = model.decode_step(paddle.zeros([1, 1], "int64"), paddle.zeros([1], "int64"), None)
    return [[*tensor.shape[1:-2], 0, tensor.shape[-1]] for pair in present for tensor in pair]


def is_exported(path: Path) -> bool:
    """Whether a directory holds a program that `export` wrote."""
    return (path / PROGRAM).is_file() and (path / MANIFEST).is_file()


def read_manifest(path: Path) -> Exported:
    """Raises UserError when the directory holds no exported model, or one of another version."""
    if not is_exported(path):
        raise UserError(f"{path}: holds no exported model; make one with `llmsuite export MODEL -o {path}`")
    manifest = read_json_file(path / MANIFEST)
    try:
        if (manifest["kind"], manifest["format"]) != (KIND, FORMAT):
            raise UserError(f"{path / MANIFEST}: is of another kind or version; export the model again")
        return Exported(**{field.name: manifest[field.name] for field in dataclasses.fields(Exported)})
    except (KeyError, TypeError) as error:
        raise UserError(f"{path / MANIFEST}: has no {error}; export the model again") from error


def _files(source: ModelDirectory) -> list[Path]:
    """The files that the exported program depends on."""
    recipe = [path / "recipe.json" for path in source.path.parents[:2]]
    return [source.path / "config.json", *source.files.paths, *(path for path in recipe if path.is_file())]


def _skip_transcription(model: Any) -> None:
    """Keep Paddle from rewriting the Python code of a pass: no branch depends on the values of a tensor, and rewriting
    takes long and would turn decisions by shape into branches of the program."""
    modules = {type(layer).__module__ for layer in model.sublayers(include_self=True)}
    ours = {name for name in modules if not name.startswith("paddle.")}
    ours |= {
        "llmsuite.models.blocks",
        "llmsuite.devices.ops",
        "llmsuite.inference.attention",
        "llmsuite.inference.fused",
        "llmsuite.inference.loop",
        "llmsuite.inference.static_experts",
        __name__,
    }
    paddle.jit.ignore_module([sys.modules[name] for name in sorted(ours)])


def _quantise(model: Any) -> None:
    """Make the weights of linear layers int8 with one scale per column, the format of Paddle's kernels for GPUs."""
    from paddle.nn.quant import weight_only_linear, weight_quantize

    for layer in model.sublayers():
        if is_plain_linear(layer):
            weight, scale = weight_quantize(layer.weight, algo="weight_only_int8")
            bias = layer.bias

            def forward(x: Tensor, weight: Tensor = weight, scale: Tensor = scale, bias: Tensor = bias) -> Tensor:
                return weight_only_linear(x, weight, bias=bias, weight_scale=scale, weight_dtype="int8")

            layer.forward = forward
