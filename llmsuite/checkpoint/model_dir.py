"""A directory with a model in it: config.json, safetensors, tokenizer. Reads and writes the HF and PaddleNLP layouts.

Inside llmsuite a parameter has HF's name, and a linear weight lies [inputs, outputs], as Paddle has it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from llmsuite.checkpoint.files import read_json_file, sha256_of, write_json
from llmsuite.checkpoint.fused import Heads, Unfused, is_fused
from llmsuite.checkpoint.tensors import MAX_FILE_BYTES, TensorFiles, TensorSource, TensorSpec, Written, write_tensors
from llmsuite.errors import UserError
from llmsuite.plugins.hookspecs import ModelFamily

Layout = Literal["hf", "paddlenlp"]
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclasses.dataclass
class ModelDirectory:
    """A model on disk. Nothing but config.json and the index is read until a tensor is asked for."""

    path: Path
    family: ModelFamily
    config: Any
    """The family's shape."""
    layout: Layout
    names: dict[str, str]
    """Our parameter names to the names in the files."""
    files: TensorSource
    linears_transposed: bool
    """Whether linear weights lie [outputs, inputs] in the files."""

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """A parameter by our name, or a slice of it (one slice a dim), lying as in memory, in the stored dtype."""
        transposed = self.linears_transposed and self.family.names().is_linear(name)
        stored = index[::-1] if index and transposed else index
        value = self.files.read(self.names[name], stored)
        return value.T if transposed else value

    def spec(self, name: str) -> TensorSpec:
        """Shape (as in memory) and dtype of a parameter by our name."""
        stored = self.files.spec(self.names[name])
        transposed = self.linears_transposed and self.family.names().is_linear(name)
        return TensorSpec(name, stored.shape[::-1] if transposed else stored.shape, stored.dtype)

    def digest(self) -> str:
        """sha256 over config and tensor files: equal digests are equal models."""
        digest = hashlib.sha256(sha256_of(self.path / "config.json").encode())
        for path in self.files.paths:
            digest.update(f"{path.name}:{sha256_of(path)}\n".encode())
        return digest.hexdigest()


def read_config(path: Path, families: Mapping[str, ModelFamily]) -> tuple[ModelFamily, Any]:
    """The family and shape a config.json describes.

    Raises:
        UserError: no config.json, or a model_type that no family reads.
    """
    data = read_json_file(path / "config.json")
    model_type = data.get("model_type") if isinstance(data, dict) else None
    for family in families.values():
        if model_type in family.hf_model_types:
            try:
                config = family.config_cls.from_hf(data)
                TypeAdapter(family.config_keys()).validate_python(dataclasses.asdict(config))
            except ValidationError as error:
                wrong = "; ".join(f"{'.'.join(map(str, e['loc'][:1]))}: {e['msg']}" for e in error.errors())
                raise UserError(f"{path / 'config.json'}: {wrong}") from error
            return family, config
    known = sorted(t for family in families.values() for t in family.hf_model_types)
    raise UserError(
        f"{path / 'config.json'}: model_type {model_type!r} is not supported; supported: {', '.join(known)}"
    )


def open_model(path: Path, families: Mapping[str, ModelFamily]) -> ModelDirectory:
    """Open a model directory and check that it holds every parameter of its model, and nothing else.

    Raises:
        UserError: naming every missing, unexpected or misshapen tensor.
    """
    family, config = read_config(path, families)
    return describe_model(path, family, config, TensorFiles(path, "model"))


def describe_model(
    path: Path, family: ModelFamily, config: Any, files: TensorSource, from_paddle: bool = False
) -> ModelDirectory:
    """A model whose tensors lie in `files`, by the names of either layout; with `from_paddle`, linear weights lie as
    in memory whatever their names are.

    Raises:
        UserError: naming every missing or unexpected tensor.
    """
    layout: Layout = "paddlenlp" if any(n.startswith(f"{family.name}.") for n in files.names) else "hf"
    names, wanted = family.names(), set(family.names().parameter_names(config))
    to_ours = names.from_paddlenlp if layout == "paddlenlp" else names.from_hf
    transposed = layout == "hf" and not from_paddle
    if not transposed and any(is_fused(n) and to_ours(n) not in wanted for n in files.names):
        files = Unfused(files, Heads.of(config))
    found = {ours: theirs for theirs in files.names if (ours := to_ours(theirs)) is not None}
    if getattr(config, "tie_word_embeddings", False):
        found.pop("lm_head.weight", None)  # some writers store the tied copy
    missing = [name for name in names.parameter_names(config) if name not in found]
    unexpected = [found[name] for name in found if name not in wanted]
    if missing or unexpected:
        parts = [
            f"{what} {len(which)}: {', '.join(which[:5])}{' …' if len(which) > 5 else ''}"
            for what, which in (("missing", missing), ("unexpected", unexpected))
            if which
        ]
        raise UserError(f"{path}: the tensors are not those of its config.json; {'; '.join(parts)}")
    return ModelDirectory(path, family, config, layout, found, files, transposed)


def write_model(
    directory: Path,
    family: ModelFamily,
    config: Any,
    read: Callable[[str], np.ndarray],
    specs: Iterable[TensorSpec],
    layout: Layout = "hf",
    tokenizer: Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Written:
    """Write a model into an existing directory. Returns sizes and digests for its manifest.

    Args:
        directory: where to; the caller commits it.
        family: the model's family.
        config: its shape.
        read: values of a parameter by our name, [inputs, outputs].
        specs: name (ours), in-memory shape and dtype of every parameter, in order.
        layout: whose names and orientation the files get.
        tokenizer: directory whose tokenizer files are copied along.
        max_file_bytes: see `write_tensors`.
    """
    stored, ours = stored_specs(family, specs, layout)
    hf, is_linear = layout == "hf", family.names().is_linear

    def read_stored(theirs: str) -> np.ndarray:
        value = read(ours[theirs])
        return value.T if hf and is_linear(ours[theirs]) else value

    # "pt" and "np" are how transformers and PaddleNLP recognise the orientation of the matrices
    metadata = {"format": "pt" if hf else "np"}
    written = write_tensors(directory, "model", stored, read_stored, metadata, max_file_bytes)
    write_json(directory / "config.json", {**config.to_hf(), "torch_dtype": stored[0].dtype})
    if tokenizer is not None:
        copy_tokenizer(tokenizer, directory)
    return written


def stored_specs(
    family: ModelFamily, specs: Iterable[TensorSpec], layout: Layout
) -> tuple[list[TensorSpec], dict[str, str]]:
    """What lies in the files of a layout, for specs by our names as in memory; and our name of each."""
    names, stored, ours = family.names(), [], {}
    for spec in specs:
        theirs, shape = names.to_paddlenlp(spec.name), spec.shape
        if layout == "hf":
            theirs, shape = spec.name, shape[::-1] if names.is_linear(spec.name) else shape
        stored.append(TensorSpec(theirs, shape, spec.dtype))
        ours[theirs] = spec.name
    return stored, ours


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files a tokenizer is made of."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def write_hf(model: ModelDirectory, directory: Path) -> None:
    """Exporter `hf`: what HF transformers reads."""
    _rewrite(model, directory, "hf")


def write_paddlenlp(model: ModelDirectory, directory: Path) -> None:
    """Exporter `paddlenlp`: what PaddleNLP reads."""
    _rewrite(model, directory, "paddlenlp")


def _rewrite(model: ModelDirectory, directory: Path, layout: Layout) -> None:
    specs = [model.spec(name) for name in model.family.names().parameter_names(model.config)]
    write_model(directory, model.family, model.config, model.read, specs, layout, model.path)
