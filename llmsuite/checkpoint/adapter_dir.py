"""A directory of LoRA adapters, in the layout of HF PEFT or PaddleNLP, and the model that they belong to.

    adapter_config.json, adapter_model.safetensors        the layout of HF PEFT, in which a run saves them
    lora_config.json, peft_model-*.safetensors + index    the layout of PaddleNLP; what it saves of others is only read
    base.json                                             path and sha256 of the model they were trained on, and how
                                                          its matrices were stored, if quantised
    adapter_state.safetensors                             of all but plain ones, what goes on being trained

Inside llmsuite the factors of a matrix [I, O] are A [I, R] and B [R, O], as PaddleNLP has them; PEFT has them
transposed. `adapter_base.py` has the model, `adapter_writer.py` writes such a directory.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.adapter_base import CONFIGS, Base, read_base
from llmsuite.checkpoint.adapter_config import read_adapter_config
from llmsuite.checkpoint.model_dir import Layout, has_further_layers
from llmsuite.checkpoint.tensors import TensorFiles, TensorSpec
from llmsuite.errors import UserError
from llmsuite.models.shard_plan import FIRST_FACTOR, MAGNITUDE, SECOND_FACTOR
from llmsuite.regular import is_file
from llmsuite.specs import ModelFamily
from llmsuite.strict_json import ABOVE_ZERO, check_kinds

UNKNOWN = (
    *("use_mora", "do_qat", "pissa", "loraga", "loftq_config", "megatron_config"),
    *("layer_replication", "use_qalora", "alora_invocation_tokens", "arrow_config"),
    "kasa_config",
)
"""Keys of the configuration that change the sum W + scale * A B, or its W, and are not implemented here."""
NOT_PLAIN = (*UNKNOWN, "use_dora", "lora_use_mixer", "lora_bias", "target_parameters")
"""Those that no other layout has, too."""
MORA, LOKR = "MORA", "LOKR"
"""What `peft_type` says of adapters of MoRA, of which PEFT has none, and of LoKr."""
CONFIG_NAMES: Mapping[Layout, str] = dict(zip(("hf", "paddlenlp"), CONFIGS))
STATE = "adapter_state"
"""Stem of the file with the parameters of adapters that are not plain, by our names."""
STEMS: Mapping[Layout, str] = {"hf": "adapter_model", "paddlenlp": "peft_model"}


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of a model, without their values."""

    modules: Sequence[str]
    """Our names of the matrices that have one."""
    config: Any
    """Rank and scale: a `paddlenlp.peft.LoRAConfig`."""
    base: Base
    beside: Sequence[str] = ()
    """Our names of parameters that are trained whole beside them: the score head of a reward model."""

    @property
    def is_plain(self) -> bool:
        """Whether they are factors A and B, and nothing else."""
        config = self.config
        special = self.has_magnitudes, self.is_structured, self.is_vera, self.has_start
        return not (config.lora_use_mixer or any(special))

    @property
    def has_start(self) -> bool:
        """Whether what they began with is taken off, as with PiSSA and LoRA-GA."""
        return bool(self.config.pissa or self.config.loraga)

    @property
    def is_vera(self) -> bool:
        """Whether they are those of VeRA."""
        return bool(getattr(self.config, "use_vera", False))

    @property
    def is_structured(self) -> bool:
        """Whether they are no factors of a product; their parameters are in files as they are."""
        return bool(self.config.use_mora) or self.is_lokr

    @property
    def is_lokr(self) -> bool:
        """Whether they are those of LoKr."""
        return bool(getattr(self.config, "use_lokr", False))

    @property
    def has_magnitudes(self) -> bool:
        """Whether they are those of DoRA."""
        return bool(getattr(self.config, "use_dora", False))


@dataclasses.dataclass(frozen=True)
class FactorPair:
    """The two factors, as stored, of one or more of our matrices.

    HF keeps q, k and v of a GPT in one matrix. Their factors lie side by side in one A, and as blocks on the diagonal
    of one B: a pair whose rank is the sum of theirs, and whose product is the same. Of routed experts it has a matrix
    each, where we have a stack, so there is a pair for each.
    """

    module: str
    """Name of the matrix in the layout."""
    members: list[tuple[str, int]]
    """Our names of the matrices in it, and which part of its outputs each is."""
    num_parts: int
    index: int | None = None
    """Which matrix of a stack it is; None for others."""
    is_embedding: bool = False
    """Whether it is the embedding, whose factors have names of their own in PEFT."""


def factor_pairs(adapters: Adapters, family: ModelFamily, config: Any, layout: Layout) -> dict[str, list[FactorPair]]:
    """The pair that each module is in, or those of a stack's matrices, by our name of the module."""
    names, prefix = family.names(), family.names().paddlenlp_prefix(config)
    if layout == "paddlenlp" and prefix is None:
        raise UserError(
            f"a {config.to_hf()['model_type']} has no PaddleNLP layout that we know; its adapters are PEFT's"
        )
    found: dict[str, FactorPair] = {}
    embedding = None if family.shard_plan is None else family.shard_plan.embedding
    for module in adapters.modules:
        place = names.hf_tensors(f"{module}.weight", config)
        for index, name in enumerate(place.names):
            theirs = name.removesuffix(".weight")
            if layout == "paddlenlp":
                theirs = re.sub(r"^model\.", str(prefix), theirs)
            pair = FactorPair(theirs, [], place.num_parts, index if place.stacked else None, module == embedding)
            found.setdefault(theirs, pair).members.append((module, place.part))
    pairs: dict[str, list[FactorPair]] = {}
    for pair in found.values():
        for module, _ in pair.members:
            pairs.setdefault(module, []).append(pair)
    return pairs


def check_layout(adapters: Adapters, family: ModelFamily, config: Any) -> None:
    """Raises UserError when adapters of this kind on these modules cannot be saved."""
    if not adapters.has_magnitudes and not adapters.is_structured:
        return
    for pair in itertools.chain.from_iterable(factor_pairs(adapters, family, config, "hf").values()):
        if adapters.is_structured and pair.num_parts > 1:
            raise UserError(
                f"lora.target_modules: names {pair.members[0][0]}, a part of {pair.module}, which is one matrix in "
                "files; there is no place for an adapter of this lora.method on a part: name others, or choose another "
                "method"
            )
        if len(pair.members) < pair.num_parts:
            raise UserError(
                f"lora.target_modules: of {pair.module}, which is one matrix in files, it names only "
                f"{', '.join(module for module, _ in pair.members)}; DoRA has a length for each of its columns: name "
                "all parts or none"
            )


def stored_factor(pair: FactorPair, factor: str, layout: Layout) -> str:
    module = pair.module
    if factor == MAGNITUDE:
        return f"base_model.model.{module}.lora_magnitude_vector"
    if pair.is_embedding:
        return f"base_model.model.{module}.{factor.replace('lora_', 'lora_embedding_')}"
    return f"base_model.model.{module}.{factor}.weight" if layout == "hf" else f"{module}.{factor}"


def stored_structure(pair: FactorPair, kind: str) -> str:
    """Name in a file of a parameter of an adapter that is no pair of factors."""
    return f"base_model.model.{pair.module}.{kind}"


def stored_parameter(parameter: str, layout: Layout) -> str:
    if layout == "paddlenlp":
        raise UserError(
            f"{parameter} was trained beside the adapters, which PaddleNLP's layout has no place for; merge"
        )
    return f"base_model.model.{parameter}"


class SavedAdapters:
    """The factors in a directory written by `write_adapters`, by our names."""

    def __init__(self, directory: Path, adapters: Adapters, family: ModelFamily, config: Any, layout: Layout = "hf"):
        """Raises UserError when the directory has other adapters."""
        self._pairs, self._layout = factor_pairs(adapters, family, config, layout), layout
        self._files, self._rank = TensorFiles(directory, STEMS[layout]), adapters.config.r
        self._beside = set(adapters.beside)
        self._state = None if adapters.is_plain else TensorFiles(directory, STATE)
        stored = [pair for pairs in self._pairs.values() for pair in pairs]
        if adapters.is_structured and self._state is not None:
            wanted = {stored_structure(pair, kind) for pair in stored for kind in self._kinds(pair)}
        else:
            kinds = [FIRST_FACTOR, SECOND_FACTOR] + [MAGNITUDE] * adapters.has_magnitudes
            wanted = {stored_factor(pair, kind, layout) for pair in stored for kind in kinds}
        wanted.update(stored_parameter(name, layout) for name in adapters.beside)
        if differing := sorted(wanted.symmetric_difference(self._files.names)):
            raise UserError(f"{directory}: its adapters are those of other modules, such as {differing[0]}")
        if self._state is None:
            for pair in stored:
                self._check_rank(directory, pair)

    def _check_rank(self, directory: Path, pair: FactorPair) -> None:
        """Raises UserError when factors as they are stored have not the rank that their configuration says."""
        wanted = self._rank * len(pair.members)
        for factor, at in ((FIRST_FACTOR, -1), (SECOND_FACTOR, 0)):
            name = stored_factor(pair, factor, self._layout)
            shape = self._files.spec(name).shape
            found = (shape[::-1] if self._layout == "hf" else shape)[at] if len(shape) == 2 else None
            if found != wanted:
                raise UserError(
                    f"{directory}: {name!r} is {list(shape)}, not of rank {wanted} as its configuration says"
                )

    def _kinds(self, pair: FactorPair) -> list[str]:
        """The parameters of an adapter in the file of the state, by their last words."""
        assert self._state is not None
        (module, _), names = pair.members[0], [name.rpartition(".") for name in self._state.names]
        return [kind for owner, _, kind in names if owner == module]

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of a factor."""
        if self._state is not None:
            return self._state.spec(name)
        pairs = self._pairs[name.rpartition(".")[0]]
        stored, index = self._place(name, pairs[0], None)
        shape = tuple(part.stop - part.start for part in index)
        stack = () if pairs[0].index is None else (len(pairs),)
        return TensorSpec(name, stack + shape, self._files.spec(stored).dtype)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """A factor or a parameter trained beside them, or a slice of it (one slice a dim)."""
        if self._state is not None and name in self._state.names:
            return self._state.read(name, index)
        if name not in self._beside:
            return self._read_factor(name, index)
        return self._files.read(stored_parameter(name, self._layout), index[::-1] if index else None).T

    def _read_factor(self, name: str, index: Sequence[slice] | None) -> np.ndarray:
        pairs = self._pairs[name.rpartition(".")[0]]
        if pairs[0].index is None:
            return self._read_matrix(name, pairs[0], index)
        chosen, inside = (pairs, None) if index is None else (pairs[index[0]], index[1:])
        return np.stack([self._read_matrix(name, pair, inside) for pair in chosen])

    def _read_matrix(self, name: str, pair: FactorPair, index: Sequence[slice] | None) -> np.ndarray:
        stored, place = self._place(name, pair, index)
        value = self._files.read(stored, place[::-1] if self._layout == "hf" else place)
        return value.T if self._layout == "hf" else value

    def _place(self, name: str, pair: FactorPair, index: Sequence[slice] | None) -> tuple[str, list[slice]]:
        """The stored tensor that holds a factor, and its place in there, with the dims as in memory."""
        module, _, factor = name.rpartition(".")
        stored = stored_factor(pair, factor, self._layout)
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


def open_adapters(directory: Path, family: ModelFamily, config: Any) -> tuple[Adapters, SavedAdapters, Any]:
    """Open the adapters of a model, in either layout; and its config, with the layers that they are for.

    Raises:
        UserError: they are of a kind that `write_adapters` does not write, or of another model.
    """
    from llmsuite.models.peft_configs import lora_config  # takes paddlenlp, which other runs do without

    present = [name for name in CONFIGS if is_file(directory / name)]
    if present and (other := present[0]) in CONFIGS[2:]:
        raise UserError(f"{directory / other}: adapters of this method are not to be had in another layout; merge it")
    layout: Layout = "hf" if is_file(directory / CONFIG_NAMES["hf"]) else "paddlenlp"
    data = read_adapter_config(directory / CONFIG_NAMES[layout])
    if (kind := data.get("peft_type") or "LORA") != "LORA":
        raise UserError(f"{directory}: adapters of {kind} are not to be had in another layout; merge them")
    if on := [key for key in (*NOT_PLAIN, "rank_pattern", "alpha_pattern", "modules_to_save") if data.get(key)]:
        raise UserError(
            f"{directory / CONFIG_NAMES[layout]}: {', '.join(on)}: not to be had in another layout; merge it"
        )
    stored = set(TensorFiles(directory, STEMS[layout]).names)
    if has_further_layers(family, config, stored):
        config = dataclasses.replace(config, mtp=True)
    names = family.names()
    modules = [name.removesuffix(".weight") for name in names.parameter_names(config)]
    check_kinds(directory / CONFIG_NAMES[layout], data, {"r": ABOVE_ZERO, "lora_alpha": ABOVE_ZERO})
    base, stabilised = read_base(directory), "use_rslora" if layout == "hf" else "rslora"
    whole = Adapters(
        modules=modules,
        config=lora_config(
            r=data["r"],
            lora_alpha=data["lora_alpha"],
            lora_dropout=data.get("lora_dropout") or 0.0,
            rslora=bool(data.get(stabilised)),
        ),
        base=base or Base(data.get("base_model_name_or_path"), ""),
    )
    pairs = factor_pairs(whole, family, config, layout)
    here = [module for module, of in pairs.items() if stored_factor(of[0], FIRST_FACTOR, layout) in stored]
    if not here:
        raise UserError(f"{directory}: has no adapters of a {family.name}")
    adapters = dataclasses.replace(whole, modules=here)
    return adapters, SavedAdapters(directory, adapters, family, config, layout), config
