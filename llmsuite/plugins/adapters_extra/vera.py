"""VeRA: frozen random factors, shared by all matrices, with a trained vector after each (Kopiczko et al. 2023, arXiv
2310.11454)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsuite.adapters.lora import FIRST_FACTOR, LORA, SECOND_FACTOR
from llmsuite.base.errors import UserError
from llmsuite.base.strict_json import NULL, NUMBER, Kind
from llmsuite.base.typing import ReadSlice
from llmsuite.contract.hookspecs import (
    AdaptedModel,
    AdapterConfig,
    AdapterLayers,
    AdapterMethod,
    AdapterParameter,
    PaddleNlpFiles,
)
from llmsuite.models.adapter_method import Array, split

if TYPE_CHECKING:
    import numpy as np

FROZEN_FIRST = "lora_A0"
FROZEN_SECOND = "lora_B0"
"""Names of the frozen factors: those that PiSSA's frozen factors have."""
RANK_SCALE = "lora_d"
OUTPUT_SCALE = "lora_b"
"""Names of the vectors: d [R] scales between the factors, b [O] scales the output."""


class VeraFiles(PaddleNlpFiles):
    """The files that `paddlenlp.peft.VeRAModel` saves: of each matrix some of vera_A [I, R], vera_B [R, O], vera_d [R]
    and vera_b [O], those that were trained."""

    label = "VeRA"
    config_name = "vera_config.json"
    tensors_name = "vera_model_state.pdparams"
    kinds: Mapping[str, str] = {
        "vera_A": FROZEN_FIRST,
        "vera_B": FROZEN_SECOND,
        "vera_d": RANK_SCALE,
        "vera_b": OUTPUT_SCALE,
    }
    key_types: Mapping[str, Kind] = {"vera_alpha": NUMBER | NULL}

    def peft_config(self, path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        if config.get("pissa_init"):
            raise UserError(
                f"{path}: pissa_init is on: these adapters belong to matrices that PaddleNLP has changed and not "
                "saved. Let PaddleNLP merge them, and save the model"
            )
        return {**config, "lora_alpha": config.get("vera_alpha")}

    def problem(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        missing = [kind for kind in self.kinds if kind not in shapes]
        if missing:
            return (
                f"{module} has no {' and no '.join(missing)}; PaddleNLP saves only trained parameters and initialises "
                "the rest at random again, so the model cannot be restored. Let PaddleNLP merge it and save the "
                'model, or save all parameters with "vera" in their names'
            )
        for factor, vector in (("vera_A", "vera_d"), ("vera_B", "vera_b")):
            if shapes[factor][1:] != shapes[vector]:
                return (
                    f"'{module}.{vector}' is {list(shapes[vector])}, which does not match '{module}.{factor}' of "
                    f"{list(shapes[factor])}"
                )
        return None

    def config(self, config: AdapterConfig, modules: Sequence[str], base: str | None) -> dict[str, Any]:
        return {
            "r": config.rank,
            "target_modules": [re.escape(module) for module in modules],
            "trainable_modules": None,
            "vera_alpha": config.scale * config.rank,
            "vera_dropout": config.dropout,
            "trainable_bias": None,
            "tensor_parallel_degree": -1,
            "dtype": "float32",
            "head_dim": None,
            "do_qat": False,
            "base_model_name_or_path": base,
            "pissa_init": False,
        }


class Vera(AdapterMethod):
    """W + scale A diag(d) B diag(b)."""

    name = "vera"
    help = "frozen random A and B, shared by all matrices, each followed by a trained vector"
    parameters: Mapping[str, AdapterParameter] = {
        FROZEN_FIRST: AdapterParameter(by_inputs=0, is_trained=False),
        FROZEN_SECOND: AdapterParameter(by_outputs=1, is_trained=False),
        RANK_SCALE: AdapterParameter(partial_gradient="tokens"),
        OUTPUT_SCALE: AdapterParameter(by_outputs=0, partial_gradient="tokens"),
    }
    on_experts = "its two frozen factors are shared by all matrices, but each expert would keep a copy"
    on_embedding = "neither its paper nor PEFT defines it for embeddings"
    supports_padding = True
    fits_any_rank = True
    refused_keys: Mapping[str, str] = {
        "lora_plus_ratio": "applies to a trained factor B, which vera does not have; set it to 1"
    }
    keeps_input = False
    stores_pair = True
    paddlenlp = VeraFiles()
    merges_slices = (0, 1)

    def layers(self) -> AdapterLayers:
        from llmsuite.plugins.adapters_extra.layers.vera import VeraLinear

        return AdapterLayers(VeraLinear)

    def shapes(self, rank: int, num_inputs: int, num_outputs: int) -> dict[str, tuple[int, ...]]:
        pair = {FROZEN_FIRST: (num_inputs, rank), FROZEN_SECOND: (rank, num_outputs)}
        return {**pair, RANK_SCALE: (rank,), OUTPUT_SCALE: (num_outputs,)}

    def initial(self, model: AdaptedModel) -> ReadSlice:
        """A is the first rows of one matrix that all modules share, with variance 2 / I (He et al. 2015, arXiv
        1502.01852), and B the first columns of one, with variance 2 / R; d is 0.1 and b is zero."""
        import numpy as np

        from llmsuite.models.initial_values import initial_values

        seed = model.seed

        def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
            kind = split(name)[1]
            if kind == FROZEN_FIRST:
                return initial_values(seed, "vera_A", shape, (2 / shape[0]) ** 0.5, index)
            if kind == FROZEN_SECOND:
                return initial_values(seed, "vera_B", shape[::-1], (2 / shape[0]) ** 0.5, index[::-1]).T
            constant = 0.1 if kind == RANK_SCALE else 0.0
            return np.full([part.stop - part.start for part in index], constant, "float32")

        return initial

    def merged(self, weight: Array, parameters: Mapping[str, Array], scale: float) -> Array:
        first = parameters[FROZEN_FIRST] * parameters[RANK_SCALE]
        return weight + (first @ parameters[FROZEN_SECOND]) * parameters[OUTPUT_SCALE] * scale

    def kept_width(self, rank: int, num_outputs: float, uses_device_matmul: bool) -> float:
        # before and after the scaling by d, and the output that b scales
        return rank + (0.0 if uses_device_matmul else float(rank)) + num_outputs

    def folded(self, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """((x A) d) B b is (x (A d)) (B b)."""
        return {
            FIRST_FACTOR: _scaled(parameters[FROZEN_FIRST], parameters[RANK_SCALE]),
            SECOND_FACTOR: _scaled(parameters[FROZEN_SECOND], parameters[OUTPUT_SCALE]),
        }

    def folded_config(self, config: AdapterConfig) -> AdapterConfig:
        return dataclasses.replace(config, method=LORA, lora_plus_ratio=1.0)


def _scaled(factor: np.ndarray, vector: np.ndarray) -> np.ndarray:
    return (factor.astype("float32") * vector.astype("float32")).astype(factor.dtype)
