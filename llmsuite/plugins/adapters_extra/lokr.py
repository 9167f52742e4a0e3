"""LoKr: a Kronecker product instead of A B (Yeh et al. 2023, LyCORIS, arXiv 2309.14859)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsuite.base.strict_json import NULL, NUMBER, Kind, integer
from llmsuite.base.typing import ReadSlice
from llmsuite.contract.hookspecs import AdaptedModel, AdapterConfig, AdapterLayers, AdapterParameter, PaddleNlpFiles
from llmsuite.models.adapter_method import split, zeros
from llmsuite.plugins.adapters_extra.structured import StructuredMethod

if TYPE_CHECKING:
    import numpy as np

KRON_OUTER = "lokr_w1"
KRON_INNER = "lokr_w2"
KRON_INNER_FIRST = "lokr_w2_a"
KRON_INNER_SECOND = "lokr_w2_b"
"""Names of the factors of the product; the inner one may be a product of two."""
_OUTER_PAIR = "lokr_w1_a", "lokr_w1_b"
"""Names of two factors of w1, which PEFT's files may have."""


class LokrFiles(PaddleNlpFiles):
    """The files that `paddlenlp.peft.LoKrModel` saves: of each matrix lokr_w1, and lokr_w2 or its factors lokr_w2_a and
    lokr_w2_b. Its layers choose the sizes of both as ours do."""

    label = "LoKr"
    config_name = "lokr_config.json"
    tensors_name = "lokr_model_state.pdparams"
    kinds: Mapping[str, str] = {kind: kind for kind in (KRON_OUTER, KRON_INNER, KRON_INNER_FIRST, KRON_INNER_SECOND)}
    key_types: Mapping[str, Kind] = {"lokr_alpha": NUMBER | NULL, "lokr_dim": integer(1, 1 << 20) | NULL}

    def peft_config(self, path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """An alpha of 0 stands for the rank; `scaling` is not used."""
        rank = config.get("lokr_dim")
        return {**config, "alpha": config.get("lokr_alpha") or rank, "r": rank}

    def config(self, config: AdapterConfig, modules: Sequence[str], base: str | None) -> dict[str, Any]:
        return {
            "base_model_name_or_path": base,
            "decompose_both": False,
            "dtype": "float32",
            "factor": -1,
            "lokr_alpha": config.alpha,
            "lokr_dim": config.rank,
            "merge_weight": False,
            "target_modules": [re.escape(module) for module in modules],
            "tensor_parallel_degree": -1,
            "trainable_bias": None,
            "trainable_modules": None,
        }


class Lokr(StructuredMethod):
    """W + scale (kron(w1, w2))^T."""

    name = "lokr"
    help = "a Kronecker product instead of A B"
    parameters: Mapping[str, AdapterParameter] = dict.fromkeys(
        (KRON_OUTER, KRON_INNER, KRON_INNER_FIRST, KRON_INNER_SECOND), AdapterParameter(partial_gradient="shard")
    )
    refused_keys: Mapping[str, str] = {
        "lora_plus_ratio": "applies to a trained factor B, which lokr does not have; set it to 1"
    }
    stored_kinds = (KRON_OUTER, *_OUTER_PAIR, KRON_INNER, KRON_INNER_FIRST, KRON_INNER_SECOND)
    peft_type = "LOKR"
    paddlenlp = LokrFiles()
    scale_keys = ("alpha", "r")

    def layers(self) -> AdapterLayers:
        from llmsuite.plugins.adapters_extra.layers.lokr import LokrExperts, LokrLinear

        return AdapterLayers(LokrLinear, LokrExperts)

    def shapes(self, rank: int, num_inputs: int, num_outputs: int) -> dict[str, tuple[int, ...]]:
        return dict(kron_shapes(rank, num_inputs, num_outputs))

    def initial(self, model: AdaptedModel) -> ReadSlice:
        """w1 is zero and w2 random, as in HF PEFT and PaddleNLP."""
        from llmsuite.models.initial_values import initial_values

        def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
            if split(name)[1] == KRON_OUTER:
                return zeros(index)
            return initial_values(model.seed, name, shape, (3 * shape[-1]) ** -0.5, index)

        return initial

    def update_of(self, x: Any, parameters: Mapping[str, Any], num_outputs: int, scale: float) -> Any:
        from llmsuite.plugins.adapters_extra.layers.lokr import kron_update

        return kron_update(x, *parameters.values()) * scale

    def update(self, parameters: Mapping[str, np.ndarray], shape: tuple[int, ...], scale: float) -> np.ndarray:
        import numpy as np

        outer = _product(parameters, KRON_OUTER)
        inner = _product(parameters, KRON_INNER)
        return (scale * np.kron(outer, inner).T).astype("float32")

    def peft_keys(self, config: AdapterConfig) -> dict[str, Any]:
        kinds = {"decompose_both": False, "decompose_factor": -1, "rank_dropout": 0.0, "module_dropout": 0.0}
        return {"peft_type": self.peft_type, "alpha": config.scale * config.rank, **kinds}

    def fits_matrix(self, stored: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]) -> bool:
        outer = _side(stored, KRON_OUTER)
        inner = _side(stored, KRON_INNER)
        if outer is None or inner is None or len(outer[0]) + len(inner[0]) != len(stored):
            return False
        _, rows, columns = outer
        _, inner_rows, inner_columns = inner
        return (columns * inner_columns, rows * inner_rows) == tuple(shape)


def kron_shapes(rank: int, num_inputs: int, num_outputs: int) -> dict[str, tuple[int, int]]:
    """Shapes of the factors of LoKr's update (kron(w1, w2))^T: w1 [O1, I1] and w2 [O2, I2], or at a low rank two
    factors [O2, R] and [R, I2] of w2 (Yeh et al. 2023, LyCORIS, arXiv 2309.14859). The rank decides as in paddlenlp and
    PEFT."""
    outer_inputs, inner_inputs = near_square(num_inputs)
    outer_outputs, inner_outputs = near_square(num_outputs)
    found = {KRON_OUTER: (outer_outputs, outer_inputs)}
    if rank >= max(inner_outputs, inner_inputs) / 2:
        return {**found, KRON_INNER: (inner_outputs, inner_inputs)}
    return {**found, KRON_INNER_FIRST: (inner_outputs, rank), KRON_INNER_SECOND: (rank, inner_inputs)}


def near_square(size: int) -> tuple[int, int]:
    """The two integer factors of a size that are closest to each other, the smaller one first."""
    smaller = next(divisor for divisor in range(math.isqrt(size), 0, -1) if size % divisor == 0)
    return smaller, size // smaller


def _side(parameters: Mapping[str, tuple[int, ...]], stem: str) -> tuple[list[str], int, int] | None:
    """The parameters of one factor of a Kronecker product, its rows and columns; None where they do not fit."""
    if stem in parameters:
        rows, columns = parameters[stem]
        return [stem], rows, columns
    pair = [f"{stem}_a", f"{stem}_b"]
    if not all(name in parameters for name in pair) or parameters[pair[0]][1] != parameters[pair[1]][0]:
        return None
    return pair, parameters[pair[0]][0], parameters[pair[1]][1]


def _product(parameters: Mapping[str, np.ndarray], stem: str) -> np.ndarray:
    if stem in parameters:
        return parameters[stem].astype("float32")
    return parameters[f"{stem}_a"].astype("float32") @ parameters[f"{stem}_b"].astype("float32")
