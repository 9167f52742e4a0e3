"""A directory of LoRA adapters, in the layout of HF PEFT or PaddleNLP, and their base model.

    adapter_config.json, adapter_model.safetensors        the layout of HF PEFT, in which a run saves them
    lora_config.json, peft_model-*.safetensors + index    the layout of PaddleNLP; its other methods are only read
    base.json                                             path and sha256 of the base model, and the quantisation of
                                                          its matrices, if there was one
    adapter_state.safetensors                             of all but plain LoRA: the parameters to resume training

Inside llmsuite the factors of a matrix [I, O] are A [I, R] and B [R, O], as in PaddleNLP; in PEFT they are transposed.
`adapter_base.py` reads the base model, `adapter_writer.py` writes such a directory.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.adapters.dora import MAGNITUDE
from llmsuite.adapters.lora import FIRST_FACTOR, LORA, SECOND_FACTOR
from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import is_file
from llmsuite.base.strict_json import ABOVE_ZERO, check_kinds
from llmsuite.checkpoint.adapter_base import CONFIGS, Base, config_names, read_base, refuse_left_out
from llmsuite.checkpoint.adapter_config import read_adapter_config
from llmsuite.checkpoint.model_dir import Layout, has_mtp_layers
from llmsuite.checkpoint.tensors import TensorFiles, TensorSpec
from llmsuite.contract.specs import ModelFamily
from llmsuite.models.adapter_method import AdapterConfig
from llmsuite.models.head import EMBEDDING, OUTPUT, is_tied
from llmsuite.models.hf_tensors import HfTensors

UNSUPPORTED_KEYS = (
    *("lora_use_mixer", "use_mora", "do_qat", "pissa", "loraga", "loftq_config", "megatron_config"),
    *("layer_replication", "use_qalora", "alora_invocation_tokens", "arrow_config"),
    "kasa_config",
)
"""Keys of the configuration that change W + scale * A B, or its W, and are not implemented here, unless a method has
one of them as its `flag`."""
NOT_PLAIN = (*UNSUPPORTED_KEYS, "use_dora", "lora_bias", "target_parameters")
"""Keys without a counterpart in the other layout."""
CONFIG_NAMES: Mapping[Layout, str] = dict(zip(("hf", "paddlenlp"), CONFIGS))
STATE = "adapter_state"
"""Stem of the file with the parameters of adapters other than plain LoRA, by our names."""
STEMS: Mapping[Layout, str] = {"hf": "adapter_model", "paddlenlp": "peft_model"}


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of a model, without their values."""

    modules: Sequence[str]
    """Our names of the matrices with an adapter."""
    config: AdapterConfig
    base: Base
    full_parameters: Sequence[str] = ()
    """Our names of parameters that are trained in full next to the adapters: the score head of a reward model, and
    those of `lora.modules_to_save`."""


@dataclasses.dataclass(frozen=True)
class FactorPair:
    """The two stored factors of one or more of our matrices.

    HF keeps q, k and v of a GPT in one matrix. Their factors are concatenated in one A, and are blocks on the diagonal
    of one B: a pair whose rank is the sum of theirs, and whose product is the same. HF has one matrix for each routed
    expert, where we have a stack, so there is a pair for each.
    """

    module: str
    """Name of the matrix in the layout."""
    members: list[tuple[str, HfTensors]]
    """Our names of the matrices in it, and the place of each."""
    index: int | None = None
    """Index of the matrix in a stack; None for others."""
    is_embedding: bool = False
    """True for the embedding, whose factors have other names in PEFT."""

    @property
    def num_parts(self) -> int:
        """Number of our matrices that the stored one joins, with or without adapters."""
        return self.members[0][1].num_parts

    def num_outputs(self, alone: int) -> int:
        """Number of outputs of the stored matrix; `alone` is that of a matrix that is joined with no other."""
        return sum(self.members[0][1].sizes) or alone


def factor_pairs(adapters: Adapters, family: ModelFamily, config: Any, layout: Layout) -> dict[str, list[FactorPair]]:
    """Return the pair of each module, or one pair for each matrix of a stack, by our name of the module."""
    names = family.names()
    prefix = family.names().paddlenlp_prefix(config)
    if layout == "paddlenlp" and prefix is None:
        raise UserError(
            f"a {config.to_hf()['model_type']} has no PaddleNLP layout that we know; its adapters are PEFT's"
        )
    found: dict[str, FactorPair] = {}
    embedding = None
    if family.shard_plan is not None:
        embedding = family.shard_plan.embedding
    for module in adapters.modules:
        place = names.hf_tensors(f"{module}.weight", config)
        for index, name in enumerate(place.names):
            theirs = name.removesuffix(".weight")
            if layout == "paddlenlp":
                theirs = re.sub(r"^model\.", str(prefix), theirs)
            pair = FactorPair(theirs, [], index if place.stacked else None, module == embedding)
            found.setdefault(theirs, pair).members.append((module, place))
    pairs: dict[str, list[FactorPair]] = {}
    for pair in found.values():
        for module, _ in pair.members:
            pairs.setdefault(module, []).append(pair)
    return pairs


def check_layout(adapters: Adapters, family: ModelFamily, config: Any) -> None:
    """Raise UserError if adapters of this kind on these modules cannot be saved."""
    method = adapters.config.method
    all_pairs = factor_pairs(adapters, family, config, "hf")
    for module, pairs in all_pairs.items():
        is_expert = family.shard_plan is not None and family.shard_plan.is_expert(f"{module}.weight")
        if is_expert and pairs[0].index is None:
            raise UserError(
                f"lora.target_modules: names {module}; experts of the {family.name} family are one tensor in files, "
                f"{pairs[0].module}, where adapters have no place: name other modules"
            )
    if method.stores_pair and not method.stored_vectors:
        return
    for pair in itertools.chain.from_iterable(all_pairs.values()):
        if not method.stores_pair and pair.num_parts > 1:
            raise UserError(
                f"lora.target_modules: names {pair.members[0][0]}, a part of {pair.module}, which is one matrix in "
                "files; there is no place for an adapter of this lora.method on a part: name others, or choose another "
                "method"
            )
        if len(pair.members) < pair.num_parts:
            raise UserError(
                f"lora.target_modules: of {pair.module}, which is one matrix in files, it names only "
                f"{', '.join(module for module, _ in pair.members)}; {method.name} has a length for each of its "
                "columns: name all parts or none"
            )


def factor_name(pair: FactorPair, factor: str, layout: Layout) -> str:
    module = pair.module
    if factor == MAGNITUDE:
        return f"base_model.model.{module}.lora_magnitude_vector"  # PEFT's name of it
    if pair.is_embedding:
        return f"base_model.model.{module}.{factor.replace('lora_', 'lora_embedding_')}"
    if layout == "hf":
        return f"base_model.model.{module}.{factor}.weight"
    return f"{module}.{factor}"


def structured_name(pair: FactorPair, kind: str) -> str:
    """Return the stored name of a parameter of an adapter without factors."""
    return f"base_model.model.{pair.module}.{kind}"


@dataclasses.dataclass(frozen=True)
class FullTensor:
    """A stored tensor of a parameter that is trained in full."""

    parameter: str
    """Our name of the parameter."""
    is_transposed: bool
    """True where its dims are stored in reverse order."""

    def stored(self, value: np.ndarray) -> np.ndarray:
        """Return the stored form of a value of the parameter, or the value of a stored one."""
        return value.T if self.is_transposed else value

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape[::-1] if self.is_transposed else shape)


def full_tensors(adapters: Adapters, family: ModelFamily, config: Any, layout: Layout) -> dict[str, FullTensor]:
    """Return the tensors of the parameters that are trained in full, by their stored names. Embedding and head of a
    tied model are two tensors with the same values, as PEFT stores them.

    Raises:
        UserError: the layout has no place for such parameters.
    """
    if layout == "paddlenlp" and adapters.full_parameters:
        raise UserError(
            f"{adapters.full_parameters[0]} was trained in full next to the adapters, which PaddleNLP's layout has no "
            "place for; merge"
        )
    names = family.names()
    found = {}
    for parameter in adapters.full_parameters:
        (stored,) = names.hf_tensors(parameter, config).names
        found[f"base_model.model.{stored}"] = FullTensor(parameter, names.is_linear(parameter))
        if parameter == EMBEDDING and is_tied(config):
            found[f"base_model.model.{OUTPUT}"] = FullTensor(parameter, is_transposed=False)
    return found


class SavedAdapters:
    """Factors in a directory written by `write_adapters`, by our names."""

    def __init__(self, directory: Path, adapters: Adapters, family: ModelFamily, config: Any, layout: Layout = "hf"):
        """Raises UserError when the directory has other adapters."""
        self._pairs = factor_pairs(adapters, family, config, layout)
        self._layout = layout
        self._files = TensorFiles(directory, STEMS[layout])
        self._rank = adapters.config.rank
        method = adapters.config.method
        self._full_tensors = full_tensors(adapters, family, config, layout)
        self._state = None if method.is_plain else TensorFiles(directory, STATE)
        stored = [pair for pairs in self._pairs.values() for pair in pairs]
        if not method.stores_pair:
            expected = {structured_name(pair, kind) for pair in stored for kind in self._kinds(pair)}
        else:
            kinds = [FIRST_FACTOR, SECOND_FACTOR, *method.stored_vectors]
            expected = {factor_name(pair, kind, layout) for pair in stored for kind in kinds}
        expected.update(self._full_tensors)
        differing = sorted(expected.symmetric_difference(self._files.names))
        if differing:
            raise UserError(f"{directory}: its adapters are those of other modules, such as {differing[0]}")
        if self._state is None:
            for pair in stored:
                self._check_rank(directory, pair)

    def _check_rank(self, directory: Path, pair: FactorPair) -> None:
        """Raise UserError if stored factors do not have the rank of their configuration."""
        expected = self._rank * len(pair.members)
        for factor, dim in ((FIRST_FACTOR, -1), (SECOND_FACTOR, 0)):
            name = factor_name(pair, factor, self._layout)
            shape = self._files.spec(name).shape
            found = None
            if len(shape) == 2:
                in_memory = shape[::-1] if self._layout == "hf" else shape
                found = in_memory[dim]
            if found != expected:
                raise UserError(
                    f"{directory}: {name!r} is {list(shape)}, not of rank {expected} as its configuration says"
                )

    def _kinds(self, pair: FactorPair) -> list[str]:
        """Return the last words of the names of an adapter's parameters in the state file."""
        assert self._state is not None
        module, _ = pair.members[0]
        names = [name.rpartition(".") for name in self._state.names]
        return [kind for owner, _, kind in names if owner == module]

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of a factor."""
        if self._state is not None:
            return self._state.spec(name)
        pairs = self._pairs[name.rpartition(".")[0]]
        stored, index = self._place(name, pairs[0], None)
        shape = tuple(part.stop - part.start for part in index)
        stack = () if pairs[0].index is None else (len(pairs),)
        return TensorSpec(name, stack + shape, self._files.spec(stored).dtype)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """Read a factor or a parameter that is trained in full, or a slice of it (one slice a dim)."""
        if self._state is not None and name in self._state.names:
            return self._state.read(name, index)
        for stored, tensor in self._full_tensors.items():
            if tensor.parameter == name:
                if tensor.is_transposed and index:
                    index = index[::-1]
                return tensor.stored(self._files.read(stored, index))
        return self._read_factor(name, index)

    def _read_factor(self, name: str, index: Sequence[slice] | None) -> np.ndarray:
        pairs = self._pairs[name.rpartition(".")[0]]
        if pairs[0].index is None:
            return self._read_matrix(name, pairs[0], index)
        chosen, inside = (pairs, None) if index is None else (pairs[index[0]], index[1:])
        return np.stack([self._read_matrix(name, pair, inside) for pair in chosen])

    def _read_matrix(self, name: str, pair: FactorPair, index: Sequence[slice] | None) -> np.ndarray:
        stored, place = self._place(name, pair, index)
        if self._layout == "hf":  # its matrices are [outputs, inputs]
            return self._files.read(stored, place[::-1]).T
        return self._files.read(stored, place)

    def _place(self, name: str, pair: FactorPair, index: Sequence[slice] | None) -> tuple[str, list[slice]]:
        """Return the stored tensor of a factor, and the slices of the factor in it, with the dims as in memory."""
        module, _, factor = name.rpartition(".")
        stored = factor_name(pair, factor, self._layout)
        shape = self._files.spec(stored).shape
        num_rows, num_columns = shape[::-1] if self._layout == "hf" else shape
        number, joined = next((i, joined) for i, (ours, joined) in enumerate(pair.members) if ours == module)
        if factor == FIRST_FACTOR:
            first = [0, number * self._rank]
            size = [num_rows, self._rank]
        else:
            start, stop, _ = joined.columns.indices(num_columns)
            first = [number * self._rank, start]
            size = [self._rank, stop - start]
        bounds = [s.indices(n)[:2] for s, n in zip(index or [slice(None)] * 2, size)]
        return stored, [slice(start + low, start + high) for start, (low, high) in zip(first, bounds)]


def open_adapters(directory: Path, family: ModelFamily, config: Any) -> tuple[Adapters, SavedAdapters, Any]:
    """Open the adapters of a model, in either layout.

    Returns:
        The adapters, their tensors, and the config of the model, with MTP layers if they have adapters.

    Raises:
        UserError: they are of a kind that `write_adapters` does not write, or of another model.
    """
    refuse_left_out(directory)
    present = next((name for name in config_names() if is_file(directory / name)), None)
    if present is not None and present not in CONFIGS:
        raise UserError(f"{directory / present}: adapters of this method have no other layout; merge them")
    layout: Layout = "hf" if is_file(directory / CONFIG_NAMES["hf"]) else "paddlenlp"
    data = read_adapter_config(directory / CONFIG_NAMES[layout])
    kind = data.get("peft_type") or "LORA"
    if kind != "LORA":
        raise UserError(f"{directory}: adapters of {kind} have no other layout; merge them")
    if on := [key for key in (*NOT_PLAIN, "rank_pattern", "alpha_pattern", "modules_to_save") if data.get(key)]:
        raise UserError(
            f"{directory / CONFIG_NAMES[layout]}: {', '.join(on)}: without a counterpart in another layout; merge them"
        )
    stored = set(TensorFiles(directory, STEMS[layout]).names)
    if has_mtp_layers(family, config, stored):
        config = dataclasses.replace(config, mtp=True)
    names = family.names()
    modules = [name.removesuffix(".weight") for name in names.parameter_names(config)]
    check_kinds(directory / CONFIG_NAMES[layout], data, {"r": ABOVE_ZERO, "lora_alpha": ABOVE_ZERO})
    base = read_base(directory)
    stabilised = "use_rslora" if layout == "hf" else "rslora"
    of_all_modules = Adapters(
        modules=modules,
        config=AdapterConfig(
            LORA,
            rank=data["r"],
            alpha=data["lora_alpha"],
            dropout=data.get("lora_dropout") or 0.0,
            rslora=bool(data.get(stabilised)),
        ),
        base=base or Base(data.get("base_model_name_or_path"), ""),
    )
    pairs = factor_pairs(of_all_modules, family, config, layout)
    here = [module for module, of in pairs.items() if factor_name(of[0], FIRST_FACTOR, layout) in stored]
    if not here:
        raise UserError(f"{directory}: has no adapters of a {family.name}")
    adapters = dataclasses.replace(of_all_modules, modules=here)
    return adapters, SavedAdapters(directory, adapters, family, config, layout), config
