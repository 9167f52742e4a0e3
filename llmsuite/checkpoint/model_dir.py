"""Reads a model directory: config.json and safetensors, in the layout of HF or PaddleNLP. `model_writer.py` writes it.

Inside llmsuite a parameter has HF's name, and a linear weight is [inputs, outputs], as in Paddle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object, sha256_of
from llmsuite.base.safe_files import is_file
from llmsuite.checkpoint.awq import AwqFormat
from llmsuite.checkpoint.expected_tensor import FLOATS, ExpectedTensor
from llmsuite.checkpoint.fp8 import Fp8Format, Fp8Tensors
from llmsuite.checkpoint.fused import Heads, UnfusedTensors, is_fused
from llmsuite.checkpoint.gptq import GptqFormat
from llmsuite.checkpoint.mxfp4 import Mxfp4Tensors, is_mxfp4
from llmsuite.checkpoint.packed_groups import PackedTensors
from llmsuite.checkpoint.stored import FP8, INT8, StoredTensor
from llmsuite.checkpoint.tensors import SUFFIX, Int8Tensors, RenamedTensors, TensorFiles, TensorSource, TensorSpec
from llmsuite.checkpoint.tied import check_tied
from llmsuite.checkpoint.tokenizer_files import tokenizer_of_adapter
from llmsuite.contract.specs import ModelFamily
from llmsuite.models.head import EMBEDDING, NO_KEYS, OUTPUT, is_tied
from llmsuite.models.hf_tensors import HfTensors
from llmsuite.models.mtp import num_mtp_layers
from llmsuite.models.protocols import CarriesTensors, HasPaddleNLPNames, HasTiedEmbedding, num_stored_mtp_layers

Load = Literal["exact", "known", "any"]
"""Strictness of loading: "known" allows unexpected tensors, "any" also missing ones."""
Layout = Literal["hf", "paddlenlp"]
"""Naming and orientation of matrices in the files."""
_MAX_SHOWN_CHARS = 100
"""Characters of a value that is refused, or of a name."""
_MAX_SHOWN_NAMES = 50
"""Names of missing or unexpected tensors, in a message."""


def hf_name(family: ModelFamily, config: Any, theirs: str) -> str | None:
    """Return HF's full name of a tensor in a file of either layout; None for one that is no parameter."""
    names = family.names()
    prefix = names.paddlenlp_prefix(config)
    name = theirs
    if prefix and theirs.startswith(prefix):
        name = f"model.{theirs[len(prefix) :]}"
    found: str | None = names.from_hf(name, config)
    return found


@dataclasses.dataclass
class ModelDirectory:
    """A model on disk. Only config.json, the index and headers are read before a tensor is needed."""

    path: Path
    family: ModelFamily
    config: Any
    """The family's shape."""
    layout: Layout
    tensors: dict[str, HfTensors]
    """Stored tensors of each of our parameters, by their names in the files."""
    files: TensorSource
    ignored: list[str]
    """Tensors in the files that are no parameter of the model: derived ones, or layers that llmsuite does not build."""
    linears_transposed: bool
    """True if linear weights are [outputs, inputs] in the files."""
    unexpected: list[str] = dataclasses.field(default_factory=list)
    """Tensors in the files that the model does not have; only where `Load` allows them."""
    is_fp8: bool = False
    """True if matrices are stored in FP8; they are read as float32."""
    side_adapter: Any = None
    """Adapter that runs next to the model, see `llmsuite.checkpoint.side_adapters`. It is no part of `names`."""
    adapter: Path | None = None
    """Directory of the adapter that was merged into the model, or runs next to it."""
    allow_nonfinite: bool = False
    """True if copies may have values that are NaN or infinite, see `llmsuite.checkpoint.finite`."""
    tied_copy: str | None = None
    """Stored head of a tied model, if the files have it in addition to the embedding, which it has to equal."""

    @property
    def names(self) -> list[str]:
        """Our names of the parameters, and names of the tensors that are carried along."""
        return list(self.tensors)

    @property
    def carried(self) -> list[str]:
        """Tensors that are no parameters, and are copied to all that is made of the model; by HF's names."""
        return [name for name in self.tensors if _is_carried(self.family, name, self.config)]

    @property
    def description(self) -> str:
        """The layout, and the ignored tensors."""
        if not self.ignored:
            return f"{self.layout} layout"
        return f"{self.layout} layout; {len(self.ignored)} tensors are ignored, such as {self.ignored[0]}"

    @property
    def tokenizer_directory(self) -> Path:
        """Directory of its tokenizer, chat template and generation_config.json: an adapter may have its own.

        Raises UserError as `tokenizer_of_adapter`.
        """
        if self.adapter is None:
            return self.path
        return tokenizer_of_adapter(self.adapter, self.path)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """Read a parameter by our name, or a slice (one slice a dim): oriented as in memory, in the stored dtype."""
        place = self.tensors[name]
        is_transposed = self._is_transposed(name)
        if name == EMBEDDING and self.tied_copy in self.files.names:
            check_tied(self.path, self.files, place.names[0], str(self.tied_copy), index)
        if place.stacked:
            first, rest = (index[0], index[1:]) if index else (slice(None), None)
            return self._read_stack(place, place.names[first], rest, is_transposed)
        if place.num_parts > 1:
            *shape, size = self.spec(name).shape
            *outer, last = index or [*map(slice, shape), slice(size)]
            start, stop, _ = last.indices(size)
            if place.alternates:
                both = [*outer, slice(start * place.num_parts, stop * place.num_parts)]
                return np.ascontiguousarray(self._read(place, place.names[0], both, is_transposed)[..., place.columns])
            before = place.columns.start
            index = [*outer, slice(before + start, before + stop)]
        return self._read(place, place.names[0], index, is_transposed)

    def _read_stack(
        self, place: HfTensors, names: Sequence[str], index: Sequence[slice] | None, is_transposed: bool
    ) -> np.ndarray:
        result = None
        for number, theirs in enumerate(names):  # one at a time, as a stack may be most of the model
            part = self._read(place, theirs, index, is_transposed)
            if result is None:
                result = np.empty((len(names), *part.shape), part.dtype)
            if (part.shape, part.dtype) != (result.shape[1:], result.dtype):
                raise UserError(f"{self.path}: {theirs!r} has another shape or dtype than {names[0]!r}")
            result[number] = part
        assert result is not None, "a stack has at least one tensor"
        return result

    def _read(self, place: HfTensors, theirs: str, index: Sequence[slice] | None, is_transposed: bool) -> np.ndarray:
        if not is_transposed:
            return self.files.read(theirs, index)
        return place.transposed(self.files.read(theirs, place.transposed_dims(index) if index else index))

    def stored(self, name: str, transposed: bool, index: int | None = None) -> StoredTensor | None:
        """Return the stored tensor of a parameter, to be copied without conversion; None if that is not possible.

        Args:
            name: of the parameter.
            transposed: orientation of linear weights in the copy.
            index: of a stacked parameter, the matrix to copy.
        """
        found = self._stored_name(name, index)
        is_linear = self.family.names().is_linear(name)
        if name == EMBEDDING and self.tied_copy in self.files.names:
            return None  # `read` compares it with the tied copy
        if found is None or not isinstance(self.files, TensorFiles | Fp8Tensors):
            return None
        if not is_linear or transposed == self.linears_transposed:
            return self.files.stored(found)
        return None

    def stored_scales(self, name: str, transposed: bool, index: int | None = None) -> StoredTensor | None:
        """Return the scales of a matrix in FP8 that `stored` returns; None for other tensors."""
        found = self._stored_name(name, index)
        if found is None or not isinstance(self.files, Fp8Tensors) or not self.files.is_quantised(found):
            return None
        if transposed == self.linears_transposed:
            return self.files.stored_scales(found)
        return None

    def _stored_name(self, name: str, index: int | None) -> str | None:
        place = self.tensors[name]
        if place.num_parts > 1 or place.stacked != (index is not None):
            return None
        return place.names[index or 0]

    def _is_transposed(self, name: str) -> bool:
        return self.linears_transposed and self.family.names().is_linear(name)

    def spec(self, name: str) -> TensorSpec:
        """Return the shape (as in memory) and dtype of a parameter by our name."""
        place = self.tensors[name]
        stored = self.files.spec(place.names[0])
        shape = place.transposed_dims(stored.shape) if self._is_transposed(name) else stored.shape
        if place.stacked:
            shape = (len(place.names), *shape)
        elif place.num_parts > 1:
            if not shape or shape[-1] != sum(place.sizes):
                sizes = " + ".join(map(str, place.sizes))
                raise UserError(f"{self.path}: {stored.name!r} is {list(stored.shape)}, not of {sizes} outputs")
            shape = (*shape[:-1], place.sizes[place.part])
        return TensorSpec(name, shape, stored.dtype)

    def spec_to_write(self, name: str) -> TensorSpec:
        """Return the `spec` of a copy without a chosen dtype: matrices that are stored in FP8 become bfloat16."""
        spec = self.spec(name)
        if self.is_fp8 and len(spec.shape) > 1 and spec.dtype == "float32":
            return dataclasses.replace(spec, dtype="bfloat16")
        return spec

    def stack_mismatches(self) -> list[str]:
        """Return messages about tensors of a stacked parameter with another shape or dtype than the first of them."""
        wrong = []
        for place in self.tensors.values():
            first, *others = map(self.files.spec, place.names)
            for other in others:
                if (other.shape, other.dtype) != (first.shape, first.dtype):
                    found, expected = (f"{list(spec.shape)} {spec.dtype}" for spec in (other, first))
                    wrong.append(f"{other.name} is {found}, but {first.name} is {expected}")
        return wrong

    def digest(self) -> str:
        """Return the sha256 over config and tensor files: equal digests are equal models."""
        digest = hashlib.sha256(sha256_of(self.path / "config.json").encode())
        for path in self.files.paths:
            digest.update(f"{path.name}:{sha256_of(path)}\n".encode())
        return digest.hexdigest()


def _is_carried(family: ModelFamily, name: str, config: Any) -> bool:
    names = family.names()
    return isinstance(names, CarriesTensors) and names.is_carried(name, config)


def without_carried(config: Any) -> Any:
    """Return the config of a model without tensors that are carried along."""
    if num_mtp_layers(config) or not _carries(config):  # MTP layers that are parameters are not carried along
        return config
    return dataclasses.replace(config, num_nextn_predict_layers=0)


def _carries(config: Any) -> bool:
    return num_stored_mtp_layers(config) > 0


def read_config(path: Path, families: Mapping[str, ModelFamily]) -> tuple[ModelFamily, Any]:
    """Return the family and config that a config.json describes.

    Raises:
        UserError: no config.json, a model_type that no family reads, or an impossible shape.
    """
    where = path / "config.json"
    data = read_json_object(where)
    model_type = data.get("model_type")
    if not isinstance(data.get("quantization_config"), dict | None):
        raise UserError(f"{where}: quantization_config is {_short(data['quantization_config'])}; an object is needed")
    with _of_file(where):
        if has_scales(path) or any(of(data) for of in (Fp8Format.of, GptqFormat.of, AwqFormat.of, is_mxfp4)):
            data.pop("quantization_config", None)  # the tensors are dequantised when they are read
        for family in families.values():
            if model_type in family.hf_model_types:
                config = family.config_cls.from_hf(data)
                check_config(where, family, config)
                return family, config
    known = sorted(t for family in families.values() for t in family.hf_model_types)
    raise UserError(f"{where}: model_type {_short(model_type)} is not supported; supported: {', '.join(known)}")


def _short(value: Any) -> str:
    """A value of a file, for a message."""
    return repr(value)[:_MAX_SHOWN_CHARS]


@contextlib.contextmanager
def _of_file(where: Path) -> Iterator[None]:
    """Context in which errors in a config.json name the file by its path: families see its content only."""
    try:
        yield
    except UserError as error:
        before, found, message = str(error).partition(f"{where.name}: ")
        if before or not found:
            raise
        raise UserError(f"{where}: {message}") from error


def check_config(where: Path, family: ModelFamily, config: Any) -> None:
    """Raise UserError if a shape from a file cannot be that of a model."""
    try:
        shape = {key: value for key, value in dataclasses.asdict(config).items() if key not in NO_KEYS}
        TypeAdapter(family.config_keys()).validate_python(shape)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'][:1]))}: {e['msg']}" for e in error.errors())
        raise UserError(f"{where}: {wrong}") from error
    problems = list(config.problems())
    if problems:
        raise UserError(f"{where}: " + "; ".join(f"{field} {message}" for field, message in problems))


def open_model(
    path: Path,
    families: Mapping[str, ModelFamily],
    check: bool = False,
    load: Load = "exact",
    mtp: bool = False,
) -> ModelDirectory:
    """Open a model directory and check that it holds every parameter of its model, and nothing else.

    Args:
        path: the directory.
        families: known model families.
        check: True to compare all that is read with manifest.json, see `TensorFiles`.
        load: "known" allows unexpected tensors, "any" also missing ones.
        mtp: True if MTP layers are a part of the model, not carried along.

    Raises:
        UserError: names every missing or unexpected tensor.
    """
    family, config = read_config(path, families)
    if mtp:
        config = dataclasses.replace(config, mtp=True)
    files = _open_tensors(path, check)
    model = describe_model(path, family, config, files, load=load)
    return dataclasses.replace(model, is_fp8=isinstance(files, Fp8Tensors))


def _open_tensors(path: Path, check: bool) -> TensorSource:
    files = TensorFiles(path, "model", check)
    if has_scales(path):
        return Int8Tensors(files, TensorFiles(path, Int8Tensors.STEM, check))
    config = read_json_object(path / "config.json")
    fp8 = Fp8Format.of(config)
    if fp8:
        return Fp8Tensors(files, fp8)
    gptq = GptqFormat.of(config)
    if gptq:
        return PackedTensors(files, gptq)
    awq = AwqFormat.of(config)
    if awq:
        return PackedTensors(files, awq)
    if is_mxfp4(config):
        return Mxfp4Tensors(files)
    name_of = {files.spec(name).dtype: name for name in files.names}
    if INT8 in name_of:
        raise UserError(f"{path}: {name_of[INT8]!r} is int8, and there is no {Int8Tensors.STEM}{SUFFIX} with its scale")
    if FP8 in name_of:
        raise UserError(f"{path}: {name_of[FP8]!r} is in FP8, and config.json has no quantization_config of it")
    return files


def has_scales(path: Path) -> bool:
    """Return True if a directory has int8 matrices, with files of their scales."""
    return any(is_file(path / f"{Int8Tensors.STEM}{SUFFIX}{end}") for end in ("", ".index.json"))


def describe_model(
    path: Path,
    family: ModelFamily,
    config: Any,
    files: TensorSource,
    from_paddle: bool = False,
    load: Load = "exact",
) -> ModelDirectory:
    """Return a model whose tensors are in `files`, by the names of either layout.

    Args:
        path: the directory of the model.
        family: of the model.
        config: its shape.
        files: source of the tensors.
        from_paddle: True if linear weights are oriented as in memory whatever their names are; the names may also be
            ours.
        load: see `open_model`.

    Raises:
        UserError: names every missing or unexpected tensor.
    """
    names = family.names()
    renamed = rename(family, config, files)
    if renamed is not None:
        files = renamed
        from_paddle = True
    stored = set(files.names)
    prefix = names.paddlenlp_prefix(config)
    layout: Layout = "paddlenlp" if prefix and any(n.startswith(prefix) for n in stored) else "hf"
    tensors = {name: names.hf_tensors(name, config) for name in names.parameter_names(config)}
    expected = _names_in(tensors)
    by_our_names = renamed is not None
    by_our_names |= from_paddle and stored.issuperset(tensors) and not stored.issuperset(expected)
    if by_our_names:
        tensors = {name: HfTensors((name,)) for name in tensors}
        expected = _names_in(tensors)

    def full_name(theirs: str) -> str | None:
        return theirs if by_our_names else hf_name(family, config, theirs)

    full_names = {theirs: full_name(theirs) for theirs in files.names}
    transposed = layout == "hf" and not from_paddle
    if not transposed and any(is_fused(theirs) and full not in expected for theirs, full in full_names.items()):
        files = UnfusedTensors(files, Heads.of(config))
        full_names = {theirs: full_name(theirs) for theirs in files.names}
    found = {full: theirs for theirs, full in full_names.items() if full is not None}
    ignored = [theirs for theirs, full in full_names.items() if full is None]
    tied_copy = None
    if isinstance(config, HasTiedEmbedding) and config.tie_word_embeddings:
        stored_head = found.pop(OUTPUT, None)  # some writers store the tied copy
        tied_copy = stored_head if is_tied(config) else None
    missing = [name for name in expected if name not in found]
    others = [name for name in found if name not in expected]  # a file may have a million of them
    carried: list[str] = []
    if isinstance(names, CarriesTensors):
        carried = [name for name in others if names.is_carried(name, config)]
    are_carried = set(carried)
    unexpected = [found[name] for name in others if name not in are_carried]
    if (missing and load != "any") or (unexpected and load == "exact"):
        raise _tensor_mismatch(path, missing, unexpected)
    in_files: dict[str, HfTensors] = {}
    for name, place in tensors.items():
        if all(theirs in found for theirs in place.names):
            in_files[name] = dataclasses.replace(place, names=tuple(found[theirs] for theirs in place.names))
    tensors = in_files | {name: HfTensors((found[name],)) for name in carried}
    for theirs in _names_in(tensors):
        ExpectedTensor(FLOATS).check(files.spec(theirs), path)
    if not carried:
        config = without_carried(config)
    return ModelDirectory(
        path, family, config, layout, tensors, files, ignored, transposed, unexpected, tied_copy=tied_copy
    )


def has_mtp_layers(family: ModelFamily, config: Any, names: Iterable[str]) -> bool:
    """Return True if tensors of adapters, by the names of HF PEFT or PaddleNLP, belong to MTP layers.

    Then these were a part of the model in training.
    """
    plain = (name.removeprefix(wrapper) for name in names for wrapper in ("", "base_model.model."))
    found = (hf_name(family, config, name) for name in plain)
    return any(name is not None and _is_carried(family, name, config) for name in found)


def with_mtp_layers(model: ModelDirectory) -> ModelDirectory:
    """Return a model of the same files whose MTP layers are a part of it, not carried along."""
    config = dataclasses.replace(model.config, mtp=True)
    is_plain = not model.linears_transposed
    return describe_model(model.path, model.family, config, model.files, from_paddle=is_plain, load="known")


def rename(family: ModelFamily, config: Any, files: TensorSource) -> RenamedTensors | None:
    """Return the tensors of a model by our names, if the files have names that only PaddleNLP uses; else None."""
    names = family.names()
    if not isinstance(names, HasPaddleNLPNames):
        return None
    ours = {theirs: names.from_paddlenlp(theirs, config) for theirs in files.names}
    if all(name is None or name == "lm_head.weight" for name in ours.values()):
        return None
    return RenamedTensors(files, {theirs: name or theirs for theirs, name in ours.items()})


def _tensor_mismatch(path: Path, missing: Sequence[str], unexpected: Sequence[str]) -> UserError:
    named = (("missing", missing), ("unexpected", unexpected))
    parts = [f"{what} {len(which)}: {_shown_names(which)}" for what, which in named if which]
    return UserError(f"{path}: the tensors are not those of its config.json; {'; '.join(parts)}")


def _shown_names(names: Sequence[str]) -> str:
    """The first of some names, for a message: a file of a stranger may have a million, or one of a megabyte."""
    shown = ", ".join(name[:_MAX_SHOWN_CHARS] for name in names[:_MAX_SHOWN_NAMES])
    left_out = len(names) - _MAX_SHOWN_NAMES
    return f"{shown}, and {left_out:,} more" if left_out > 0 else shown


def _names_in(tensors: Mapping[str, HfTensors]) -> dict[str, None]:
    """Return the names of all tensors: an ordered set."""
    return dict.fromkeys(name for place in tensors.values() for name in place.names)
