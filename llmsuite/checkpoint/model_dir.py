"""Reads a model directory: config.json and safetensors, in the layout of HF or PaddleNLP. `model_writer.py` writes it.

Inside llmsuite a parameter has HF's name, and a linear weight lies [inputs, outputs], as Paddle has it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from llmsuite.checkpoint.fp8 import Fp8Format, Fp8Tensors
from llmsuite.checkpoint.fused import Heads, Unfused, is_fused
from llmsuite.checkpoint.gptq import GptqFormat, GptqTensors
from llmsuite.checkpoint.parts import FLOATS, Part
from llmsuite.checkpoint.stored import FP8, INT8, StoredTensor
from llmsuite.checkpoint.tensors import SUFFIX, Dequantised, Renamed, TensorFiles, TensorSource, TensorSpec
from llmsuite.checkpoint.tied import check_tied
from llmsuite.checkpoint.tokenizer_files import tokenizer_of_adapter
from llmsuite.errors import UserError
from llmsuite.files import read_json_object, sha256_of
from llmsuite.models.head import EMBEDDING, NO_KEYS, OUTPUT, is_tied
from llmsuite.models.hf_tensors import HfTensors
from llmsuite.regular import is_file
from llmsuite.specs import ModelFamily

Load = Literal["exact", "known", "any"]
"""How exactly the stored tensors have to be those of the model."""
Layout = Literal["hf", "paddlenlp"]
"""Whose names and orientation of matrices the files have."""


def hf_name(family: ModelFamily, config: Any, theirs: str) -> str | None:
    """HF's full name of a tensor in a file of either layout; None for one that is no parameter."""
    names, prefix = family.names(), family.names().paddlenlp_prefix(config)
    name = f"model.{theirs[len(prefix) :]}" if prefix and theirs.startswith(prefix) else theirs
    found: str | None = names.from_hf(name, config)
    return found


@dataclasses.dataclass
class ModelDirectory:
    """A model on disk. Nothing but config.json and the index is read until a tensor is asked for."""

    path: Path
    family: ModelFamily
    config: Any
    """The family's shape."""
    layout: Layout
    tensors: dict[str, HfTensors]
    """Where each of our parameters lies; the names are those in the files."""
    files: TensorSource
    ignored: list[str]
    """Tensors in the files that are no parameter of the model: derived ones, or layers it does not have here."""
    linears_transposed: bool
    """Whether linear weights lie [outputs, inputs] in the files."""
    left_out: list[str] = dataclasses.field(default_factory=list)
    """Tensors in the files that the model does not have; only where `Load` allows them."""
    is_fp8: bool = False
    """Whether matrices are stored in FP8; they are read as float32."""
    beside: Any = None
    """What runs beside the model, see `llmsuite.checkpoint.beside`, and is no part of `names`."""
    adapter: Path | None = None
    """The directory of what was added to the model, or runs beside it."""
    allow_nonfinite: bool = False
    """Whether what is written of it may have values that are NaN or infinite, see `llmsuite.checkpoint.finite`."""
    tied_copy: str | None = None
    """The tensor in the files that is the head of a tied model, where it is stored beside the embedding it has to
    equal."""

    @property
    def names(self) -> list[str]:
        """The parameters, by our names, and what is carried along with them."""
        return list(self.tensors)

    @property
    def carried(self) -> list[str]:
        """Tensors that are no parameters, and go along to all that is made of the model; by HF's names."""
        return [name for name in self.tensors if _is_carried(self.family, name, self.config)]

    @property
    def description(self) -> str:
        """The layout, and the tensors that are ignored."""
        if not self.ignored:
            return f"{self.layout} layout"
        return f"{self.layout} layout; {len(self.ignored)} tensors are ignored, such as {self.ignored[0]}"

    @property
    def tokenizer_directory(self) -> Path:
        """The directory of its tokenizer, chat template and generation_config.json: an adapter may bring its own.
        Raises UserError as `tokenizer_of_adapter`."""
        return self.path if self.adapter is None else tokenizer_of_adapter(self.adapter, self.path)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """A parameter by our name, or a slice of it (one slice a dim), lying as in memory, in the stored dtype."""
        place, transposed = self.tensors[name], self._is_transposed(name)
        if name == EMBEDDING and self.tied_copy in self.files.names:
            check_tied(self.path, self.files, place.names[0], str(self.tied_copy), index)
        if place.stacked:
            first, rest = (index[0], index[1:]) if index else (slice(None), None)
            return self._read_stack(place.names[first], rest, transposed)
        if place.num_parts > 1:
            *shape, size = self.spec(name).shape
            *outer, last = index or [*map(slice, shape), slice(size)]
            start, stop, _ = last.indices(size)
            index = [*outer, slice(place.part * size + start, place.part * size + stop)]
        return self._read(place.names[0], index, transposed)

    def _read_stack(self, names: Sequence[str], index: Sequence[slice] | None, transposed: bool) -> np.ndarray:
        result = None
        for number, theirs in enumerate(names):  # one after the other: they may be most of the model
            part = self._read(theirs, index, transposed)
            if result is None:
                result = np.empty((len(names), *part.shape), part.dtype)
            if (part.shape, part.dtype) != (result.shape[1:], result.dtype):
                raise UserError(f"{self.path}: {theirs!r} has another shape or dtype than {names[0]!r}")
            result[number] = part
        assert result is not None, "a stack has at least one tensor"
        return result

    def _read(self, theirs: str, index: Sequence[slice] | None, transposed: bool) -> np.ndarray:
        value = self.files.read(theirs, index[::-1] if index and transposed else index)
        return value.T if transposed else value

    def stored(self, name: str, transposed: bool, index: int | None = None) -> StoredTensor | None:
        """A parameter, or of a stacked one the matrix `index`, to be copied as it is stored; None unless it is one
        whole tensor of the wanted orientation."""
        found, is_linear = self._stored_name(name, index), self.family.names().is_linear(name)
        if name == EMBEDDING and self.tied_copy in self.files.names:
            return None  # it is to be compared with that
        if found is None or not isinstance(self.files, TensorFiles | Fp8Tensors):
            return None
        return self.files.stored(found) if not is_linear or transposed == self.linears_transposed else None

    def stored_scales(self, name: str, transposed: bool, index: int | None = None) -> StoredTensor | None:
        """The scales of a matrix in FP8, where `stored` is that matrix; else None."""
        found = self._stored_name(name, index)
        if found is None or not isinstance(self.files, Fp8Tensors) or not self.files.is_quantised(found):
            return None
        return self.files.stored_scales(found) if transposed == self.linears_transposed else None

    def _stored_name(self, name: str, index: int | None) -> str | None:
        place = self.tensors[name]
        if place.num_parts > 1 or place.stacked != (index is not None):
            return None
        return place.names[index or 0]

    def _is_transposed(self, name: str) -> bool:
        return self.linears_transposed and self.family.names().is_linear(name)

    def spec(self, name: str) -> TensorSpec:
        """Shape (as in memory) and dtype of a parameter by our name."""
        place = self.tensors[name]
        stored = self.files.spec(place.names[0])
        shape = stored.shape[::-1] if self._is_transposed(name) else stored.shape
        if place.stacked:
            shape = (len(place.names), *shape)
        elif place.num_parts > 1:
            if not shape or shape[-1] % place.num_parts:
                raise UserError(
                    f"{self.path}: {stored.name!r} is {list(stored.shape)}, not {place.num_parts} equal parts"
                )
            shape = (*shape[:-1], shape[-1] // place.num_parts)
        return TensorSpec(name, shape, stored.dtype)

    def spec_to_write(self, name: str) -> TensorSpec:
        """As `spec`, with the dtype that a copy gets unless another one is asked for: of what is FP8, bfloat16."""
        spec = self.spec(name)
        if self.is_fp8 and len(spec.shape) > 1 and spec.dtype == "float32":
            return dataclasses.replace(spec, dtype="bfloat16")
        return spec

    def stack_mismatches(self) -> list[str]:
        """Tensors that are stacked to a parameter, and have another shape or dtype than the first of them."""
        wrong = []
        for place in self.tensors.values():
            first, *others = map(self.files.spec, place.names)
            for other in others:
                if (other.shape, other.dtype) != (first.shape, first.dtype):
                    found, expected = (f"{list(spec.shape)} {spec.dtype}" for spec in (other, first))
                    wrong.append(f"{other.name} is {found}, but {first.name} is {expected}")
        return wrong

    def digest(self) -> str:
        """sha256 over config and tensor files: equal digests are equal models."""
        digest = hashlib.sha256(sha256_of(self.path / "config.json").encode())
        for path in self.files.paths:
            digest.update(f"{path.name}:{sha256_of(path)}\n".encode())
        return digest.hexdigest()


def _is_carried(family: ModelFamily, name: str, config: Any) -> bool:
    is_carried = getattr(family.names(), "is_carried", None)
    return is_carried is not None and bool(is_carried(name, config))


def without_carried(config: Any) -> Any:
    """The config of a model without tensors that are carried along."""
    if getattr(config, "mtp", False):  # they are parameters
        return config
    return dataclasses.replace(config, num_nextn_predict_layers=0) if _carries(config) else config


def _carries(config: Any) -> bool:
    return bool(getattr(config, "num_nextn_predict_layers", 0))


def read_config(path: Path, families: Mapping[str, ModelFamily]) -> tuple[ModelFamily, Any]:
    """The family and config that a config.json describes.

    Raises:
        UserError: no config.json, a model_type that no family reads, or a shape that cannot be.
    """
    data = read_json_object(path / "config.json")
    model_type = data.get("model_type")
    if has_scales(path) or Fp8Format.of(data) or GptqFormat.of(data):
        data.pop("quantization_config", None)  # the tensors are read as what they stand for
    for family in families.values():
        if model_type in family.hf_model_types:
            config = family.config_cls.from_hf(data)
            check_config(path / "config.json", family, config)
            return family, config
    known = sorted(t for family in families.values() for t in family.hf_model_types)
    raise UserError(
        f"{path / 'config.json'}: model_type {model_type!r} is not supported; supported: {', '.join(known)}"
    )


def check_config(where: Path, family: ModelFamily, config: Any) -> None:
    """Raises UserError when a shape that comes from a file cannot be that of a model."""
    try:
        shape = {key: value for key, value in dataclasses.asdict(config).items() if key not in NO_KEYS}
        TypeAdapter(family.config_keys()).validate_python(shape)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'][:1]))}: {e['msg']}" for e in error.errors())
        raise UserError(f"{where}: {wrong}") from error
    if problems := list(config.problems()):
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
        check: whether to compare what is read with its manifest.json, see `TensorFiles`.
        load: "known" allows tensors that the model does not have, "any" missing ones too.
        mtp: whether layers that predict further tokens are a part of the model, not carried along.

    Raises:
        UserError: naming every missing or unexpected tensor.
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
        return Dequantised(files, TensorFiles(path, Dequantised.STEM, check))
    config = read_json_object(path / "config.json")
    if form := Fp8Format.of(config):
        return Fp8Tensors(files, form)
    if packed := GptqFormat.of(config):
        return GptqTensors(files, packed)
    alone = {files.spec(name).dtype: name for name in files.names}
    if INT8 in alone:
        raise UserError(f"{path}: {alone[INT8]!r} is int8, and there is no {Dequantised.STEM}{SUFFIX} with its scale")
    if FP8 in alone:
        raise UserError(f"{path}: {alone[FP8]!r} is in FP8, and config.json has no quantization_config of it")
    return files


def has_scales(path: Path) -> bool:
    """Whether a directory has int8 matrices with scales beside them."""
    return any(is_file(path / f"{Dequantised.STEM}{SUFFIX}{end}") for end in ("", ".index.json"))


def describe_model(
    path: Path,
    family: ModelFamily,
    config: Any,
    files: TensorSource,
    from_paddle: bool = False,
    load: Load = "exact",
) -> ModelDirectory:
    """A model whose tensors lie in `files`, by the names of either layout.

    With `from_paddle` linear weights lie as in memory whatever their names are, and the names may also be ours.

    Raises:
        UserError: naming every missing or unexpected tensor.
    """
    names, renamed = family.names(), rename(family, config, files)
    if renamed is not None:
        files, from_paddle = renamed, True
    stored = set(files.names)
    prefix = names.paddlenlp_prefix(config)
    layout: Layout = "paddlenlp" if prefix and any(n.startswith(prefix) for n in stored) else "hf"
    tensors = {name: names.hf_tensors(name, config) for name in names.parameter_names(config)}
    wanted = _names_in(tensors)
    by_our_names = renamed is not None
    by_our_names |= from_paddle and stored.issuperset(tensors) and not stored.issuperset(wanted)
    if by_our_names:
        tensors = {name: HfTensors((name,)) for name in tensors}
        wanted = _names_in(tensors)
    full_names = {theirs: theirs if by_our_names else hf_name(family, config, theirs) for theirs in files.names}
    transposed = layout == "hf" and not from_paddle
    if not transposed and any(is_fused(theirs) and full not in wanted for theirs, full in full_names.items()):
        files = Unfused(files, Heads.of(config))
        full_names = {theirs: theirs if by_our_names else hf_name(family, config, theirs) for theirs in files.names}
    found = {full: theirs for theirs, full in full_names.items() if full is not None}
    ignored = [theirs for theirs, full in full_names.items() if full is None]
    tied_copy = None
    if getattr(config, "tie_word_embeddings", False):
        stored_head = found.pop(OUTPUT, None)  # some writers store the tied copy
        tied_copy = stored_head if is_tied(config) else None
    missing = [name for name in wanted if name not in found]
    carried = [name for name in found if name not in wanted and _is_carried(family, name, config)]
    unexpected = [found[name] for name in found if name not in wanted and name not in carried]
    if (missing and load != "any") or (unexpected and load == "exact"):
        raise _other_tensors(path, missing, unexpected)
    tensors = {
        name: dataclasses.replace(place, names=tuple(found[theirs] for theirs in place.names))
        for name, place in tensors.items()
        if all(theirs in found for theirs in place.names)
    }
    tensors |= {name: HfTensors((found[name],)) for name in carried}
    for theirs in _names_in(tensors):
        Part(FLOATS).check(files.spec(theirs), path)
    if not carried:
        config = without_carried(config)
    return ModelDirectory(
        path, family, config, layout, tensors, files, ignored, transposed, unexpected, tied_copy=tied_copy
    )


def has_further_layers(family: ModelFamily, config: Any, names: Iterable[str]) -> bool:
    """Whether tensors of adapters, by the names of HF PEFT or PaddleNLP, belong to layers that predict further tokens:
    these were a part of the model then."""
    plain = (name.removeprefix(wrapper) for name in names for wrapper in ("", "base_model.model."))
    found = (hf_name(family, config, name) for name in plain)
    return any(name is not None and _is_carried(family, name, config) for name in found)


def with_further_layers(model: ModelDirectory) -> ModelDirectory:
    """The same files, with layers that predict further tokens a part of the model, not carried along."""
    config, is_plain = dataclasses.replace(model.config, mtp=True), not model.linears_transposed
    return describe_model(model.path, model.family, config, model.files, from_paddle=is_plain, load="known")


def rename(family: ModelFamily, config: Any, files: TensorSource) -> Renamed | None:
    """The tensors of a model by our names, where the files have names of PaddleNLP that are its own; else None."""
    from_paddlenlp = getattr(family.names(), "from_paddlenlp", None)
    ours = {theirs: from_paddlenlp(theirs, config) for theirs in files.names} if from_paddlenlp else {}
    known = [name for name in ours.values() if name is not None and name != "lm_head.weight"]
    return Renamed(files, {theirs: name or theirs for theirs, name in ours.items()}) if known else None


def _other_tensors(path: Path, missing: Sequence[str], unexpected: Sequence[str]) -> UserError:
    named = (("missing", missing), ("unexpected", unexpected))
    parts = [f"{what} {len(which)}: {', '.join(which)}" for what, which in named if which]
    return UserError(f"{path}: the tensors are not those of its config.json; {'; '.join(parts)}")


def _names_in(tensors: Mapping[str, HfTensors]) -> dict[str, None]:
    """The names of all tensors: an ordered set."""
    return dict.fromkeys(name for place in tensors.values() for name in place.names)
