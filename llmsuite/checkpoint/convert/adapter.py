"""Adapters such as LoRA (Hu et al. 2021, arXiv 2106.09685), read together with their base model as one merged model.

It reads directories of HF PEFT (`adapter_config.json`, `lora_A` [rank, inputs], `lora_B` [outputs, rank]) and of
PaddleNLP (`lora_config.json`, `lora_A` [inputs, rank], `lora_B` [rank, outputs]), as safetensors or as the
`lora_model_state.pdparams` of PaddleNLP, a pickle that is read without running it; so are the files of other methods,
which `AdapterMethod` describes (`paddlenlp_methods.py`), and PEFT's stacks of experts (`peft_stacks.py`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.adapters.lora import FIRST_FACTOR, LORA, SECOND_FACTOR
from llmsuite.adapters.methods import METHODS, own_files
from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import is_file, listed
from llmsuite.base.strict_json import check_kinds
from llmsuite.checkpoint.adapter_base import CONFIGS, config_names, refuse_left_out, stored_format
from llmsuite.checkpoint.adapter_config import read_adapter_config, value_for
from llmsuite.checkpoint.adapter_dir import UNSUPPORTED_KEYS
from llmsuite.checkpoint.convert.dequantised import dequantised_model
from llmsuite.checkpoint.convert.paddlenlp_methods import FoldedTensors
from llmsuite.checkpoint.convert.pdparams import PickledTensors
from llmsuite.checkpoint.convert.peft_score import with_score_head
from llmsuite.checkpoint.convert.peft_stacks import ExpertsOfStacks
from llmsuite.checkpoint.convert.resized import with_vocabulary
from llmsuite.checkpoint.expected_tensor import FLOATS, ExpectedTensor
from llmsuite.checkpoint.model_dir import ModelDirectory, has_mtp_layers, hf_name, with_mtp_layers
from llmsuite.checkpoint.model_writer import TensorLayout
from llmsuite.checkpoint.side_adapters import refuse_side_adapter
from llmsuite.checkpoint.tensors import SUFFIX, TensorFiles, TensorSource, TensorSpec, sliced
from llmsuite.models.adapter_method import AdapterMethod, AdapterParameter
from llmsuite.models.head import EMBEDDING, OUTPUT, SCORE, head_of, is_tied
from llmsuite.models.protocols import HasVocabulary

_STEMS = ("adapter_model", "lora_model_state", "peft_model", "model")
_PICKLE = "lora_model_state.pdparams"
_SAVED = re.compile(r"\.modules_to_save(\.default)?|\.base_layer")
_PLAIN = re.compile(r"[\w.]+")
_MAX_SHOWN_CHARS = 100
"""Characters of a value or a name of a file, in a message."""
_WRAPPERS = ("", "base_model.model.", "model.")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of PEFT's `init_lora_weights` that change the base; PEFT writes `true` once the change is converted back."""


@dataclasses.dataclass(frozen=True)
class StoredAdapter:
    """The adapter of a matrix W [inputs, outputs] in files."""

    method: AdapterMethod
    names: Mapping[str, str]
    """Stored names of its parameters, by kind."""
    scale: float
    by_rows: bool = False
    """True where the factors are stored transposed, as in HF's files."""


class AdaptedTensors:
    """A model's tensors with the adapter added, in the base's own dtype.

    They have HF's names, as an adapter may belong to one expert of our stacked experts, or to GPT's fused q, k and v.
    Matrices are [inputs, outputs].
    """

    def __init__(self, base: ModelDirectory, directory: Path, allow_pickle: bool):
        """Open an adapter. Raises UserError for one of another kind or model."""
        refuse_left_out(directory)
        self._base = base
        self._path = directory
        specs = [base.spec(name) for name in base.names]
        self._tensors = TensorLayout(base.family, base.config, specs, as_in_memory=True)
        names = base.family.names()
        places = [names.hf_tensors(spec.name, base.config) for spec in specs]
        self._originals = {copy: place.names[0] for place in places for copy in place.copies}
        """For each copy of a tensor in the files, the name of the first one."""
        self._transposed_copies = {
            copy for copy, name in self._originals.items() if names.is_linear(name) > names.is_linear(copy)
        }
        """Copies that are not transposed in memory, in contrast to the tensor that they are a copy of."""
        self._embedding = names.hf_tensors(EMBEDDING, base.config).names[0] if is_tied(base.config) else ""
        config_path = next((directory / name for name in config_names() if is_file(directory / name)), None)
        if config_path is None:
            raise UserError(f"{directory}: has neither {' nor '.join(config_names())}")
        config = _read_config(config_path)
        # PaddleNLP's adapters with the flag of one of our own methods that store no pair have another form
        ours = {
            method.flag
            for method in METHODS.values()
            if method.stores_pair or method.type_in_files() == config.get("peft_type")
        }
        if on := [key for key in UNSUPPORTED_KEYS if config.get(key) and key not in ours]:
            raise UserError(
                f"{config_path}: {', '.join(on)} is on; only LoRA, rsLoRA, mixers, DoRA, LoKr and llmsuite's MoRA can "
                "be merged"
            )
        kind = config.get("peft_type") or "LORA"
        kinds = sorted({"LORA", *(method.type_in_files() for method in METHODS.values())})
        if kind not in kinds:
            raise UserError(
                f"{config_path}: peft_type is {kind[:_MAX_SHOWN_CHARS]!r}; these are read: {', '.join(kinds)}"
            )
        if str(config.get("init_lora_weights", "")).startswith(_CHANGES_BASE):
            raise UserError(
                f"{config_path}: init_lora_weights is {config['init_lora_weights']!r}: these adapters belong to a base "
                "that PEFT has changed. Save them with path_initial_model_for_weight_conversion"
            )
        self._files = ExpertsOfStacks(directory, _open_files(directory, allow_pickle), self._shape)
        self._adapters: dict[str, StoredAdapter] = {}
        self._biases: dict[str, tuple[str, float]] = {}
        self._replaced: dict[str, str] = {}
        self._assign(config_path, config)
        _check_targets(config_path, config, _trained_names(self._files))

    def _assign(self, config_path: Path, config: Mapping[str, Any]) -> None:
        """Find the tensor of the base that each tensor of the adapter belongs to."""
        parts: dict[str, dict[str, tuple[str, bool]]] = {}
        own: dict[str, dict[str, str]] = {}
        """For each target of an adapter that is no pair of factors, the stored names of its parameters by kind."""
        part = _part_pattern()
        own_part = own_part_pattern()
        unknown = []
        for name in _trained_names(self._files):
            ExpectedTensor(FLOATS).check(self._files.spec(name), self._path)
            if match := own_part.fullmatch(name):
                target = self._name(f"{match[1]}.weight")
                if target is None:
                    unknown.append(name)
                else:
                    own.setdefault(target, {})[match[2]] = name
                continue
            match = part.fullmatch(name)
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
            self._check_tied(config, [*parts, *own], heads)
            unknown = [name for name in unknown if name not in heads]
        self._check_copies([*parts, *own, *self._replaced])
        if unknown:
            shown = ", ".join(name[:_MAX_SHOWN_CHARS] for name in unknown[:5])
            raise UserError(f"{self._path}: {len(unknown)} tensors match no tensor of {self._base.path}: {shown}")
        for target, pair in parts.items():
            if not {"A", "B"} <= pair.keys():
                raise UserError(f"{self._path}: {next(iter(pair.values()))[0]!r} lacks the other factor")
            self._adapters[target] = self._checked_pair(config_path, config, target, pair)
            if "bias" in pair:
                self._add_bias(target, pair["bias"][0])
        for target, name in self._replaced.items():
            found = self._replacement(target).shape
            expected = self.spec(target).shape
            if found != expected:
                raise UserError(f"{self._path}: {name!r} is {list(found)}, the base's is {list(expected)}")
        for target, kinds in own.items():
            self._adapters[target] = self._checked_own(config_path, config, target, kinds)
        if not self._adapters:
            raise UserError(f"{self._path}: has no lora_A and lora_B")

    def _name(self, name: str) -> str | None:
        """The tensor of the base that a name of the adapter belongs to."""
        plain = [name.removeprefix(wrapper) for wrapper in _WRAPPERS]
        found = [hf_name(self._base.family, self._base.config, n) for n in plain]
        return next((name for name in found if name in self._tensors), None)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of the tensor of the base that a name of the adapter belongs to."""
        found = self._name(name)
        if found is None:
            return None
        return self.spec(found).shape

    def _check_tied(self, config: Mapping[str, Any], changed: Collection[str], heads: Sequence[str]) -> None:
        """Raise UserError for an adapter that changes the embedding or the head of a tied model, but not both equally:
        a tied model cannot represent that.

        Args:
            config: of the adapter.
            changed: tensors of the base that the adapter adds to.
            heads: tensors of the adapter that belong to the head, which the base does not have.
        """
        full_heads = [name for name in heads if _SAVED.sub("", name).endswith("lm_head.weight")]
        added = [name for name in heads if name not in full_heads]
        added += [name for name in changed if name == self._embedding]
        replacing = self._replaced.get(self._embedding)
        untied = [name for name in full_heads if not np.array_equal(self._files.read(name), self._embedded(replacing))]
        if replacing is not None and not full_heads and self._is_one_sided(config, replacing):
            untied.append(replacing)
        if added or untied:
            hint = ""
            if untied and not config.get("ensure_weight_tying"):
                hint = ", or save it with ensure_weight_tying"
            raise UserError(
                f"{self._path}: {(added or untied)[0]!r} changes only the embedding or only the head, and "
                f"{self._base.path} has one matrix for both (tie_word_embeddings); use a base with two{hint}"
            )

    def _embedded(self, replacing: str | None) -> np.ndarray:
        """The embedding of a tied model, or the adapter's replacement of it."""
        if replacing is None:
            return self._base.read(EMBEDDING)
        return self._files.read(replacing)

    def _is_one_sided(self, config: Mapping[str, Any], name: str) -> bool:
        """True where the embedding of an adapter is a copy that PEFT trained (modules_to_save) while the head was
        frozen."""
        saved = config.get("modules_to_save") or []
        module = _SAVED.sub("", name).removesuffix(".weight")
        named = saved if isinstance(saved, list) else [saved]
        is_copy = ".modules_to_save" in name or any(module.endswith(str(part)) for part in named)
        # PEFT does not tie embeddings with other names, such as GPT's wte
        is_tied_by_peft = config.get("ensure_weight_tying") and module.endswith((".embed_tokens", ".lm_head"))
        if not is_copy or is_tied_by_peft:
            return False
        return not np.array_equal(self._files.read(name), self._base.read(EMBEDDING))

    def _check_copies(self, names: Iterable[str]) -> None:
        """Raise UserError for an adapter of a tensor that is a copy of another one, which would not change."""
        if copies := [name for name in names if name in self._originals]:
            raise UserError(
                f"{self._path}: has {copies[0]}, which is only a copy of {self._originals[copies[0]]} in "
                f"{self._base.path}"
            )

    def _add_bias(self, target: str, name: str) -> None:
        bias = f"{target.removesuffix('.weight')}.bias"
        if bias not in self._tensors or self.spec(bias).shape != self._files.spec(name).shape:
            raise UserError(f"{self._path}: {name!r} is added to {bias}, which {self._base.path} lacks in this shape")
        self._biases[bias] = name, self._adapters[target].scale

    def _checked_pair(
        self, config_path: Path, config: Mapping[str, Any], target: str, pair: Mapping[str, tuple[str, bool]]
    ) -> StoredAdapter:
        first, by_rows = pair["A"]
        second, _ = pair["B"]
        a = self._files.spec(first).shape
        b = self._files.spec(second).shape
        if by_rows:
            a = a[::-1]
            b = b[::-1]
        expected = self.spec(target).shape
        if len(a) != 2 or len(b) != 2 or (a[0], b[1]) != expected or a[1] != b[0]:
            raise UserError(
                f"{self._path}: {first!r} and {second!r} are {list(a)} x {list(b)}; "
                f"{target} of the base is {list(expected)}"
            )
        kinds = _part_kinds()
        names = {kinds[part]: name for part, (name, _) in pair.items() if part in kinds}
        methods = [method for method in METHODS.values() if method.stores_pair and method.flag]
        method = next((m for m in methods if m.parameters.keys() == names.keys()), LORA)
        for kind, size in method.shapes(a[1], *expected).items():
            if kind not in (FIRST_FACTOR, SECOND_FACTOR) and self._files.spec(names[kind]).shape != size:
                found = self._files.spec(names[kind]).shape
                raise UserError(f"{self._path}: {names[kind]!r} is {list(found)}, not {list(size)}")
        for other in methods:
            if bool(config.get(other.flag)) != (other is method):
                raise UserError(
                    f"{config_path}: {other.flag} is {config.get(other.flag)}, which contradicts the tensors of "
                    f"{target}"
                )
        module = self._files.configured(first, target.removesuffix(".weight"))
        scale = _scale(config_path, config, module, a[1])
        return StoredAdapter(method, names, scale, by_rows)

    def _checked_own(
        self, config_path: Path, config: Mapping[str, Any], target: str, kinds: Mapping[str, str]
    ) -> StoredAdapter:
        shape = self.spec(target).shape
        found = {kind: self._files.spec(name).shape for kind, name in kinds.items()}
        method = next(
            method
            for method in METHODS.values()
            if not method.stores_pair and not found.keys().isdisjoint(method.stored_kinds or method.parameters)
        )
        if not found.keys() <= {*method.parameters, *method.stored_kinds} or not method.fits(
            found, shape, config.get("r")
        ):
            shown = ", ".join(f"{kinds[kind]!r} {list(of)}" for kind, of in found.items())
            raise UserError(f"{self._path}: {shown} do not fit {target} of the base, {list(shape)}")
        return StoredAdapter(method, kinds, self._own_scale(config_path, config, method, target))

    def _own_scale(self, config_path: Path, config: Mapping[str, Any], method: AdapterMethod, target: str) -> float:
        if method.scale_keys is None:
            return 1.0
        module = target.removesuffix(".weight")
        alpha_key, rank_key = method.scale_keys
        alpha = value_for(config_path, config, "alpha_pattern", module, config.get(alpha_key))
        rank = value_for(config_path, config, "rank_pattern", module, config.get(rank_key))
        for key, value in (("alpha", alpha), ("r", rank)):
            if not value:
                raise UserError(f"{config_path}: {key} is {value!r}; a number is needed")
        return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))

    def pairs(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The factors of each matrix by its name, [inputs, rank] with the scale in it and [rank, outputs], float32.

        Raises:
            UserError: the adapter is more than such factors.
        """
        more = [*self._replaced, *self._biases]
        more += [target for target, adapter in self._adapters.items() if not adapter.method.is_plain]
        if more:
            raise UserError(f"{self._path}: its update of {more[0]} is no plain pair of factors; merge it instead")
        found = {}
        for target, adapter in self._adapters.items():
            parameters = self._parameters(adapter)
            first = parameters[FIRST_FACTOR] * np.float32(adapter.scale)
            found[target] = np.ascontiguousarray(first), np.ascontiguousarray(parameters[SECOND_FACTOR])
        return found

    def _parameters(self, adapter: StoredAdapter) -> dict[str, np.ndarray]:
        """The parameters of an adapter by kind, in float32, oriented as in memory."""
        found = {}
        for kind, name in adapter.names.items():
            value = self._files.read(name).astype("float32")
            found[kind] = value.T if adapter.by_rows and kind in (FIRST_FACTOR, SECOND_FACTOR) else value
        return found

    def _replacement(self, target: str) -> np.ndarray:
        value = self._files.read(self._replaced[target])
        by_rows = is_file(self._path / CONFIGS[0])
        if by_rows and target in self._tensors.linears:
            return value.T
        return value

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
        configs = [self._path / name for name in config_names() if is_file(self._path / name)]
        return sorted([*self._base.files.paths, *self._files.paths, *configs])

    def spec(self, name: str) -> TensorSpec:
        spec = self._tensors.spec(name)
        if name in self._transposed_copies:
            return dataclasses.replace(spec, shape=spec.shape[::-1])
        return spec

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        if name in self._transposed_copies:
            return self.read(self._originals[name], index[::-1] if index else None).T
        name = self._originals.get(name, name)
        return self._updated(self._adapters.get(name), name, index)

    def _updated(self, adapter: StoredAdapter | None, name: str, index: Sequence[slice] | None) -> np.ndarray:
        dtype = self.spec(name).dtype
        if adapter is None:
            return self._value(name, index, dtype)
        if index is None:
            index = [slice(None)] * 2
        # a method that needs full columns or rows gets them, and the merged matrix is sliced afterwards
        before = [index[dim] if dim in adapter.method.merges_slices else slice(None) for dim in range(2)]
        after = [slice(None) if dim in adapter.method.merges_slices else index[dim] for dim in range(2)]
        parameters = {
            kind: _sliced(value, adapter.method.parameters.get(kind), before)
            for kind, value in self._parameters(adapter).items()
        }
        weight = self._value(name, before, dtype).astype("float32")
        merged = adapter.method.merged(weight, parameters, adapter.scale)
        result: np.ndarray = merged[tuple(after)].astype(dtype)
        return result

    def _value(self, name: str, index: Sequence[slice] | None, dtype: str) -> np.ndarray:
        """A tensor of the base, or the adapter's replacement of it, with the adapter's bias added."""
        if name in self._replaced:
            value = sliced(self._replacement(name).astype(dtype), index)
        else:
            value = self._tensors.read(name, self._base.read, index)
        if name in self._biases:
            bias, scale = self._biases[name]
            return (value + scale * self._files.read(bias)[tuple(index or ())].astype("float32")).astype(dtype)
        return value.astype(dtype, copy=False)


def _check_targets(config_path: Path, config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise UserError where none of the adapted modules is one of `target_modules`: a library that goes by these would
    load nothing. Names only: patterns of PaddleNLP are not compared, nor parameters of PEFT's `target_parameters`."""
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not all(map(_PLAIN.fullmatch, targets)) or config.get("target_parameters"):
        return
    part = _part_pattern()
    own_part = own_part_pattern()
    matches = (part.fullmatch(name) or own_part.fullmatch(name) for name in names)
    modules = [match[1] for match in matches if match]
    ends = {module.rpartition(".")[2] for module in modules}
    whole = tuple(f".{target}" for target in targets)
    if targets and modules and not any(f".{module}".endswith(whole) for module in modules):
        shown = ", ".join(targets[:5])[:_MAX_SHOWN_CHARS]
        raise UserError(
            f"{config_path}: target_modules names {shown}, and the adapters in the files are of "
            f"{', '.join(sorted(ends)[:5])[:_MAX_SHOWN_CHARS]}; take the configuration that was saved with them"
        )


def _trained_names(files: TensorSource) -> list[str]:
    """Names of the tensors of an adapter, without the frozen values of modules that were trained in full: PEFT saves
    them too where the embedding was resized."""
    return [name for name in files.names if ".original_module." not in name]


def _sliced(value: np.ndarray, parameter: AdapterParameter | None, index: Sequence[slice]) -> np.ndarray:
    """A parameter of an adapter, cut with these slices of W [inputs, outputs]."""
    if parameter is not None and parameter.by_inputs is not None:
        value = value[(slice(None),) * parameter.by_inputs + (index[0],)]
    if parameter is not None and parameter.by_outputs is not None:
        value = value[(slice(None),) * parameter.by_outputs + (index[1],)]
    return value


def _read_config(path: Path) -> dict[str, Any]:
    """A configuration of adapters, with the keys of PEFT's adapter_config.json."""
    config = read_adapter_config(path)
    method = own_files().get(path.name)
    if method is None or method.paddlenlp is None:
        return config
    check_kinds(path, config, method.paddlenlp.key_types)
    return method.paddlenlp.peft_config(path, config)


def _part_kinds() -> dict[str, str]:
    """Kinds of the parameters that files have as `MODULE.lora_PART`, by their PART."""
    kinds = {"A": FIRST_FACTOR, "B": SECOND_FACTOR}
    for method in METHODS.values():
        kinds |= method.pair_parts
    return kinds


def _part_pattern() -> re.Pattern[str]:
    """A pattern of the names of these parameters, and of a bias next to them: their module, and their part."""
    parts = "|".join(map(re.escape, _part_kinds()))
    return re.compile(rf"(.*)\.lora_(embedding_)?({parts})(?:\.default)?(\.weight|\.bias)?")


def own_part_pattern() -> re.Pattern[str]:
    """A pattern of the names of parameters that files have by themselves, in no pair: their module, and their kind."""
    kinds = [kind for m in METHODS.values() if not m.stores_pair for kind in (m.stored_kinds or tuple(m.parameters))]
    return re.compile(rf"(.*)\.({'|'.join(map(re.escape, kinds))})(?:\.default)?")


def add_adapter(base: ModelDirectory, directory: Path, allow_pickle: bool = False) -> ModelDirectory:
    """The base with an adapter merged into it, in float32 before rounding to the base's dtype.

    Raises:
        UserError: the adapter belongs to another model: a tensor of it has no counterpart there, or does not fit. Or
            it is a side adapter: interventions, or prefixes.
    """
    refuse_side_adapter(directory)
    refuse_left_out(directory)
    files = _open_files(directory, allow_pickle)
    if head_of(base.config) != "score" and any(name.endswith(f".{SCORE}") for name in files.names):
        base = with_score_head(base)
    base = _with_rows_of(base, directory, files)
    format = stored_format(directory)
    trained_on = base
    if base.carried and has_mtp_layers(base.family, base.config, files.names):
        trained_on = with_mtp_layers(base)
    if format is not None:
        trained_on = dequantised_model(trained_on, format)
    names = base.family.names()
    tensors = {name: names.hf_tensors(name, base.config) for name in base.names}
    files = AdaptedTensors(trained_on, directory, allow_pickle)
    return dataclasses.replace(
        base, layout="hf", tensors=tensors, files=files, linears_transposed=False, adapter=directory
    )


def _with_rows_of(base: ModelDirectory, directory: Path, files: TensorSource) -> ModelDirectory:
    """The base with as many rows of embedding and head as an adapter has that was trained with new tokens.

    Raises:
        UserError: it has only one of them.
    """
    config = base.config
    if not isinstance(config, HasVocabulary):
        return base
    names = base.family.names()
    table = names.hf_tensors(EMBEDDING, config).names[0]
    saved = {_SAVED.sub("", name): name for name in files.names}
    found = next((saved[wrapper + table] for wrapper in _WRAPPERS if wrapper + table in saved), None)
    if found is None or len(files.spec(found).shape) != 2 or files.spec(found).shape[0] <= config.vocab_size:
        return base
    rows = files.spec(found).shape[0]
    if head_of(config) == "language_model" and not is_tied(config):
        head = names.hf_tensors(OUTPUT, config).names[0]
        heads = [saved[wrapper + head] for wrapper in _WRAPPERS if wrapper + head in saved]
        if not heads or files.spec(heads[0]).shape[:1] != (rows,):
            raise UserError(
                f"{directory}: its embedding has {rows} rows and that of {base.path} {config.vocab_size}, but it has "
                "no head with as many; save both with modules_to_save"
            )
    return with_vocabulary(base, rows)


def _open_files(directory: Path, allow_pickle: bool) -> TensorSource:
    for stem in _STEMS:
        if is_file(directory / f"{stem}{SUFFIX}") or is_file(directory / f"{stem}{SUFFIX}.index.json"):
            return TensorFiles(directory, stem, check=True)
    methods = {own.paddlenlp.tensors_name: own for own in own_files().values() if own.paddlenlp is not None}
    pickles = [_PICKLE, *methods]
    pickle = next((path for name in pickles if is_file(path := directory / name)), None)
    if pickle is None:
        if of_ranks := [path.name for path in listed(directory, "lora_model_state.*.pdparams")]:
            raise UserError(f"{directory}: {', '.join(of_ranks)} are parts of ranks; let PaddleNLP merge them first")
        raise UserError(f"{directory}: has none of {', '.join([*(s + SUFFIX for s in _STEMS), *pickles])}")
    if not allow_pickle:
        raise UserError(
            f"{pickle}: is a pickle. With --allow-pickle it is read by a reader that runs no code and refuses anything "
            "but tensors"
        )
    files = PickledTensors([pickle])
    method = methods.get(pickle.name)
    if method is None or not method.stores_pair:
        return files
    return FoldedTensors(pickle, files, method)


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
