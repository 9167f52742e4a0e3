"""Adapters that were trained here, on disk: as HF PEFT or PaddleNLP has them, and which model they belong to.

    adapter_config.json, adapter_model.safetensors        the layout of HF PEFT, in which a run saves them
    lora_config.json, peft_model-*.safetensors + index    the layout of PaddleNLP
    base.json                                             path and sha256 of the model they were trained on

Inside llmsuite the factors of a matrix [I, O] are A [I, R] and B [R, O], as PaddleNLP has them; PEFT has them
transposed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.layout import Layout
from llmsuite.checkpoint.model_dir import copy_tokenizer
from llmsuite.checkpoint.tensors import SUFFIX, TensorFiles, TensorSpec
from llmsuite.checkpoint.write import ManifestEntry, OrderedGather, write_file, write_tensors
from llmsuite.errors import UserError
from llmsuite.files import read_json_file, write_json
from llmsuite.models.shard_plan import FIRST_FACTOR, SECOND_FACTOR
from llmsuite.specs import ModelFamily

BASE = "base.json"
CONFIGS = ("adapter_config.json", "lora_config.json")
"""What HF PEFT and PaddleNLP call the file beside the factors."""
REFUSED = ("use_dora", "lora_use_mixer", "use_mora", "do_qat", "loftq_config", "megatron_config")
"""Keys of such a file that change the sum W + scale * A B, and are not implemented here."""
_CONFIGS: Mapping[Layout, str] = dict(zip(("hf", "paddlenlp"), CONFIGS))
_STEMS: Mapping[Layout, str] = {"hf": "adapter_model", "paddlenlp": "peft_model"}


@dataclasses.dataclass(frozen=True)
class Base:
    """The model that adapters were trained on."""

    path: str | None
    """Its directory; None for one that was drawn from a seed and lies nowhere."""
    digest: str
    """`ModelDirectory.digest`; of one that was drawn, of its shape and seed."""


@dataclasses.dataclass(frozen=True)
class Adapters:
    """What there is to know of the adapters of a model, but for their values."""

    modules: Sequence[str]
    """Our names of the matrices that have one."""
    rank: int
    alpha: float
    is_stabilised: bool
    """Whether they are scaled by alpha / sqrt(rank), not alpha / rank."""
    base: Base
    beside: Sequence[str] = ()
    """Our names of parameters that are trained whole beside them: the score head of a reward model."""


@dataclasses.dataclass(frozen=True)
class _Pair:
    """The factors of a matrix in the files.

    HF keeps q, k and v of a GPT in one matrix. Theirs lie side by side in one A, and as blocks on a diagonal in one B:
    a pair of the sum of their ranks, whose product is the same.
    """

    module: str
    """What the layout calls the matrix."""
    members: list[tuple[str, int]]
    """Our names of the matrices in it, and which part of its outputs each is."""
    num_parts: int


def _pairs(adapters: Adapters, family: ModelFamily, config: Any, layout: Layout) -> dict[str, _Pair]:
    """By our name of a module, the pair it is in."""
    names, prefix = family.names(), family.names().paddlenlp_prefix(config)
    if layout == "paddlenlp" and prefix is None:
        raise UserError(
            f"a {config.to_hf()['model_type']} has no PaddleNLP layout that we know; its adapters are PEFT's"
        )
    found: dict[str, _Pair] = {}
    for module in adapters.modules:
        place = names.hf_tensors(f"{module}.weight", config)
        theirs = place.names[0].removesuffix(".weight")
        if layout == "paddlenlp":
            theirs = re.sub(r"^model\.", str(prefix), theirs)
        found.setdefault(theirs, _Pair(theirs, [], place.num_parts)).members.append((module, place.part))
    return {module: pair for pair in found.values() for module, _ in pair.members}


def write_adapters(
    directory: Path,
    adapters: Adapters,
    family: ModelFamily,
    config: Any,
    read: Callable[[str], np.ndarray],
    specs: Sequence[TensorSpec],
    layout: Layout = "hf",
    tokenizer: Path | None = None,
) -> ManifestEntry:
    """Write adapters into an existing directory. Returns sizes and digests for its manifest.

    Each factor is read once, in the order of `specs`; so the ranks that have parts of it know when to give them.

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
    by_name = {spec.name: spec for spec in specs}
    pairs = list({pair.module: pair for pair in _pairs(adapters, family, config, layout).values()}.values())
    # each is asked for once, in the order of the files, and made in the order of `specs`
    in_turn = OrderedGather(specs, read, list(by_name))
    stored: dict[str, tuple[_Pair, str]] = {}
    beside: dict[str, str] = {}
    stored_specs = []
    for pair in pairs:
        for factor in (FIRST_FACTOR, SECOND_FACTOR):
            name = _stored_name(pair.module, factor, layout)
            first = by_name[f"{pair.members[0][0]}.{factor}"]
            num_rows, num_columns = first.shape
            if factor == FIRST_FACTOR:
                num_columns *= len(pair.members)
            else:
                num_rows, num_columns = num_rows * len(pair.members), num_columns * pair.num_parts
            shape = (num_columns, num_rows) if layout == "hf" else (num_rows, num_columns)
            stored[name] = pair, factor
            stored_specs.append(TensorSpec(name, shape, first.dtype))

    def read_stored(name: str) -> np.ndarray:
        if name in beside:
            return in_turn.read(beside[name]).T
        pair, factor = stored[name]
        parts = [in_turn.read(f"{module}.{factor}") for module, _ in pair.members]
        value = np.concatenate(parts, 1) if factor == FIRST_FACTOR else _on_diagonal(parts, pair)
        return value.T if layout == "hf" else value

    for ours in adapters.beside:
        name, spec = _stored_whole(ours, layout), by_name[ours]
        beside[name] = ours
        stored_specs.append(TensorSpec(name, spec.shape[::-1], spec.dtype))
    metadata = {"format": "pt" if layout == "hf" else "np"}
    if layout == "hf":  # PEFT reads one file
        written = write_file(directory / f"{_STEMS[layout]}{SUFFIX}", stored_specs, read_stored, metadata)
    else:
        written = write_tensors(directory, _STEMS[layout], stored_specs, read_stored, metadata)
    write_json(directory / _CONFIGS[layout], _config(adapters, pairs, family, config, layout))
    write_json(directory / BASE, {"path": adapters.base.path, "sha256": adapters.base.digest})
    if tokenizer is not None:
        copy_tokenizer(tokenizer, directory)
    return written


def _stored_name(module: str, factor: str, layout: Layout) -> str:
    return f"base_model.model.{module}.{factor}.weight" if layout == "hf" else f"{module}.{factor}"


def _stored_whole(parameter: str, layout: Layout) -> str:
    if layout == "paddlenlp":
        raise UserError(
            f"{parameter} was trained beside the adapters, which PaddleNLP's layout has no place for; merge"
        )
    return f"base_model.model.{parameter}"


def _on_diagonal(parts: Sequence[np.ndarray], pair: _Pair) -> np.ndarray:
    rank, num_outputs = parts[0].shape
    value = np.zeros([len(parts) * rank, pair.num_parts * num_outputs], parts[0].dtype)
    for number, (block, (_, part)) in enumerate(zip(parts, pair.members)):
        value[number * rank : (number + 1) * rank, part * num_outputs : (part + 1) * num_outputs] = block
    return value


def _config(
    adapters: Adapters, pairs: Sequence[_Pair], family: ModelFamily, config: Any, layout: Layout
) -> dict[str, Any]:
    """The content of adapter_config.json or lora_config.json."""
    targets = _targets([pair.module for pair in pairs], family, config, layout)
    if layout == "paddlenlp":
        return {
            "r": adapters.rank,
            "lora_alpha": adapters.alpha,
            "rslora": adapters.is_stabilised,
            "target_modules": [rf"(.*\.)?{re.escape(target)}" for target in targets],
            "lora_dropout": 0.0,
            "tensor_parallel_degree": -1,
            "base_model_name_or_path": adapters.base.path,
        }
    # several in one: a larger rank, and as much larger an alpha that the scale is the same
    wide = {pair.module: len(pair.members) for pair in pairs if len(pair.members) > 1}
    grown = math.sqrt if adapters.is_stabilised else float
    linears = {family.names().is_linear(f"{module}.weight") for module in adapters.modules}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if adapters.beside else "CAUSAL_LM",
        "modules_to_save": [name.removesuffix(".weight") for name in adapters.beside] or None,
        "base_model_name_or_path": adapters.base.path,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "use_rslora": adapters.is_stabilised,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": linears == {False},
        "target_modules": targets,
        "rank_pattern": {re.escape(module): count * adapters.rank for module, count in wide.items()},
        "alpha_pattern": {re.escape(module): grown(count) * adapters.alpha for module, count in wide.items()},
        "inference_mode": True,
    }


def _targets(modules: Sequence[str], family: ModelFamily, config: Any, layout: Layout) -> list[str]:
    """The last word of modules where all modules of the model that end so are meant, else whole names."""
    names, prefix = family.names(), family.names().paddlenlp_prefix(config)
    every = {
        theirs.removesuffix(".weight")
        for ours in names.parameter_names(config)
        for theirs in names.hf_tensors(ours, config).names
        if theirs.endswith(".weight")
    }
    if layout == "paddlenlp":
        every = {re.sub(r"^model\.", str(prefix), name) for name in every}
    left_out = {name.rpartition(".")[2] for name in every.difference(modules)}
    words = {name: name.rpartition(".")[2] for name in modules}
    return list(dict.fromkeys(name if word in left_out else word for name, word in words.items()))


class SavedAdapters:
    """The factors in a directory that `write_adapters` has written, by our names."""

    def __init__(self, directory: Path, adapters: Adapters, family: ModelFamily, config: Any, layout: Layout = "hf"):
        """Raises UserError when it has others."""
        self._pairs, self._layout = _pairs(adapters, family, config, layout), layout
        self._files, self._rank = TensorFiles(directory, _STEMS[layout]), adapters.rank
        self._beside = set(adapters.beside)
        wanted = {
            _stored_name(p.module, factor, layout)
            for p in self._pairs.values()
            for factor in (FIRST_FACTOR, SECOND_FACTOR)
        }
        wanted.update(_stored_whole(name, layout) for name in adapters.beside)
        if differing := sorted(wanted.symmetric_difference(self._files.names)):
            raise UserError(f"{directory}: its adapters are those of other modules, such as {differing[0]}")

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of a factor."""
        stored, index = self._place(name, None)
        return TensorSpec(name, tuple(part.stop - part.start for part in index), self._files.spec(stored).dtype)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """A factor, or what was trained beside them, or a slice of it (one slice a dim)."""
        if name not in self._beside:
            return self._read_factor(name, index)
        return self._files.read(_stored_whole(name, self._layout), index[::-1] if index else None).T

    def _read_factor(self, name: str, index: Sequence[slice] | None) -> np.ndarray:
        stored, place = self._place(name, index)
        value = self._files.read(stored, place[::-1] if self._layout == "hf" else place)
        return value.T if self._layout == "hf" else value

    def _place(self, name: str, index: Sequence[slice] | None) -> tuple[str, list[slice]]:
        """The tensor a factor lies in, and where, lying as in memory."""
        module, _, factor = name.rpartition(".")
        pair = self._pairs[module]
        stored = _stored_name(pair.module, factor, self._layout)
        shape = self._files.spec(stored).shape
        num_rows, num_columns = shape[::-1] if self._layout == "hf" else shape
        number, part = next((i, part) for i, (ours, part) in enumerate(pair.members) if ours == module)
        if factor == FIRST_FACTOR:
            first, size = [0, number * self._rank], [num_rows, self._rank]
        else:
            num_columns //= pair.num_parts
            first, size = [number * self._rank, part * num_columns], [self._rank, num_columns]
        bounds = [s.indices(n)[:2] for s, n in zip(index or [slice(None)] * 2, size)]
        return stored, [slice(start + low, start + high) for start, (low, high) in zip(first, bounds)]


def open_adapters(directory: Path, family: ModelFamily, config: Any) -> tuple[Adapters, SavedAdapters]:
    """Adapters of a model, in either layout, and what they say of themselves.

    Raises:
        UserError: they are of a kind that `write_adapters` does not write, or of another model.
    """
    layout: Layout = "hf" if (directory / _CONFIGS["hf"]).is_file() else "paddlenlp"
    data = read_json_file(directory / _CONFIGS[layout])
    if on := [key for key in (*REFUSED, "rank_pattern", "alpha_pattern", "modules_to_save") if data.get(key)]:
        raise UserError(f"{directory / _CONFIGS[layout]}: {', '.join(on)}: not to be had in another layout; merge it")
    stored = set(TensorFiles(directory, _STEMS[layout]).names)
    names = family.names()
    plain = [name for name in names.parameter_names(config) if not names.hf_tensors(name, config).stacked]
    modules = [name.removesuffix(".weight") for name in plain]
    base, stabilised = read_base(directory), "use_rslora" if layout == "hf" else "rslora"
    whole = Adapters(
        modules=modules,
        rank=data["r"],
        alpha=data["lora_alpha"],
        is_stabilised=bool(data.get(stabilised)),
        base=base or Base(data.get("base_model_name_or_path"), ""),
    )
    pairs = _pairs(whole, family, config, layout)
    here = [module for module, pair in pairs.items() if _stored_name(pair.module, FIRST_FACTOR, layout) in stored]
    adapters = dataclasses.replace(whole, modules=here)
    return adapters, SavedAdapters(directory, adapters, family, config, layout)


def read_base(directory: Path) -> Base | None:
    """The model that adapters in a directory belong to; None when they do not say."""
    if not (directory / BASE).is_file():
        return None
    data = read_json_file(directory / BASE)
    try:
        return Base(data["path"], data["sha256"])
    except (TypeError, KeyError) as error:
        raise UserError(f"{directory / BASE}: has not path and sha256") from error


def _named_base(directory: Path) -> Base:
    """What PEFT and PaddleNLP write of a model: its path, or its name on a hub."""
    found = [path for name in _CONFIGS.values() if (path := directory / name).is_file()]
    named = read_json_file(found[0]).get("base_model_name_or_path") if found else None
    if not isinstance(named, str) or not named:
        raise UserError(f"{directory}: is a LoRA adapter and does not say of which model; name it with --base DIR")
    return Base(named, "")


def base_path(directory: Path) -> Path:
    """Where the model lies that adapters in a directory were trained on. Raises UserError when it lies nowhere."""
    base = read_base(directory) or _named_base(directory)
    if base.path is None:
        raise UserError(
            f"{directory}: its adapters were trained on a model that was drawn from a seed and lies nowhere; adapters "
            "of a run with model.weights can be used"
        )
    if not (Path(base.path) / "config.json").is_file():
        raise UserError(f"{directory}: the model of its adapters, {base.path}, is not there; name it with --base DIR")
    return Path(base.path)


def check_base(directory: Path, base: Base) -> None:
    """Raises UserError when adapters in a directory belong to another model."""
    found = read_base(directory)
    if found is not None and found.digest != base.digest:
        what = base.path or "the one that is drawn from the seed"
        raise UserError(
            f"{directory}: its adapters were trained on {found.path or 'a model drawn from a seed'} as it had sha256 "
            f"{found.digest[:12]}…; {what} has {base.digest[:12]}…. Bring that model back, or start a new run"
        )
