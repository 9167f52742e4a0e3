"""Layouts of safetensors and of adapters."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import safetensors.numpy
from hypothesis import strategies as st

from llmsuite.adapters.prefix_shapes import PREFIX_KEY, PREFIX_VALUE
from llmsuite.base.files import broken_file, committed_directory, read_manifest
from llmsuite.checkpoint.adapter_base import Base
from llmsuite.checkpoint.convert.adapter import add_adapter
from llmsuite.checkpoint.convert.paddle_save import write_pickle
from llmsuite.checkpoint.convert.rewrite import FORMAT, OutputFormat, Rewrite
from llmsuite.checkpoint.convert.sources import open_source
from llmsuite.checkpoint.int8 import quantise_model
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.model_writer import write_model
from llmsuite.checkpoint.prefix_dir import Prefixes, SavedPrefixes, write_prefixes
from llmsuite.checkpoint.reft_dir import Interventions, write_interventions
from llmsuite.checkpoint.side_adapters import open_side_adapter
from llmsuite.checkpoint.stored import CODES, read_header
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.data.chat_template import tokenizer_template
from llmsuite.data.special_tokens import role_ids
from llmsuite.inference.load import parameter_shapes
from llmsuite.inference.sampling_defaults import read_defaults
from tests.support import awq_files, fp8_model, tiny_llama
from tests.support.gptq_files import publish
from tests.support.tiny_llama import CONFIG, FAMILIES
from tests.tools.lies.base import Layout, Read, lie_in_bytes, lie_in_tree

_RANK = 4
_MODULE = "base_model.model.model.layers.0.mlp.up_proj"
_DTYPES = ["float32", "float16", "bfloat16", "int32", "int64", "int8", "uint8", "bool", "float8_e4m3fn"]
_FILLS = [0, 1, -1, 1e38, float("nan"), float("inf")]


# reading


def read_model(directory: Path) -> None:
    """Read all tensors of a model directory, whole and a slice of each."""
    _read_all(open_model(directory, FAMILIES, check=True))


def read_source(directory: Path) -> None:
    """As commands that make a model of a model read it, of whatever layout."""
    _read_all(open_source(directory, FAMILIES, parameter_shapes, allow_pickle=True))


def read_adapter(directory: Path) -> None:
    """Merge an adapter into its base, which lies beside it."""
    _read_all(add_adapter(open_model(directory.parent / "base", FAMILIES), directory, allow_pickle=True))


def read_beside(directory: Path) -> None:
    """Read all of what runs beside a model."""
    found = open_side_adapter(directory)
    if isinstance(found, SavedPrefixes):
        for name in found.files.names:
            found.files.read(f"model.layers.{name}")
    elif found is not None:
        for name in found.files.names:
            found.files.read(name)


def read_manifest_of(directory: Path) -> None:
    """Compare a directory with its manifest."""
    read_manifest(directory)
    broken_file(directory)


def _read_all(model: ModelDirectory) -> None:
    for name in model.names:
        value = model.read(name)
        half = [slice(0, -(-size // 2)) for size in value.shape]
        if value.size:
            model.read(name, half)


BESIDE: tuple[Read, ...] = (tokenizer_template, role_ids, lambda path: read_defaults([path]))
"""What else reads a model directory."""


# making


def make_plain(directory: Path, base: Path) -> None:
    """A model as we write it, with all that may lie beside it, sharded, with its index and manifest."""
    shutil.copytree(base, directory)
    files = {
        "generation_config.json": {"do_sample": True, "temperature": 0.5, "top_k": 5, "eos_token_id": 0},
        "tokenizer_config.json": {"eos_token": "</s>", "added_tokens_decoder": {"0": {"content": "</s>"}}},
        "special_tokens_map.json": {"bos_token": {"content": "<s>"}, "additional_special_tokens": ["<x>"]},
        "tokenizer.json": {"model": {"vocab": {"a": 1}}, "added_tokens": [{"id": 0, "content": "</s>"}]},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))


def make_committed(directory: Path, base: Path) -> None:
    """A model with a manifest, as a checkpoint of ours has it."""
    values = tiny_llama.values(CONFIG)
    with committed_directory(directory, manifest := {"format": FORMAT}) as made:
        specs = [TensorSpec(name, value.shape, "float32") for name, value in values.items()]
        written = write_model(made, tiny_llama.FAMILY, CONFIG, values.__getitem__, specs)
        manifest |= dataclasses.asdict(written)
    (directory / "elsewhere.json").write_text(json.dumps({"files": {"config.json": {"machine": 0, "rank": 1}}}))


def make_fp8(directory: Path, base: Path) -> None:
    fp8_model.publish(directory, tiny_llama.FAMILY, CONFIG, (8, 8))


def make_gptq(directory: Path, base: Path) -> None:
    publish(directory, group_size=32)


def make_awq(directory: Path, base: Path) -> None:
    awq_files.publish(directory, group_size=32)


def make_int8(directory: Path, base: Path) -> None:
    """A model after training with a grid of int8."""
    rounded = {"model.layers.0.mlp.up_proj": [3.0, 2.0], "model.layers.1.mlp.down_proj": list[float]()}
    model = quantise_model(open_model(base, FAMILIES), rounded)
    Rewrite(model, OutputFormat("hf")).write(directory)


def make_lora(directory: Path, base: Path) -> None:
    """As PEFT writes it, with DoRA's magnitudes and the name of the base."""
    directory.mkdir()
    factors = {
        f"{_MODULE}.lora_A.weight": np.ones((_RANK, CONFIG.hidden_size), "float32"),
        f"{_MODULE}.lora_B.weight": np.ones((CONFIG.intermediate_size, _RANK), "float32"),
        f"{_MODULE}.lora_magnitude_vector": np.ones(CONFIG.intermediate_size, "float32"),
    }
    safetensors.numpy.save_file(factors, directory / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 8, "target_modules": ["up_proj"], "use_dora": True}
    told |= {"rank_pattern": {"up_proj": _RANK}, "alpha_pattern": {}, "base_model_name_or_path": "base"}
    (directory / "adapter_config.json").write_text(json.dumps(told))
    stored = {"dtype": "nf4", "block": 4}
    (directory / "base.json").write_text(json.dumps({"path": "base", "sha256": "0" * 64, "stored_as": stored}))


def make_lokr(directory: Path, base: Path) -> None:
    directory.mkdir()
    factors = {
        f"{_MODULE}.lokr_w1": np.ones((4, 4), "float32"),
        f"{_MODULE}.lokr_w2_a": np.ones((CONFIG.intermediate_size // 4, _RANK), "float32"),
        f"{_MODULE}.lokr_w2_b": np.ones((_RANK, CONFIG.hidden_size // 4), "float32"),
    }
    safetensors.numpy.save_file(factors, directory / "adapter_model.safetensors")
    told = {"peft_type": "LOKR", "r": _RANK, "alpha": 8, "target_modules": ["up_proj"], "alpha_pattern": {"up_proj": 4}}
    (directory / "adapter_config.json").write_text(json.dumps(told))


def make_vera(directory: Path, base: Path) -> None:
    """As PaddleNLP pickles it."""
    directory.mkdir()
    module = "llama.layers.0.mlp.up_proj"
    sizes = (CONFIG.hidden_size, CONFIG.intermediate_size)
    parts = {"A": (sizes[0], _RANK), "B": (_RANK, sizes[1]), "d": (_RANK,), "b": (sizes[1],)}
    values = {f"{module}.vera_{kind}": np.ones(shape, "float32") for kind, shape in parts.items()}
    write_pickle(directory / "vera_model_state.pdparams", values)
    (directory / "vera_config.json").write_text(json.dumps({"r": _RANK, "vera_alpha": 4}))


def make_prefix(directory: Path, base: Path) -> None:
    directory.mkdir()
    specs = [
        TensorSpec(f"model.layers.{n}.{kind}", (3, 2, 4), "float32")
        for n in (0, 1)
        for kind in (PREFIX_KEY, PREFIX_VALUE)
    ]
    write_prefixes(directory, Prefixes(3, Base("base", "0" * 64)), lambda name: np.ones((3, 2, 4), "float32"), specs)


def make_reft(directory: Path, base: Path) -> None:
    directory.mkdir()
    shapes = {"model.layers.0.reft.rotation": (CONFIG.hidden_size, 2), "model.layers.0.reft.bias": (2,)}
    specs = [TensorSpec(name, shape, "float32") for name, shape in shapes.items()]
    told = Interventions(2, (0,), (1, 1), Base("base", "0" * 64))
    write_interventions(directory, told, lambda name: np.ones(shapes[name], "float32"), specs)


# lying


def lie_in_tensors(path: Path, data: st.DataObject) -> None:
    """Tell a lie in a safetensors file: in its bytes, its header, or what a tensor is."""
    kind = data.draw(st.sampled_from(["tensor", "tensor", "value", "value", "header", "bytes"]))
    if kind == "bytes":
        return lie_in_bytes(path, data)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    if kind == "header":
        header = lie_in_tree(json.loads(content[8 : 8 + size]), data).encode("utf-8", "surrogatepass")
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
        return None
    tensors = {name: stored.read() for name, stored in read_header(path).items()}
    name = data.draw(st.sampled_from(sorted(tensors)))
    tensors = other_arrays(tensors, name, kind, data)
    specs = [TensorSpec(name, value.shape, value.dtype.name) for name, value in tensors.items()]
    path.write_bytes(packed_safetensors(tensors) if specs else b"")
    return None


def other_arrays(arrays: Mapping[str, np.ndarray], name: str, kind: str, data: st.DataObject) -> dict[str, np.ndarray]:
    """Arrays of which one has another value ("value"), or is of another kind or not there."""
    arrays = dict(arrays)
    if kind == "value" and arrays[name].size:
        value = arrays[name].copy()
        at = data.draw(st.integers(0, value.size - 1))
        with np.errstate(all="ignore"):
            value.reshape(-1)[at] = np.array(data.draw(st.sampled_from(_FILLS))).astype(value.dtype)
        arrays[name] = value
    elif data.draw(st.integers(0, 3)) == 0:
        del arrays[name]
    else:
        shape = data.draw(st.just(list(arrays[name].shape)) | st.lists(st.integers(0, 70), max_size=4))
        dtype = data.draw(st.sampled_from(_DTYPES))
        arrays[name] = np.full(shape, data.draw(st.integers(0, 1)), "float32").astype(dtype)
    return arrays


def packed_safetensors(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Arrays as a safetensors file, whatever their dtype."""
    codes = {**CODES, "uint8": "U8", "bool": "BOOL"}
    header = {}
    at = 0
    for name, value in arrays.items():
        offsets = [at, at + value.nbytes]
        header[name] = {"dtype": codes[value.dtype.name], "shape": list(value.shape), "data_offsets": offsets}
        at += value.nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(value.tobytes() for value in arrays.values())


LAYOUTS = {
    "plain": Layout(make_plain, (read_model, read_source, *BESIDE)),
    "committed": Layout(make_committed, (read_model, read_manifest_of)),
    "fp8": Layout(make_fp8, (read_model,)),
    "gptq": Layout(make_gptq, (read_model,)),
    "awq": Layout(make_awq, (read_model,)),
    "int8": Layout(make_int8, (read_model,)),
    "lora": Layout(make_lora, (read_adapter,)),
    "lokr": Layout(make_lokr, (read_adapter,)),
    "vera": Layout(make_vera, (read_adapter,)),
    "prefix": Layout(make_prefix, (read_beside,)),
    "reft": Layout(make_reft, (read_beside,)),
}
"""Layouts of safetensors, and of adapters."""
