"""Writes a directory of LoRA adapters, see `adapter_dir.py`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.adapters.dora import MAGNITUDE
from llmsuite.adapters.lora import FIRST_FACTOR, SECOND_FACTOR
from llmsuite.adapters.paddlenlp_peft import import_alone
from llmsuite.base.errors import UserError
from llmsuite.base.files import write_json
from llmsuite.checkpoint.adapter_base import base_keys, write_base
from llmsuite.checkpoint.adapter_dir import (
    CONFIG_NAMES,
    STATE,
    STEMS,
    Adapters,
    FactorPair,
    FullTensor,
    factor_name,
    factor_pairs,
    full_tensors,
    structured_name,
)
from llmsuite.checkpoint.model_dir import Layout
from llmsuite.checkpoint.model_writer import FORMATS, OrderedGather
from llmsuite.checkpoint.tensor_writer import ManifestPart, write_file, write_tensors
from llmsuite.checkpoint.tensors import SUFFIX, TensorSpec
from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
from llmsuite.contract.specs import ModelFamily
from llmsuite.models.head import EMBEDDING, OUTPUT, SCORE, is_tied


def write_adapters(
    directory: Path,
    adapters: Adapters,
    family: ModelFamily,
    config: Any,
    read: Callable[[str], np.ndarray],
    specs: Sequence[TensorSpec],
    layout: Layout = "hf",
    tokenizer: Path | None = None,
) -> ManifestPart:
    """Write adapters into an existing directory. Returns their entries of the manifest.

    Each factor is read once, in the order of `specs`: reading gathers its shards by a collective, which all ranks have
    to call in the same order.

    Args:
        directory: target; the caller commits it.
        adapters: the adapters, without their values.
        family: of the model.
        config: its shape.
        read: returns the values of a factor by our name.
        specs: name (ours), shape and dtype of every factor, in order.
        layout: names and orientation of the files.
        tokenizer: directory whose tokenizer files are copied; None for none.
    """
    found = factor_pairs(adapters, family, config, layout).values()
    pairs = list({pair.module: pair for of_module in found for pair in of_module}.values())
    if layout == "paddlenlp" and any(pair.is_embedding for pair in pairs):
        raise UserError("the embedding has an adapter, which PaddleNLP's layout has no place for; merge it")
    metadata = {"format": FORMATS[layout]}
    state = ManifestPart()
    method = adapters.config.method
    if not method.is_plain:
        values = {spec.name: read(spec.name) for spec in specs}
        own = [spec for spec in specs if spec.name not in adapters.full_parameters]
        state = write_file(directory / f"{STATE}{SUFFIX}", own, values.__getitem__, {"format": "llmsuite"})
        adapters, specs, read = _folded(adapters, specs, values)
    if not method.stores_pair and layout == "paddlenlp":
        raise UserError("PaddleNLP's layout has no place for adapters of this lora.method; merge them")
    stored: _FactorTensors | _OwnTensors
    in_full = full_tensors(adapters, family, config, layout)
    if method.stores_pair:
        stored = _FactorTensors(pairs, in_full, adapters, specs, read, layout)
    else:
        stored = _OwnTensors(pairs, in_full, adapters, specs, read)
    if layout == "hf":  # PEFT reads one file
        written = write_file(directory / f"{STEMS[layout]}{SUFFIX}", stored.specs, stored.read, metadata)
    else:
        written = write_tensors(directory, STEMS[layout], stored.specs, stored.read, metadata)
    written.add(state)
    content = _config(adapters, pairs, family, config, layout)
    if layout == "hf":
        content |= _full_keys(adapters, in_full, config)
    write_json(directory / CONFIG_NAMES[layout], content)
    write_base(directory, adapters.base)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, directory)
    return written


def _folded(
    adapters: Adapters, specs: Sequence[TensorSpec], values: Mapping[str, np.ndarray]
) -> tuple[Adapters, Sequence[TensorSpec], Callable[[str], np.ndarray]]:
    """Return adapters as files have them (`AdapterMethod.folded`), with specs and a reader of their parameters."""
    method = adapters.config.method
    if not method.stores_pair:
        return adapters, specs, values.__getitem__
    by_module: dict[str, dict[str, np.ndarray]] = {}
    folded = {name: values[name] for name in adapters.full_parameters}
    for spec in specs:
        if spec.name not in folded:
            module, _, kind = spec.name.rpartition(".")
            by_module.setdefault(module, {})[kind] = values[spec.name]
    for module, parameters in by_module.items():
        folded |= {f"{module}.{kind}": value for kind, value in method.folded(parameters).items()}
    dtypes = {spec.name.rpartition(".")[0]: spec.dtype for spec in specs}
    of_files = [TensorSpec(name, value.shape, dtypes[name.rpartition(".")[0]]) for name, value in folded.items()]
    config = method.folded_config(adapters.config)
    return dataclasses.replace(adapters, config=config), of_files, folded.__getitem__


class _FactorTensors:
    """Stored tensors of a layout, made of our factors."""

    def __init__(
        self,
        pairs: Sequence[FactorPair],
        in_full: Mapping[str, FullTensor],
        adapters: Adapters,
        specs: Sequence[TensorSpec],
        read: Callable[[str], np.ndarray],
        layout: Layout,
    ):
        """Arguments are those of `write_adapters`; `in_full` is what `full_tensors` returns."""
        self._by_name = {spec.name: spec for spec in specs}
        self._layout = layout
        self._factors: dict[str, tuple[FactorPair, str]] = {}
        self._in_full = in_full
        self.specs: list[TensorSpec] = []
        """Name, shape and dtype of each tensor, in the order of the file."""
        for pair in pairs:
            for factor in [FIRST_FACTOR, SECOND_FACTOR, *adapters.config.method.stored_vectors]:
                self.specs.append(self._factor_spec(pair, factor))
                self._factors[self.specs[-1].name] = pair, factor
        for name, tensor in in_full.items():
            spec = self._by_name[tensor.parameter]
            self.specs.append(TensorSpec(name, tensor.stored_shape(spec.shape), spec.dtype))
        uses = [f"{module}.{kind}" for pair, kind in self._factors.values() for module, _ in pair.members]
        uses += [tensor.parameter for tensor in in_full.values()]
        self._in_order = OrderedGather(specs, read, uses)

    def _factor_spec(self, pair: FactorPair, factor: str) -> TensorSpec:
        first = self._by_name[f"{pair.members[0][0]}.{factor}"]
        if factor == MAGNITUDE:
            size = pair.num_outputs(first.shape[-1])
            return TensorSpec(factor_name(pair, factor, self._layout), (size,), first.dtype)
        num_rows, num_columns = first.shape[-2:]
        if factor == FIRST_FACTOR:
            num_columns *= len(pair.members)
        else:
            num_rows = num_rows * len(pair.members)
            num_columns = pair.num_outputs(num_columns)
        shape = (num_columns, num_rows) if self._layout == "hf" else (num_rows, num_columns)
        return TensorSpec(factor_name(pair, factor, self._layout), shape, first.dtype)

    def read(self, name: str) -> np.ndarray:
        """Return the values of a stored tensor."""
        if name in self._in_full:
            tensor = self._in_full[name]
            return tensor.stored(self._in_order.read(tensor.parameter))
        pair, factor = self._factors[name]
        parts = [self._in_order.read(f"{module}.{factor}") for module, _ in pair.members]
        if pair.index is not None:
            parts = [part[pair.index] for part in parts]
        if factor == MAGNITUDE:
            by_part = {place.part: value for (_, place), value in zip(pair.members, parts)}
            return np.concatenate([by_part[part] for part in sorted(by_part)])
        value = np.concatenate(parts, 1) if factor == FIRST_FACTOR else _on_diagonal(parts, pair)
        return value.T if self._layout == "hf" else value


class _OwnTensors:
    """Stored tensors of adapters that files have no pair for: the same values, under the names of the matrices."""

    def __init__(
        self,
        pairs: Sequence[FactorPair],
        in_full: Mapping[str, FullTensor],
        adapters: Adapters,
        specs: Sequence[TensorSpec],
        read: Callable[[str], np.ndarray],
    ):
        """Arguments are those of `write_adapters`; `in_full` is what `full_tensors` returns."""
        self._read = read
        owners: dict[str, list[FactorPair]] = {}
        for pair in pairs:
            owners.setdefault(pair.members[0][0], []).append(pair)
        self._ours: dict[str, tuple[str, int | None]] = {}
        """Our name of each tensor, and its index in a stack."""
        self._in_full = in_full
        self.specs: list[TensorSpec] = []
        """Name, shape and dtype of each tensor, in the order of the file."""
        for spec in specs:
            module, _, kind = spec.name.rpartition(".")
            if spec.name in adapters.full_parameters:
                for stored, tensor in in_full.items():
                    if tensor.parameter == spec.name:
                        self._ours[stored] = spec.name, None
                        self.specs.append(TensorSpec(stored, tensor.stored_shape(spec.shape), spec.dtype))
                continue
            for pair in owners[module]:
                stored = structured_name(pair, kind)
                shape = spec.shape if pair.index is None else spec.shape[1:]
                self._ours[stored] = spec.name, pair.index
                self.specs.append(TensorSpec(stored, shape, spec.dtype))

    def read(self, name: str) -> np.ndarray:
        """Return the values of a stored tensor."""
        ours, index = self._ours[name]
        value = self._read(ours) if index is None else self._read(ours)[index]
        return self._in_full[name].stored(value) if name in self._in_full else value


def _on_diagonal(parts: Sequence[np.ndarray], pair: FactorPair) -> np.ndarray:
    rank, num_outputs = parts[0].shape
    value = np.zeros([len(parts) * rank, pair.num_outputs(num_outputs)], parts[0].dtype)
    for number, (block, (_, place)) in enumerate(zip(parts, pair.members)):
        value[number * rank : (number + 1) * rank, place.columns] = block
    return value


def _config(
    adapters: Adapters, pairs: Sequence[FactorPair], family: ModelFamily, config: Any, layout: Layout
) -> dict[str, Any]:
    """Return the content of adapter_config.json or lora_config.json."""
    targets = _targets([pair.module for pair in pairs], family, config, layout)
    lora = adapters.config
    if layout == "paddlenlp":
        return _paddlenlp_config(adapters, targets)
    common = {
        "task_type": "SEQ_CLS" if SCORE in adapters.full_parameters else "CAUSAL_LM",
        **base_keys(adapters.base),
        "r": lora.rank,
        "target_modules": targets,
        "inference_mode": True,
    }
    if not lora.method.stores_pair:
        return {**lora.method.peft_keys(lora), **common}
    # several matrices in one pair: a larger rank, and an alpha that keeps the scale
    wide = {pair.module: len(pair.members) for pair in pairs if len(pair.members) > 1}
    grown = math.sqrt if lora.rslora else float
    embedded = {module for pair in pairs if pair.is_embedding for module, _ in pair.members}
    on_experts = any(pair.index is not None for pair in pairs)
    if on_experts:
        # PEFT 0.21 joins the pairs of gate and up, with twice the rank and twice alpha: that keeps the scale only
        # without rslora, where it is alpha / rank
        rslora = False
        alpha = lora.scale * lora.rank
    else:
        rslora = lora.rslora
        alpha = lora.alpha
    linears = {family.names().is_linear(f"{module}.weight") for module in adapters.modules if module not in embedded}
    return {
        "peft_type": lora.method.type_in_files(),
        **common,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "use_dora": MAGNITUDE in lora.method.stored_vectors,
        # PEFT refuses dropout on bare parameters, which stacks of experts are in transformers 5, even to load them
        "lora_dropout": 0.0 if on_experts else lora.dropout,
        "bias": "none",
        "fan_in_fan_out": linears == {False},
        "rank_pattern": {re.escape(module): count * lora.rank for module, count in wide.items()},
        "alpha_pattern": {re.escape(module): grown(count) * lora.alpha for module, count in wide.items()},
    }


def _full_keys(adapters: Adapters, in_full: Mapping[str, FullTensor], config: Any) -> dict[str, Any]:
    """Return the keys of adapter_config.json about parameters that are trained in full: names of their modules."""
    modules = [name.removesuffix(".weight").rpartition(".")[2] for name in in_full]
    if EMBEDDING in adapters.full_parameters and is_tied(config):
        modules.remove(OUTPUT.removesuffix(".weight"))  # PEFT ties it to the embedding
        return {"modules_to_save": modules, "ensure_weight_tying": True}
    return {"modules_to_save": modules or None}


def _paddlenlp_config(adapters: Adapters, targets: Sequence[str]) -> dict[str, Any]:
    """Return the content of lora_config.json: the same keys as `LoRAConfig.save_pretrained`."""
    # imported here: other runs do not need paddlenlp
    lora_config_class = import_alone("paddlenlp.peft.lora.lora_config")[0].LoRAConfig
    lora = adapters.config
    config = lora_config_class(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        rslora=lora.rslora,
        lora_plus_scale=lora.lora_plus_ratio,
        target_modules=[rf"(.*\.)?{re.escape(target)}" for target in targets],
        base_model_name_or_path=base_keys(adapters.base)["base_model_name_or_path"],
    )
    return {**config.to_dict(), "scaling": config.scaling}


def _targets(modules: Sequence[str], family: ModelFamily, config: Any, layout: Layout) -> list[str]:
    """Return, for each module, the shortest end of its name that no module without an adapter has."""
    names = family.names()
    prefix = family.names().paddlenlp_prefix(config)
    every = {
        theirs.removesuffix(".weight")
        for ours in names.parameter_names(config)
        for theirs in names.hf_tensors(ours, config).names
        if theirs.endswith(".weight")
    }
    if layout == "paddlenlp":
        every = {re.sub(r"^model\.", str(prefix), name) for name in every}
    taken = {end for name in every.difference(modules) for end in _ends(name)}
    targets: dict[str, None] = {}
    for module in modules:
        shortest = next(end for end in _ends(module) if end not in taken)
        targets[shortest] = None
    return list(targets)


def _ends(name: str) -> list[str]:
    """Return the last word of a name, its last two, and so on to the full name."""
    words = name.split(".")
    return [".".join(words[-count:]) for count in range(1, len(words) + 1)]
