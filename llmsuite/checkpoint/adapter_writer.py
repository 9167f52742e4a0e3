"""Writes a directory of LoRA adapters, see `adapter_dir.py`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.adapter_base import base_keys, write_base
from llmsuite.checkpoint.adapter_dir import (
    CONFIG_NAMES,
    LOKR,
    MORA,
    STATE,
    STEMS,
    Adapters,
    FactorPair,
    factor_pairs,
    stored_factor,
    stored_parameter,
    stored_structure,
)
from llmsuite.checkpoint.model_dir import Layout
from llmsuite.checkpoint.model_writer import OrderedGather
from llmsuite.checkpoint.tensor_writer import ManifestPart, write_file, write_tensors
from llmsuite.checkpoint.tensors import SUFFIX, TensorSpec
from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
from llmsuite.errors import UserError
from llmsuite.files import write_json
from llmsuite.models.shard_plan import (
    BEHIND,
    BETWEEN,
    FIRST_FACTOR,
    MAGNITUDE,
    MIXER,
    SECOND_FACTOR,
    START_FIRST,
    START_SECOND,
)
from llmsuite.models.targets import is_fixed
from llmsuite.specs import ModelFamily


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

    Each factor is read once, in the order of `specs`, so that ranks that hold parts of it take part in that order.

    Args:
        directory: where to; the caller commits it.
        adapters: which ones.
        family: of the model.
        config: its shape.
        read: values of a factor by our name.
        specs: name (ours), shape and dtype of every factor, in order.
        layout: whose names and orientation the files get.
        tokenizer: directory whose tokenizer files are copied along.
    """
    found = factor_pairs(adapters, family, config, layout).values()
    pairs = list({pair.module: pair for of_module in found for pair in of_module}.values())
    if layout == "paddlenlp" and any(pair.is_embedding for pair in pairs):
        raise UserError("the embedding has an adapter, which PaddleNLP's layout has no place for; merge it")
    metadata = {"format": "pt" if layout == "hf" else "np"}
    state = ManifestPart()
    if not adapters.is_plain:
        values = {spec.name: read(spec.name) for spec in specs}
        trained = [spec for spec in specs if spec.name not in adapters.beside]
        state = write_file(directory / f"{STATE}{SUFFIX}", trained, values.__getitem__, {"format": "llmsuite"})
        adapters, specs, read = _without_mixer(adapters, specs, values)
        if adapters.has_start:
            adapters, specs, read = _without_start(adapters, specs, values)
        if adapters.is_vera:
            adapters, specs, read = _without_vectors(adapters, specs, values)
    if adapters.is_structured and layout == "paddlenlp":
        raise UserError("PaddleNLP's layout has no place for adapters of this lora.method; merge them")
    stored: _StoredFactors | _StoredAsTheyAre
    stored = (_StoredAsTheyAre if adapters.is_structured else _StoredFactors)(pairs, adapters, specs, read, layout)
    if layout == "hf":  # PEFT reads one file
        written = write_file(directory / f"{STEMS[layout]}{SUFFIX}", stored.specs, stored.read, metadata)
    else:
        written = write_tensors(directory, STEMS[layout], stored.specs, stored.read, metadata)
    written.add(state)
    write_json(directory / CONFIG_NAMES[layout], _config(adapters, pairs, family, config, layout))
    write_base(directory, adapters.base)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, directory)
    return written


def _without_mixer(
    adapters: Adapters, specs: Sequence[TensorSpec], values: Mapping[str, np.ndarray]
) -> tuple[Adapters, Sequence[TensorSpec], Callable[[str], np.ndarray]]:
    """The same adapters with their mixers multiplied into the first factors: x A M B is (x A M) B."""

    def read(name: str) -> np.ndarray:
        module, _, kind = name.rpartition(".")
        mixer = values.get(f"{module}.{MIXER}") if kind == FIRST_FACTOR else None
        if mixer is None:
            return values[name]
        return (values[name].astype("float32") @ mixer.astype("float32")).astype(values[name].dtype)

    plain = dataclasses.replace(adapters, config=dataclasses.replace(adapters.config, lora_use_mixer=False))
    return plain, [spec for spec in specs if not spec.name.endswith(f".{MIXER}")], read


def _without_start(
    adapters: Adapters, specs: Sequence[TensorSpec], values: Mapping[str, np.ndarray]
) -> tuple[Adapters, Sequence[TensorSpec], Callable[[str], np.ndarray]]:
    """The same adapters with twice the rank: A B - A0 B0 is [A, A0] times [B; -B0], and the scale stays."""
    config = adapters.config
    alpha = config.lora_alpha * (math.sqrt(2) if config.rslora else 2)
    plain = dataclasses.replace(config, pissa=False, loraga=False, r=2 * config.r, lora_alpha=alpha)

    def read(name: str) -> np.ndarray:
        module, _, kind = name.rpartition(".")
        if kind == FIRST_FACTOR:
            return np.concatenate([values[name], values[f"{module}.{START_FIRST}"]], -1)
        if kind == SECOND_FACTOR:
            return np.concatenate([values[name], -values[f"{module}.{START_SECOND}"]], -2)
        return values[name]

    kept = [spec for spec in specs if not is_fixed(spec.name)]
    wide = [dataclasses.replace(spec, shape=read(spec.name).shape) for spec in kept]
    return dataclasses.replace(adapters, config=plain), wide, read


def _without_vectors(
    adapters: Adapters, specs: Sequence[TensorSpec], values: Mapping[str, np.ndarray]
) -> tuple[Adapters, Sequence[TensorSpec], Callable[[str], np.ndarray]]:
    """VeRA as plain adapters: ((x A) d) B b is (x (A d)) (B b)."""
    from llmsuite.models.peft_configs import lora_config  # takes paddlenlp, which other runs do without

    config = adapters.config
    keys = {key: getattr(config, key) for key in ("r", "lora_alpha", "lora_dropout", "rslora")}
    folded = {FIRST_FACTOR: (START_FIRST, BETWEEN), SECOND_FACTOR: (START_SECOND, BEHIND)}
    renamed = {START_FIRST: FIRST_FACTOR, START_SECOND: SECOND_FACTOR}

    def read(name: str) -> np.ndarray:
        module, _, kind = name.rpartition(".")
        if kind not in folded:
            return values[name]
        factor, vector = (values[f"{module}.{own}"] for own in folded[kind])
        return (factor.astype("float32") * vector.astype("float32")).astype(factor.dtype)

    plain = []
    for spec in specs:
        module, _, kind = spec.name.rpartition(".")
        if kind in renamed:
            plain.append(dataclasses.replace(spec, name=f"{module}.{renamed[kind]}"))
        elif kind not in (BETWEEN, BEHIND):
            plain.append(spec)
    return dataclasses.replace(adapters, config=lora_config(**keys)), plain, read


class _StoredFactors:
    """The tensors of a layout, and how each is made of our factors."""

    def __init__(
        self,
        pairs: Sequence[FactorPair],
        adapters: Adapters,
        specs: Sequence[TensorSpec],
        read: Callable[[str], np.ndarray],
        layout: Layout,
    ):
        """Arguments as of `write_adapters`."""
        self._by_name, self._layout = {spec.name: spec for spec in specs}, layout
        self._factors: dict[str, tuple[FactorPair, str]] = {}
        self._whole: dict[str, str] = {}
        self.specs: list[TensorSpec] = []
        """Name, shape and dtype of each tensor, in the order of the file."""
        for pair in pairs:
            for factor in [FIRST_FACTOR, SECOND_FACTOR] + [MAGNITUDE] * adapters.has_magnitudes:
                self.specs.append(self._factor_spec(pair, factor))
                self._factors[self.specs[-1].name] = pair, factor
        for ours in adapters.beside:
            name, spec = stored_parameter(ours, layout), self._by_name[ours]
            self._whole[name] = ours
            self.specs.append(TensorSpec(name, spec.shape[::-1], spec.dtype))
        uses = [f"{module}.{kind}" for pair, kind in self._factors.values() for module, _ in pair.members]
        self._in_order = OrderedGather(specs, read, [*uses, *adapters.beside])

    def _factor_spec(self, pair: FactorPair, factor: str) -> TensorSpec:
        first = self._by_name[f"{pair.members[0][0]}.{factor}"]
        if factor == MAGNITUDE:
            size = first.shape[-1] * pair.num_parts
            return TensorSpec(stored_factor(pair, factor, self._layout), (size,), first.dtype)
        num_rows, num_columns = first.shape[-2:]
        if factor == FIRST_FACTOR:
            num_columns *= len(pair.members)
        else:
            num_rows, num_columns = num_rows * len(pair.members), num_columns * pair.num_parts
        shape = (num_columns, num_rows) if self._layout == "hf" else (num_rows, num_columns)
        return TensorSpec(stored_factor(pair, factor, self._layout), shape, first.dtype)

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor."""
        if name in self._whole:
            return self._in_order.read(self._whole[name]).T
        pair, factor = self._factors[name]
        parts = [self._in_order.read(f"{module}.{factor}") for module, _ in pair.members]
        if pair.index is not None:
            parts = [part[pair.index] for part in parts]
        if factor == MAGNITUDE:
            return np.concatenate([value for _, value in sorted(zip([part for _, part in pair.members], parts))])
        value = np.concatenate(parts, 1) if factor == FIRST_FACTOR else _on_diagonal(parts, pair)
        return value.T if self._layout == "hf" else value


class _StoredAsTheyAre:
    """The tensors of adapters that are no pairs of factors: the same values, under the names of the matrices."""

    def __init__(
        self,
        pairs: Sequence[FactorPair],
        adapters: Adapters,
        specs: Sequence[TensorSpec],
        read: Callable[[str], np.ndarray],
        layout: Layout,
    ):
        """Arguments as of `write_adapters`."""
        self._read = read
        owners: dict[str, list[FactorPair]] = {}
        for pair in pairs:
            owners.setdefault(pair.members[0][0], []).append(pair)
        self._ours: dict[str, tuple[str, int | None]] = {}
        """Our name of each tensor, and which one of a stack it is."""
        self._beside = {stored_parameter(name, layout) for name in adapters.beside}
        self.specs: list[TensorSpec] = []
        """Name, shape and dtype of each tensor, in the order of the file."""
        for spec in specs:
            module, _, kind = spec.name.rpartition(".")
            if spec.name in adapters.beside:
                self._ours[stored_parameter(spec.name, layout)] = spec.name, None
                self.specs.append(TensorSpec(stored_parameter(spec.name, layout), spec.shape[::-1], spec.dtype))
                continue
            for pair in owners[module]:
                stored, shape = stored_structure(pair, kind), spec.shape if pair.index is None else spec.shape[1:]
                self._ours[stored] = spec.name, pair.index
                self.specs.append(TensorSpec(stored, shape, spec.dtype))

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor."""
        ours, index = self._ours[name]
        value = self._read(ours) if index is None else self._read(ours)[index]
        return value.T if name in self._beside else value


def _on_diagonal(parts: Sequence[np.ndarray], pair: FactorPair) -> np.ndarray:
    rank, num_outputs = parts[0].shape
    value = np.zeros([len(parts) * rank, pair.num_parts * num_outputs], parts[0].dtype)
    for number, (block, (_, part)) in enumerate(zip(parts, pair.members)):
        value[number * rank : (number + 1) * rank, part * num_outputs : (part + 1) * num_outputs] = block
    return value


def _config(
    adapters: Adapters, pairs: Sequence[FactorPair], family: ModelFamily, config: Any, layout: Layout
) -> dict[str, Any]:
    """The content of adapter_config.json or lora_config.json."""
    targets, lora = _targets([pair.module for pair in pairs], family, config, layout), adapters.config
    if layout == "paddlenlp":
        patterns = [rf"(.*\.)?{re.escape(target)}" for target in targets]
        named = base_keys(adapters.base)["base_model_name_or_path"]
        said = dataclasses.replace(lora, target_modules=patterns, base_model_name_or_path=named)
        return {**said.to_dict(), "scaling": said.scaling}  # as its `save_pretrained`
    common = {
        "task_type": "SEQ_CLS" if adapters.beside else "CAUSAL_LM",
        "modules_to_save": [name.removesuffix(".weight") for name in adapters.beside] or None,
        **base_keys(adapters.base),
        "r": lora.r,
        "target_modules": targets,
        "inference_mode": True,
    }
    if adapters.is_lokr:
        kinds = {"decompose_both": False, "decompose_factor": -1, "rank_dropout": 0.0, "module_dropout": 0.0}
        return {"peft_type": LOKR, "alpha": lora.scaling * lora.r, **kinds, **common}
    if adapters.is_structured:  # PEFT has no such kind, and says so
        return {"peft_type": MORA, "use_mora": True, "lora_dropout": lora.lora_dropout, **common}
    # several in one: a larger rank, and as much larger an alpha that the scale is the same
    wide = {pair.module: len(pair.members) for pair in pairs if len(pair.members) > 1}
    grown = math.sqrt if lora.rslora else float
    embedded = {module for pair in pairs if pair.is_embedding for module, _ in pair.members}
    # PEFT 0.21 makes one pair of those of gate and up, with twice the rank and twice alpha: that is the same scale only
    # where it is alpha / rank
    on_experts = any(pair.index is not None for pair in pairs)
    rslora, alpha = (False, lora.scaling * lora.r) if on_experts else (lora.rslora, lora.lora_alpha)
    linears = {family.names().is_linear(f"{module}.weight") for module in adapters.modules if module not in embedded}
    return {
        "peft_type": "LORA",
        **common,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "use_dora": adapters.has_magnitudes,
        # PEFT refuses any on the parameters that stacks of experts are with transformers 5, even to load them
        "lora_dropout": 0.0 if on_experts else lora.lora_dropout,
        "bias": "none",
        "fan_in_fan_out": linears == {False},
        "rank_pattern": {re.escape(module): count * lora.r for module, count in wide.items()},
        "alpha_pattern": {re.escape(module): grown(count) * lora.lora_alpha for module, count in wide.items()},
    }


def _targets(modules: Sequence[str], family: ModelFamily, config: Any, layout: Layout) -> list[str]:
    """As few of the last words of each module as no other module of the model ends in."""
    names, prefix = family.names(), family.names().paddlenlp_prefix(config)
    every = {
        theirs.removesuffix(".weight")
        for ours in names.parameter_names(config)
        for theirs in names.hf_tensors(ours, config).names
        if theirs.endswith(".weight")
    }
    if layout == "paddlenlp":
        every = {re.sub(r"^model\.", str(prefix), name) for name in every}
    left_out = {end for name in every.difference(modules) for end in _ends(name)}
    return list(dict.fromkeys(next(end for end in _ends(name) if end not in left_out) for name in modules))


def _ends(name: str) -> list[str]:
    """The last word of a name, its last two, and so on to the whole name."""
    words = name.split(".")
    return [".".join(words[-count:]) for count in range(1, len(words) + 1)]
