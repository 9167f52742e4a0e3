"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685) and the model they were trained on, read as one model.

It reads directories of HF PEFT (`adapter_config.json`, `lora_A` [rank, inputs], `lora_B` [outputs, rank]) and of
PaddleNLP (`lora_config.json`, `lora_A` [inputs, rank], `lora_B` [rank, outputs]), as safetensors or as the
`lora_model_state.pdparams` of PaddleNLP, a pickle that is read without running it; so are PEFT's LoKr, and PaddleNLP's
(`lokr_config.json`, `lokr_model_state.pdparams`) and its VeRA (`vera.py`), and PEFT's stacks of experts
(`peft_stacks.py`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.adapter_base import CONFIGS, LOKR_OF_PADDLENLP, VERA_OF_PADDLENLP, stored_format
from llmsuite.checkpoint.adapter_config import read_adapter_config, value_for
from llmsuite.checkpoint.adapter_dir import LOKR, MORA, UNKNOWN
from llmsuite.checkpoint.beside import refuse_beside
from llmsuite.checkpoint.model_dir import ModelDirectory, has_further_layers, hf_name, with_further_layers
from llmsuite.checkpoint.model_writer import Arrangement
from llmsuite.checkpoint.parts import FLOATS, Part
from llmsuite.checkpoint.tensors import SUFFIX, TensorFiles, TensorSource, TensorSpec
from llmsuite.convert import structured, vera
from llmsuite.convert.pdparams import PickledTensors
from llmsuite.convert.peft_score import with_score_head
from llmsuite.convert.peft_stacks import ExpertsOfStacks
from llmsuite.convert.rounded import rounded_model
from llmsuite.errors import UserError
from llmsuite.models.head import EMBEDDING, SCORE, head_of, is_tied
from llmsuite.regular import is_file, listed

_STEMS = ("adapter_model", "lora_model_state", "peft_model", "model")
_PICKLES = "lora_model_state.pdparams", "lokr_model_state.pdparams", vera.PICKLE
_PART = re.compile(r"(.*)\.lora_(embedding_)?(A|B|AB|magnitude_vector)(?:\.default)?(\.weight|\.bias)?")
_LOKR_SCALE = ("alpha", "alpha"), ("rank", "r")
_SAVED = re.compile(r"\.modules_to_save(\.default)?|\.base_layer")
_WRAPPERS = ("", "base_model.model.", "model.")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of PEFT's `init_lora_weights` that take something off the base; it says true once that is put back."""


@dataclasses.dataclass(frozen=True)
class Factors:
    """The update of a matrix W [inputs, outputs]: `scale * first @ second`, with a mixer between them if there is one.

    With magnitudes m (DoRA, Liu et al. 2024, arXiv 2402.09353) the columns of W plus that get the lengths m.
    """

    first: str
    second: str
    scale: float
    by_rows: bool
    """Whether the factors are stored transposed, as HF does."""
    mixer: str | None = None
    magnitudes: str | None = None


class Adapted:
    """A model's tensors with the adapter added, in the base's own dtype.

    They have HF's names, as an adapter may belong to one expert of our stacked ones, or to GPT's q, k and v in one
    matrix. Matrices are [inputs, outputs].
    """

    def __init__(self, base: ModelDirectory, directory: Path, allow_pickle: bool):
        """Raises UserError for an adapter of another kind or model."""
        self._base, self._path = base, directory
        specs = [base.spec(name) for name in base.names]
        self._tensors = Arrangement(base.family, base.config, specs, as_in_memory=True)
        names = base.family.names()
        places = [names.hf_tensors(spec.name, base.config) for spec in specs]
        self._originals = {copy: place.names[0] for place in places for copy in place.copies}
        """The first name of each tensor that a file has twice or more, by the others."""
        self._turned = {copy for copy, name in self._originals.items() if names.is_linear(name) > names.is_linear(copy)}
        """Copies that lie as in the file, as nothing multiplies with them."""
        self._embedding = names.hf_tensors(EMBEDDING, base.config).names[0] if is_tied(base.config) else ""
        config_path = next((directory / name for name in CONFIGS if is_file(directory / name)), None)
        if config_path is None:
            raise UserError(f"{directory}: has neither {' nor '.join(CONFIGS)}")
        config = read_adapter_config(config_path)
        if config_path.name == VERA_OF_PADDLENLP:
            config = vera.as_lora(config_path, config)
        is_ours = config.get("peft_type") == MORA
        if on := [key for key in UNKNOWN if config.get(key) and not (is_ours and key == "use_mora")]:
            raise UserError(
                f"{config_path}: {', '.join(on)} is on; merged are LoRA, rsLoRA, mixers, DoRA, LoKr and llmsuite's MoRA"
            )
        if str(config.get("init_lora_weights", "")).startswith(_CHANGES_BASE):
            raise UserError(
                f"{config_path}: init_lora_weights is {config['init_lora_weights']!r}: these adapters belong to a base "
                "that PEFT has changed. Save them with path_initial_model_for_weight_conversion"
            )
        self._files = ExpertsOfStacks(directory, _open_files(directory, allow_pickle), self._shape)
        self._factors: dict[str, Factors] = {}
        self._biases: dict[str, tuple[str, float]] = {}
        self._structures: dict[str, dict[str, str]] = {}
        """Stored names of the parameters of each adapter that is no pair of factors, by their last words."""
        self._scales: dict[str, float] = {}
        """Their scales."""
        self._replaced: dict[str, str] = {}
        self._assign(config_path, config)

    def _assign(self, config_path: Path, config: Mapping[str, Any]) -> None:
        """Find the tensor of the base that each tensor of the adapter belongs to."""
        parts: dict[str, dict[str, tuple[str, bool]]] = {}
        unknown = []
        for name in self._files.names:
            Part(FLOATS).check(self._files.spec(name), self._path)
            if match := structured.PART.fullmatch(name):
                if (target := self._name(f"{match[1]}.weight")) is None:
                    unknown.append(name)
                else:
                    self._structures.setdefault(target, {})[match[2]] = name
                continue
            match = _PART.fullmatch(name)
            module = match[1] if match else _SAVED.sub("", name)
            target = self._name(f"{module}.weight" if match else module)
            if target is None:
                unknown.append(name)
            elif match:
                kind = "bias" if match[4] == ".bias" else match[3]
                parts.setdefault(target, {})[kind] = name, bool(match[2] or match[4])
            else:
                self._replaced[target] = name
        if is_tied(self._base.config):
            heads = [name for name in unknown if ".lm_head." in f".{name}"]
            self._check_tied(config, [*parts, *self._structures], heads)
            unknown = [name for name in unknown if name not in heads]
        self._check_copies([*parts, *self._structures, *self._replaced])
        if unknown:
            shown = ", ".join(unknown[:5])
            raise UserError(f"{self._path}: {len(unknown)} tensors belong to nothing in {self._base.path}: {shown}")
        for target, pair in parts.items():
            if not {"A", "B"} <= pair.keys():
                raise UserError(f"{self._path}: {next(iter(pair.values()))[0]!r} has no other half")
            self._factors[target] = self._checked(config_path, config, target, pair)
            if "bias" in pair:
                self._add_bias(target, pair["bias"][0])
        for target, name in self._replaced.items():
            found, wanted = self._replacement(target).shape, self.spec(target).shape
            if found != wanted:
                raise UserError(f"{self._path}: {name!r} is {list(found)}, the base's is {list(wanted)}")
        for target, kinds in self._structures.items():
            self._scales[target] = self._checked_structure(config_path, config, target, kinds)
        if not self._factors and not self._structures:
            raise UserError(f"{self._path}: has no lora_A and lora_B")

    def _name(self, name: str) -> str | None:
        """The tensor of the base that a name of the adapter belongs to."""
        plain = [name.removeprefix(wrapper) for wrapper in _WRAPPERS]
        found = [hf_name(self._base.family, self._base.config, n) for n in plain]
        return next((name for name in found if name in self._tensors), None)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """That of the tensor of the base that a name of the adapter belongs to."""
        found = self._name(name)
        return None if found is None else self.spec(found).shape

    def _check_tied(self, config: Mapping[str, Any], changed: Collection[str], heads: Sequence[str]) -> None:
        """Raise UserError for an adapter that changes the embedding or the head of a tied model, but not both alike: no
        tied model computes what it does.

        Args:
            config: of the adapter.
            changed: tensors of the base that the adapter adds to.
            heads: tensors of the adapter that belong to the head, which the base does not have.
        """
        whole = [name for name in heads if _SAVED.sub("", name).endswith("lm_head.weight")]
        added = [name for name in heads if name not in whole] + [name for name in changed if name == self._embedding]
        replacing = self._replaced.get(self._embedding)
        alone = [name for name in whole if not np.array_equal(self._files.read(name), self._embedded(replacing))]
        if replacing is not None and not whole and self._is_one_sided(config, replacing):
            alone.append(replacing)
        if added or alone:
            raise UserError(
                f"{self._path}: {(added or alone)[0]!r} is of the embedding or the head alone, and {self._base.path} "
                "has one matrix for both (tie_word_embeddings); give it a base with two"
                + (", or save it with ensure_weight_tying" if alone and not config.get("ensure_weight_tying") else "")
            )

    def _embedded(self, replacing: str | None) -> np.ndarray:
        """The embedding of a tied model, with the one that the adapter has in its place."""
        return self._base.read(EMBEDDING) if replacing is None else self._files.read(replacing)

    def _is_one_sided(self, config: Mapping[str, Any], name: str) -> bool:
        """Whether the embedding of an adapter is a copy that PEFT trained (modules_to_save) while the head stayed."""
        saved, module = config.get("modules_to_save") or [], _SAVED.sub("", name).removesuffix(".weight")
        named = saved if isinstance(saved, list) else [saved]
        is_copy = ".modules_to_save" in name or any(module.endswith(str(part)) for part in named)
        if not is_copy or config.get("ensure_weight_tying"):
            return False
        return not np.array_equal(self._files.read(name), self._base.read(EMBEDDING))

    def _check_copies(self, names: Iterable[str]) -> None:
        """Raise UserError for an adapter of what is a copy in the files: what it is a copy of would not change."""
        if copies := [name for name in names if name in self._originals]:
            raise UserError(
                f"{self._path}: has {copies[0]}, which is a copy of {self._originals[copies[0]]} in {self._base.path}, "
                "and no matrix of its own"
            )

    def _add_bias(self, target: str, name: str) -> None:
        bias = f"{target.removesuffix('.weight')}.bias"
        if bias not in self._tensors or self.spec(bias).shape != self._files.spec(name).shape:
            raise UserError(f"{self._path}: {name!r} is added to {bias}, which {self._base.path} does not have so")
        self._biases[bias] = name, self._factors[target].scale

    def _checked(
        self, config_path: Path, config: Mapping[str, Any], target: str, pair: Mapping[str, tuple[str, bool]]
    ) -> Factors:
        (first, by_rows), (second, _) = pair["A"], pair["B"]
        a, b = self._files.spec(first).shape, self._files.spec(second).shape
        if by_rows:
            a, b = a[::-1], b[::-1]
        wanted = self.spec(target).shape
        if len(a) != 2 or len(b) != 2 or (a[0], b[1]) != wanted or a[1] != b[0]:
            raise UserError(
                f"{self._path}: {first!r} and {second!r} are {list(a)} x {list(b)}; "
                f"{target} of the base is {list(wanted)}"
            )
        mixer, magnitudes = (pair.get(kind, (None,))[0] for kind in ("AB", "magnitude_vector"))
        for name, size in ((mixer, (a[1], a[1])), (magnitudes, (wanted[1],))):
            if name is not None and self._files.spec(name).shape != size:
                raise UserError(f"{self._path}: {name!r} is {list(self._files.spec(name).shape)}, not {list(size)}")
        for key, found in (("use_dora", magnitudes), ("lora_use_mixer", mixer)):
            if bool(config.get(key)) != (found is not None):
                raise UserError(f"{config_path}: {key} is {config.get(key)}, which the tensors of {target} are not")
        module = self._files.configured(first, target.removesuffix(".weight"))
        scale = _scale(config_path, config, module, a[1])
        return Factors(first, second, scale, by_rows, mixer, magnitudes)

    def _checked_structure(
        self, config_path: Path, config: Mapping[str, Any], target: str, kinds: Mapping[str, str]
    ) -> float:
        shape, found = self.spec(target).shape, {kind: self._files.spec(name).shape for kind, name in kinds.items()}
        if not structured.fits(found, shape):
            shown = ", ".join(f"{kinds[kind]!r} {list(of)}" for kind, of in found.items())
            raise UserError(f"{self._path}: {shown} fit no {target} of {list(shape)}, as the base has")
        if config_path.name == LOKR_OF_PADDLENLP:  # 0 is the rank, whatever its `scaling` says
            config = {"alpha": config.get("lokr_alpha") or config.get("lokr_dim"), "r": config.get("lokr_dim")}
        elif config.get("peft_type") != LOKR:  # MoRA has none
            return 1.0
        module = target.removesuffix(".weight")
        alpha, rank = (
            value_for(config_path, config, f"{key}_pattern", module, config.get(of)) for key, of in _LOKR_SCALE
        )
        for key, value in (("alpha", alpha), ("r", rank)):
            if not value:
                raise UserError(f"{config_path}: {key} is {value!r}; a number is needed")
        return float(alpha / rank)

    def pairs(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The factors of each matrix by its name, [inputs, rank] with the scale in it and [rank, outputs], float32.

        Raises:
            UserError: the adapter is more than such factors.
        """
        more = [*self._structures, *self._replaced, *self._biases]
        more += [target for target, f in self._factors.items() if f.mixer or f.magnitudes]
        if more:
            raise UserError(f"{self._path}: what it has of {more[0]} is no plain pair of factors; merge it instead")
        found = {}
        for target, of in self._factors.items():
            first, second = (self._files.read(name).astype("float32") for name in (of.first, of.second))
            first, second = (first.T, second.T) if of.by_rows else (first, second)
            found[target] = np.ascontiguousarray(first * np.float32(of.scale)), np.ascontiguousarray(second)
        return found

    def _replacement(self, target: str) -> np.ndarray:
        value = self._files.read(self._replaced[target])
        by_rows = is_file(self._path / CONFIGS[0])
        return value.T if by_rows and target in self._tensors.linears else value

    @property
    def added(self) -> TensorSource:
        """The adapter's own tensors."""
        return self._files

    # as a source of tensors

    @property
    def names(self) -> list[str]:
        return self._tensors.names

    @property
    def paths(self) -> list[Path]:
        configs = [self._path / name for name in CONFIGS if is_file(self._path / name)]
        return sorted([*self._base.files.paths, *self._files.paths, *configs])

    def spec(self, name: str) -> TensorSpec:
        spec = self._tensors.spec(name)
        return dataclasses.replace(spec, shape=spec.shape[::-1]) if name in self._turned else spec

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        if name in self._turned:
            return self.read(self._originals[name], index[::-1] if index else None).T
        name = self._originals.get(name, name)
        factors = self._factors.get(name)
        if factors is not None and factors.magnitudes is not None and index is not None:
            return self._updated(factors, name, [slice(None), index[1]])[index[0]]  # its columns have to be whole
        return self._updated(factors, name, index)

    def _updated(self, factors: Factors | None, name: str, index: Sequence[slice] | None) -> np.ndarray:
        dtype = self.spec(name).dtype
        if name in self._replaced:
            value = self._replacement(name).astype(dtype)
            value = value if index is None else value[tuple(index)]
        else:
            value = self._tensors.read(name, self._base.read, index)
        if name in self._biases:
            bias, scale = self._biases[name]
            return (value + scale * self._files.read(bias)[tuple(index or ())].astype("float32")).astype(dtype)
        if (kinds := self._structures.get(name)) is not None:
            read = {kind: self._files.read(stored) for kind, stored in kinds.items()}
            update = structured.update(read, self.spec(name).shape, self._scales[name])
            return (value.astype("float32") + update[tuple(index or ())]).astype(dtype)
        if factors is None:
            return value.astype(dtype, copy=False)
        first, second = (self._files.read(n).astype("float32") for n in (factors.first, factors.second))
        if factors.by_rows:
            first, second = first.T, second.T
        if factors.mixer is not None:
            first = first @ self._files.read(factors.mixer).astype("float32")
        if index is not None:
            first, second = first[index[0]], second[:, index[1]]
        result = value.astype("float32") + factors.scale * (first @ second)
        if factors.magnitudes is not None:
            lengths = self._files.read(factors.magnitudes).astype("float32")
            result *= (lengths if index is None else lengths[index[1]]) / np.linalg.norm(result, axis=0)
        return result.astype(dtype)


def add_adapter(base: ModelDirectory, directory: Path, allow_pickle: bool = False) -> ModelDirectory:
    """The base with an adapter added to it.

    Raises:
        UserError: the adapter belongs to another model: a tensor of it has no counterpart there, or does not fit. Or
            it is none: interventions, or prefixes.
    """
    refuse_beside(directory)
    files = _open_files(directory, allow_pickle)
    if head_of(base.config) != "score" and any(name.endswith(f".{SCORE}") for name in files.names):
        base = with_score_head(base)
    format, trained_on = stored_format(directory), base
    if base.carried and has_further_layers(base.family, base.config, files.names):
        trained_on = with_further_layers(base)
    if format is not None:
        trained_on = rounded_model(trained_on, format)
    names = base.family.names()
    tensors = {name: names.hf_tensors(name, base.config) for name in base.names}
    files = Adapted(trained_on, directory, allow_pickle)
    return dataclasses.replace(
        base, layout="hf", tensors=tensors, files=files, linears_transposed=False, adapter=directory
    )


def _open_files(directory: Path, allow_pickle: bool) -> TensorSource:
    stem = next((s for s in _STEMS if any(is_file(directory / f"{s}{SUFFIX}{e}") for e in ("", ".index.json"))), "")
    if stem:
        return TensorFiles(directory, stem, check=True)
    pickle = next((path for name in _PICKLES if is_file(path := directory / name)), None)
    if pickle is None:
        if of_ranks := [path.name for path in listed(directory, "lora_model_state.*.pdparams")]:
            raise UserError(f"{directory}: {', '.join(of_ranks)} are parts of ranks; let PaddleNLP merge them first")
        raise UserError(f"{directory}: has none of {', '.join([*(s + SUFFIX for s in _STEMS), *_PICKLES])}")
    if not allow_pickle:
        raise UserError(
            f"{pickle}: is a pickle. With --allow-pickle it is read by a reader that runs nothing and "
            "refuses what is no tensor"
        )
    files = PickledTensors([pickle])
    return vera.VeraAsLora(pickle, files) if pickle.name == vera.PICKLE else files


def _scale(config_path: Path, config: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / rank, or with rank stabilisation (Kalajdzievski 2023, arXiv 2312.03732) alpha / sqrt(rank)."""
    alpha = value_for(config_path, config, "alpha_pattern", module, config.get("lora_alpha"))
    announced = value_for(config_path, config, "rank_pattern", module, config.get("r"))
    if alpha is None:
        raise UserError(f"{config_path}: lora_alpha is {alpha!r}; a number is needed")
    if announced != rank:
        raise UserError(f"{config_path}: gives {module} rank {announced}, its factors have rank {rank}")
    stabilised = config.get("use_rslora") or config.get("rslora")
    return alpha / (math.sqrt(rank) if stabilised else rank)
