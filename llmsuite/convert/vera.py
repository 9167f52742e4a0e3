"""VeRA as PaddleNLP saves it (`paddlenlp.peft.VeRAModel`), read as LoRA and written.

    vera_config.json              `r`, `vera_alpha`
    vera_model_state.pdparams     a pickle with what was trained, of each matrix: some of vera_A [I, R], vera_B [R, O],
                                  vera_d [R] and vera_b [O]

A matrix gets scale * A diag(d) B diag(b), which is LoRA with the factors A diag(d) and B diag(b).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.adapter_base import VERA_OF_PADDLENLP
from llmsuite.checkpoint.adapter_dir import STATE, Adapters, factor_pairs
from llmsuite.checkpoint.tensors import SUFFIX, TensorFiles, TensorSource, TensorSpec
from llmsuite.convert.paddle_save import write_pickle
from llmsuite.errors import UserError
from llmsuite.files import write_json
from llmsuite.models.shard_plan import BEHIND, BETWEEN, START_FIRST, START_SECOND
from llmsuite.regular import is_file
from llmsuite.specs import ModelFamily

PICKLE = "vera_model_state.pdparams"
_PART = re.compile(r"(.*)\.vera_([ABdb])")
_VECTOR_OF = {"A": "d", "B": "b"}


class VeraAsLora:
    """The tensors of VeRA with its vectors multiplied into its factors, by the names of LoRA; others as they are."""

    def __init__(self, path: Path, files: TensorSource):
        """
        Args:
            path: of the pickle.
            files: what is in it.

        Raises:
            UserError: a matrix lacks a part, or its parts do not go together.
        """
        self._files = files
        self._folded: dict[str, tuple[str, str]] = {}
        found: dict[str, dict[str, str]] = {}
        for match in (match for name in files.names if (match := _PART.fullmatch(name))):
            found.setdefault(match[1], {})[match[2]] = match[0]
        for module, parts in found.items():
            if missing := [f"vera_{kind}" for kind in "ABdb" if kind not in parts]:
                raise UserError(
                    f"{path}: {module} has no {' and no '.join(missing)}; PaddleNLP saves what is trained only, and "
                    "draws or makes the rest anew, so no model can be made of it. Let PaddleNLP merge it and save the "
                    'model, or save all that has "vera" in its name'
                )
            for kind, vector in _VECTOR_OF.items():
                if files.spec(parts[kind]).shape[1:] != files.spec(parts[vector]).shape:
                    raise UserError(
                        f"{path}: {parts[vector]!r} is {list(files.spec(parts[vector]).shape)}, which does not go with "
                        f"{parts[kind]!r} of {list(files.spec(parts[kind]).shape)}"
                    )
                self._folded[f"{module}.lora_{kind}"] = parts[kind], parts[vector]
        self._others = [name for name in files.names if not _PART.fullmatch(name)]

    @property
    def names(self) -> list[str]:
        return [*self._folded, *self._others]

    @property
    def paths(self) -> list[Path]:
        return self._files.paths

    def spec(self, name: str) -> TensorSpec:
        if name not in self._folded:
            return self._files.spec(name)
        stored = self._files.spec(self._folded[name][0])
        return TensorSpec(name, stored.shape, stored.dtype)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        if name not in self._folded:
            return self._files.read(name, index)
        factor, vector = (self._files.read(part).astype("float32") for part in self._folded[name])
        folded: np.ndarray = factor * vector
        return folded if index is None else folded[tuple(index)]


def as_lora(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a vera_config.json as that of a lora_config.json.

    Raises:
        UserError: the base was changed.
    """
    if config.get("pissa_init"):
        raise UserError(
            f"{path}: pissa_init is on: these adapters belong to matrices that PaddleNLP has changed and not saved. "
            "Let PaddleNLP merge them, and save the model"
        )
    return {**config, "lora_alpha": config.get("vera_alpha")}


def write_vera(directory: Path, source: Path, adapters: Adapters, family: ModelFamily, config: Any) -> bool:
    """Write VeRA of a run as `paddlenlp.peft.VeRAModel.from_pretrained` reads it, into an existing directory.

    Args:
        directory: where to; the caller commits it.
        source: what a run has saved.
        adapters: what is in it, as LoRA.
        family: of the model.
        config: its shape.

    Returns:
        Whether it is VeRA; else nothing is written.
    """
    if not is_file(source / f"{STATE}{SUFFIX}"):
        return False
    files = TensorFiles(source, STATE)
    if not any(name.endswith(f".{BETWEEN}") for name in files.names):
        return False
    values, modules = {}, []
    for module, pairs in factor_pairs(adapters, family, config, "paddlenlp").items():
        theirs = pairs[0].module
        modules.append(theirs)
        for kind, ours in zip("ABdb", (START_FIRST, START_SECOND, BETWEEN, BEHIND)):
            values[f"{theirs}.vera_{kind}"] = files.read(f"{module}.{ours}")
    write_pickle(directory / PICKLE, values)
    rank = next(value.shape[0] for name, value in values.items() if name.endswith("vera_d"))
    write_json(
        directory / VERA_OF_PADDLENLP,
        {
            "r": rank,
            "target_modules": [re.escape(module) for module in modules],
            "trainable_modules": None,
            "vera_alpha": adapters.config.scaling * rank,
            "vera_dropout": adapters.config.lora_dropout,
            "trainable_bias": None,
            "tensor_parallel_degree": -1,
            "dtype": "float32",
            "head_dim": None,
            "do_qat": False,
            "base_model_name_or_path": adapters.base.path,
            "pissa_init": False,
        },
    )
    return True
