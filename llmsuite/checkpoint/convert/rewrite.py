"""Rewrites a model directory in another layout, dtype or file size, a part of a tensor at a time; used for merging,
converting and splitting.

A process that is killed leaves finished files in `TARGET.part`, and the next one continues from there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.files import check_disk, resumable_directory, write_json
from llmsuite.base.locks import remove_path
from llmsuite.base.safe_files import exists
from llmsuite.base.threads import num_threads
from llmsuite.checkpoint.finite import NonFiniteError, OnNonFinite
from llmsuite.checkpoint.finite_model import nonfinite_handler
from llmsuite.checkpoint.fp8 import Fp8Format, Fp8Tensors, Fp8Writer, is_fp8_matrix
from llmsuite.checkpoint.fused import FLAGS, Heads, fuse, fuse_specs
from llmsuite.checkpoint.int8 import Int8Weights, quantization_config
from llmsuite.checkpoint.model_dir import Layout, ModelDirectory
from llmsuite.checkpoint.model_writer import TensorLayout
from llmsuite.checkpoint.stored import FP8, INT8, StoredTensor
from llmsuite.checkpoint.tensor_writer import MAX_FILE_BYTES, WriteOptions, chunk_slices, read_in_chunks, write_tensors
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.checkpoint.tokenizer_files import check_tokenizer, copy_tokenizer
from llmsuite.models.shard_plan import UNSHARDED

FORMAT = 1
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": FP8}


@dataclasses.dataclass(frozen=True)
class OutputFormat:
    """Layout, dtype and files of the model to be written."""

    layout: Layout
    dtype: str | None = None
    """NumPy's name; None keeps each tensor's own, and writes FP8 tensors as bfloat16. FP8 is for the matrices of the
    layers; all other tensors become bfloat16."""
    max_file_bytes: int = MAX_FILE_BYTES
    num_files: int | None = None
    """Instead of max_file_bytes: this many files of about equal size, fewer where single tensors are larger."""
    fused: bool = False
    """True to write qkv_proj and gate_up_fused_proj, for PaddleNLP."""


class Rewrite:
    """A model directory for writing; checked before anything is written."""

    def __init__(self, model: ModelDirectory, form: OutputFormat):
        self.model = model
        self.form = form
        specs = [model.spec_to_write(name) for name in model.names]
        if form.dtype:
            specs = [dataclasses.replace(spec, dtype=_dtype_of(spec, form, model)) for spec in specs]
        self._arrangement = TensorLayout(model.family, model.config, specs, form.layout)
        self.specs = self._arrangement.specs
        self._fp8 = self._fp8_writing() if form.dtype == FP8 else None
        if self._fp8 is not None:
            self.specs = self._fp8.specs
        self._parts: dict[str, list[str]] = {}
        if form.fused:
            self.specs, self._parts = fuse_specs(self.specs)
            if not self._parts:
                raise UserError(
                    f"{model.path}: a {model.config.to_hf()['model_type']} has no matrices that PaddleNLP fuses"
                )
        self._by_name = {spec.name: spec for spec in self.specs}
        self._heads = Heads.of(model.config)

    def _fp8_writing(self) -> Fp8Writer:
        arrangement = self._arrangement
        family = self.model.family
        matrices = set()
        for name in arrangement.names:
            if all(is_fp8_matrix(parameter, family) for parameter in arrangement.parameters(name)):
                matrices.add(name)
        if not matrices:
            raise UserError(f"--dtype fp8: a {family.name} has no matrices for it; choose bf16")
        if self.form.layout != "hf":
            raise UserError("--dtype fp8: PaddleNLP has no layout of it; choose bf16, or layout hf")
        form = self.model.files.form if isinstance(self.model.files, Fp8Tensors) else Fp8Format()
        return Fp8Writer(arrangement.specs, matrices, self._stored, form)

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    def write(self, target: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Write the model; on return it is complete and flushed to disk.

        Raises:
            UserError: the target exists, there is not enough room or memory, a value does not fit its new dtype or is
                not finite, or the source does not match its manifest.
        """
        if exists(target):
            raise UserError(f"{target} exists; choose another --output, or remove it first")
        self.check_room(target)
        check_tokenizer(self.model.tokenizer_directory)  # refused before anything is written
        try:
            self._write(target, progress)
        except MemoryError as error:
            raise UserError(
                f"{target}: there is not enough memory for it: {error or 'none is left'}; finished files stay in "
                f"{_unfinished(target)}"
            ) from error
        except NonFiniteError:
            remove_path(_unfinished(target))
            raise

    def _write(self, target: Path, progress: Callable[[int], None]) -> None:
        limit = self.max_file_bytes
        model = self.model
        form = self.form
        manifest: dict[str, Any] = {"format": FORMAT}
        with resumable_directory(target, self._content(), manifest) as directory:
            metadata = {"format": "pt" if form.layout == "hf" else "np"}
            options = WriteOptions(
                limit, resumable=True, progress=progress, threads=num_threads(), on_nonfinite=self.on_nonfinite
            )
            written = write_tensors(directory, "model", self.specs, self._read, metadata, options)
            if isinstance(model.files, Int8Weights):
                written.add(model.files.write_scales(directory, self._arrangement, self.on_nonfinite))
            write_json(directory / "config.json", self.config())
            copy_tokenizer(model.tokenizer_directory, directory)
            manifest.update(dataclasses.asdict(written))

    @property
    def on_nonfinite(self) -> OnNonFinite | None:
        """The handler that raises for a tensor with values that are not finite; None where they are allowed."""
        return nonfinite_handler(self.model, self._parameters)

    def _parameters(self, theirs: str) -> list[str]:
        """Our names of the parameters in a tensor; none for scales."""
        matrix = None
        if self._fp8 is not None:
            matrix = self._fp8.matrix_of(theirs)
        names = self._parts.get(theirs, [matrix or theirs])
        return [ours for name in names if name in self._arrangement for ours in self._arrangement.parameters(name)]

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        dtype = next((spec.dtype for spec in self.specs if spec.dtype not in (INT8, FP8)), "float32")
        config = {**self.model.config.to_hf(), "torch_dtype": dtype}
        if self.form.layout == "paddlenlp":
            config["dtype"] = dtype
        if isinstance(self.model.files, Int8Weights):
            config["quantization_config"] = quantization_config()
        if self._fp8 is not None:
            config["quantization_config"] = self._fp8.form.to_hf()
        kinds = {FLAGS[kind] for kind in FLAGS for name in self._parts if f".{kind}." in name}
        return {**config, **dict.fromkeys(sorted(kinds), True)}

    def read(self, name: str) -> np.ndarray:
        """Return a full tensor in the layout and dtype of the output, which is neither FP8 nor int8."""
        return self._cast(name, self._stored(name, None), self._by_name[name].dtype)

    def _read(self, theirs: str) -> StoredTensor | Iterator[np.ndarray]:
        spec = self._by_name[theirs]
        matrix = None
        if self._fp8 is not None:
            matrix = self._fp8.matrix_of(theirs)
        found = self._as_stored(matrix or theirs, is_scale=matrix is not None)
        if found is not None and (found.shape, found.dtype) == (spec.shape, spec.dtype):
            return found
        if self._fp8 is not None:
            if matrix is not None:
                return iter([self._fp8.scales(matrix)])
            if spec.dtype == FP8:
                return (self._fp8.codes(theirs, index) for index in chunk_slices(spec))
        return (
            self._cast(theirs, part, spec.dtype)
            for part in read_in_chunks(spec, lambda index: self._stored(theirs, index))
        )

    def _as_stored(self, theirs: str, is_scale: bool) -> StoredTensor | None:
        """The tensor of the source, or its scales, to copy without conversion; None when there is none."""
        if theirs in self._parts:
            return None
        pieces = self._arrangement.parameters(theirs)
        if len(pieces) != 1:
            return None
        find = self.model.stored_scales if is_scale else self.model.stored
        return find(pieces[0], self.form.layout == "hf", self._arrangement.stack_index(theirs))

    def _stored(self, theirs: str, index: Sequence[slice] | None) -> np.ndarray:
        """Values in the layout of the file, in their present dtype."""
        if theirs not in self._parts:
            return self._arrangement.read(theirs, self.model.read, index)
        # a matrix is sliced by rows, and every part has all rows
        is_matrix = len(self._by_name[theirs].shape) > 1
        own = None
        if index is not None and is_matrix:
            own = [index[0], slice(None)]
        parts = [self._arrangement.read(name, self.model.read, own) for name in self._parts[theirs]]
        fused = fuse(theirs, parts, self._heads)
        return fused if index is None or is_matrix else fused[tuple(index)]

    def _cast(self, name: str, value: np.ndarray, dtype: str) -> np.ndarray:
        if value.dtype.name == dtype:
            return value
        with np.errstate(over="ignore"):
            result = value.astype("float32", copy=False).astype(dtype)
        if dtype == "float16" and not np.array_equal(np.isfinite(result), np.isfinite(value.astype("float32"))):
            raise UserError(f"{self.model.path}: {name!r} has values too large for fp16; use --dtype bf16 or fp32")
        return result

    @property
    def max_file_bytes(self) -> int:
        """Limit for the bytes of tensors in a file; a larger tensor has a file of its own."""
        if self.form.num_files is None:
            return self.form.max_file_bytes
        if self.form.num_files > len(self.specs):
            raise UserError(f"--split-num is {self.form.num_files}; the model has {len(self.specs)} tensors")
        # binary search for the smallest limit that gives at most this many files
        low = max(spec.num_bytes for spec in self.specs)
        high = max(1, self.num_bytes)
        while low < high:
            middle = (low + high) // 2
            if _num_files(self.specs, middle) <= self.form.num_files:
                high = middle
            else:
                low = middle + 1
        return low

    def check_room(self, target: Path) -> None:
        """Raise UserError unless the model fits onto the disk."""
        check_disk(target, self.num_bytes, sum(p.stat().st_size for p in _unfinished(target).glob("*")))

    def _content(self) -> str:
        """Digest of everything that the result depends on; source files by size and modification time, to be fast."""
        files = [(str(p.absolute()), p.stat().st_size, p.stat().st_mtime_ns) for p in self.model.files.paths]
        data = [
            files,
            self.model.config.to_hf(),
            dataclasses.asdict(self.form),
            self.model.allow_nonfinite,
            [dataclasses.astuple(s) for s in self.specs],
        ]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _dtype_of(spec: TensorSpec, form: OutputFormat, model: ModelDirectory) -> str:
    """The dtype in which a parameter is written; `Fp8Writer` decides later which matrices become FP8."""
    if form.dtype != FP8:
        return str(form.dtype)
    if (model.family.shard_plan or UNSHARDED).is_gate_bias(spec.name):
        return "float32"
    return "bfloat16"


def _unfinished(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def _num_files(specs: Sequence[TensorSpec], limit: int) -> int:
    count = 1
    size = 0
    for spec in specs:
        if size and size + spec.num_bytes > limit:
            count = count + 1
            size = 0
        size += spec.num_bytes
    return count
