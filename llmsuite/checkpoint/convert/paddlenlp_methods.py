"""Adapters of methods for which PaddleNLP has files of their own, as `AdapterMethod.paddlenlp` describes them: reads
those that can be folded as LoRA, and writes all of them.

Parameters that cannot be folded into a pair of factors are read as they are, by `adapter.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.adapters.lora import FIRST_FACTOR, SECOND_FACTOR
from llmsuite.adapters.methods import METHODS
from llmsuite.base.errors import UserError
from llmsuite.base.files import write_json
from llmsuite.base.safe_files import is_file
from llmsuite.base.strict_json import ABOVE_ZERO, check_kinds
from llmsuite.checkpoint.adapter_base import Base, read_base, write_base
from llmsuite.checkpoint.adapter_config import read_adapter_config
from llmsuite.checkpoint.adapter_dir import CONFIG_NAMES, STATE
from llmsuite.checkpoint.convert.paddle_save import write_pickle
from llmsuite.checkpoint.tensors import SUFFIX, TensorFiles, TensorSource, TensorSpec, sliced
from llmsuite.contract.specs import ModelFamily
from llmsuite.models.adapter_method import AdapterConfig, AdapterMethod


class FoldedTensors:
    """The tensors of such files with the parameters of each matrix folded into a pair of factors (see
    `AdapterMethod.folded`), by the names of LoRA and in float32; others unchanged."""

    def __init__(self, path: Path, files: TensorSource, method: AdapterMethod):
        """
        Args:
            path: of the pickle.
            files: its tensors.
            method: of the adapters.

        Raises:
            UserError: a matrix lacks a parameter, or its parameters do not match.
        """
        own = method.paddlenlp
        assert own is not None
        self._files = files
        self._method = method
        part = re.compile(rf"(.*)\.({'|'.join(map(re.escape, own.kinds))})")
        stored: dict[str, dict[str, str]] = {}
        self._others: list[str] = []
        for name in files.names:
            if match := part.fullmatch(name):
                stored.setdefault(match[1], {})[match[2]] = name
            else:
                self._others.append(name)
        self._parameters: dict[str, dict[str, str]] = {}
        """Stored names of the parameters of each module, by our kinds."""
        for module, names in stored.items():
            problem = own.problem(module, {kind: files.spec(name).shape for kind, name in names.items()})
            if problem is not None:
                raise UserError(f"{path}: {problem}")
            self._parameters[module] = {own.kinds[kind]: name for kind, name in names.items()}
        self._folded = {
            f"{module}.{factor}": (module, factor)
            for module in self._parameters
            for factor in (FIRST_FACTOR, SECOND_FACTOR)
        }
        self._specs: dict[str, TensorSpec] = {}
        self._last: tuple[str, dict[str, np.ndarray]] = ("", {})
        """The module that was folded last, and its pair: both factors are read in turn."""

    @property
    def names(self) -> list[str]:
        return [*self._folded, *self._others]

    @property
    def paths(self) -> list[Path]:
        return self._files.paths

    def spec(self, name: str) -> TensorSpec:
        if name not in self._folded:
            return self._files.spec(name)
        if name not in self._specs:
            module, factor = self._folded[name]
            self._specs[name] = TensorSpec(name, self._fold(module)[factor].shape, "float32")
        return self._specs[name]

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        if name not in self._folded:
            return self._files.read(name, index)
        module, factor = self._folded[name]
        value = self._fold(module)[factor]
        return sliced(value, index)

    def _fold(self, module: str) -> dict[str, np.ndarray]:
        if self._last[0] != module:
            names = self._parameters[module]
            parameters = {kind: self._files.read(name).astype("float32") for kind, name in names.items()}
            self._last = module, self._method.folded(parameters)
        return self._last[1]


def method_of(source: Path) -> AdapterMethod | None:
    """The method of adapters in a directory of a run or of PEFT, if PaddleNLP has files of its own for it; None for
    other methods and directories."""
    path = source / CONFIG_NAMES["hf"]
    if not is_file(path):
        return None
    peft_type = read_adapter_config(path).get("peft_type")
    has_state = is_file(source / f"{STATE}{SUFFIX}")
    kinds = {name.rpartition(".")[2] for name in TensorFiles(source, STATE).names} if has_state else set()
    for method in METHODS.values():
        if method.paddlenlp is None:
            continue
        # files with a pair are those of LoRA, whatever the method of the run was
        if kinds == set(method.parameters) if method.stores_pair else peft_type == method.type_in_files():
            return method
    return None


def write_method(directory: Path, source: Path, method: AdapterMethod, family: ModelFamily, config: Any) -> int:
    """Write adapters of a run for the class of their method in `paddlenlp.peft`, into an existing directory.

    Args:
        directory: to write into; the caller commits it.
        source: adapters of a run.
        method: of the adapters, as `method_of` found it.
        family: of the model.
        config: its shape.

    Returns:
        The number of matrices that have an adapter.

    Raises:
        UserError: the adapters are not those of a run, or PaddleNLP has no counterpart of them.
    """
    own = method.paddlenlp
    assert own is not None
    assert method.scale_keys is not None, "PaddleNLP has no such method without a scale"
    if not is_file(source / f"{STATE}{SUFFIX}"):
        raise UserError(f"{source}: has no {STATE}{SUFFIX}, as adapters of a run have; merge them instead")
    names = family.names()
    prefix = names.paddlenlp_prefix(config)
    if prefix is None:
        raise UserError(f"{source}: PaddleNLP's names of a {family.name} are not known; merge the adapters instead")
    files = TensorFiles(source, STATE)
    theirs = {ours: kind for kind, ours in own.kinds.items()}
    values = {}
    modules = dict[str, None]()
    for name in files.names:
        module, _, kind = name.rpartition(".")
        place = names.hf_tensors(f"{module}.weight", config)
        if place.stacked or place.num_parts > 1 or len(place.names) > 1:
            raise UserError(f"{source}: {module} is not one matrix in PaddleNLP; merge the adapters instead")
        renamed = re.sub(r"^model\.", prefix, place.names[0].removesuffix(".weight"))
        modules[renamed] = None
        values[f"{renamed}.{theirs[kind]}"] = files.read(name)
    write_pickle(directory / own.tensors_name, values)
    path = source / CONFIG_NAMES["hf"]
    data = read_adapter_config(path)
    alpha_key, rank_key = method.scale_keys
    check_kinds(path, data, {alpha_key: ABOVE_ZERO, rank_key: ABOVE_ZERO})
    settings = AdapterConfig(
        method,
        rank=data[rank_key],
        alpha=data[alpha_key],
        dropout=data.get("lora_dropout") or 0.0,
        rslora=bool(data.get("use_rslora")),
    )
    base = read_base(source) or Base(data.get("base_model_name_or_path"), "")
    write_base(directory, base)
    write_json(directory / own.config_name, own.config(settings, [*modules], base.path))
    return len(modules)
