"""DoRA: the norms of the columns of W are trained apart from their directions (Liu et al. 2024, arXiv 2402.09353)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmsuite.adapters.lora import Lora
from llmsuite.base.typing import ReadSlice
from llmsuite.models.adapter_method import AdaptedModel, AdapterLayers, AdapterParameter, Array, split

if TYPE_CHECKING:
    import numpy as np

MAGNITUDE = "lora_magnitude"
"""Name of the trained norms m [O] of the columns."""


class Dora(Lora):
    """W + scale A B with its columns scaled to the norms m."""

    name = "dora"
    help = "a trained magnitude for each column of W + A B"
    parameters: Mapping[str, AdapterParameter] = {**Lora.parameters, MAGNITUDE: AdapterParameter(by_outputs=0)}
    is_plain = False
    sums_norms = True
    stored_vectors = (MAGNITUDE,)
    flag = "use_dora"
    pair_parts: Mapping[str, str] = {"magnitude_vector": MAGNITUDE}
    merges_slices = (1,)  # a norm is of a full column

    def layers(self) -> AdapterLayers:
        from llmsuite.adapters.layers.dora import DoraEmbedding, DoraExperts, DoraLinear

        return AdapterLayers(DoraLinear, DoraExperts, DoraEmbedding)

    def shapes(self, rank: int, num_inputs: int, num_outputs: int) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(rank, num_inputs, num_outputs), MAGNITUDE: (num_outputs,)}

    def initial(self, model: AdaptedModel) -> ReadSlice:
        """The values of LoRA; the magnitudes are the norms of the columns of W."""
        factors = super().initial(model)

        def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
            module, kind = split(name)
            if kind == MAGNITUDE:
                return _column_norms(model, module, index)
            return factors(name, shape, index)

        return initial

    def merged(self, weight: Array, parameters: Mapping[str, Array], scale: float) -> Array:
        merged = super().merged(weight, parameters, scale)
        norms = ((merged * merged).sum(-2) + 1e-12) ** 0.5  # the epsilon: a zero column would divide by 0
        return merged * (parameters[MAGNITUDE] / norms)[..., None, :]

    def kept_width(self, rank: int, num_outputs: float, uses_device_matmul: bool) -> float:
        return rank + num_outputs  # the output that m scales too


def _column_norms(model: AdaptedModel, module: str, index: Sequence[slice]) -> np.ndarray:
    """A slice of the norms of the columns of a matrix, [O], or of a stack of them, [E, O]."""
    import numpy as np

    full_shape = tuple(model.shapes[f"{module}.weight"])
    rows = slice(0, full_shape[-2])
    if len(full_shape) == 2:
        return _norms(model, module, full_shape, [rows, index[-1]])
    numbers = range(index[0].start, index[0].stop)
    return np.stack([_norms(model, module, full_shape, [slice(n, n + 1), rows, index[-1]]) for n in numbers])


def _norms(model: AdaptedModel, module: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
    import numpy as np

    outputs = index[-1]
    if model.rounds_in_full:
        index = [*index[:-1], slice(0, shape[-1])]
    columns = model.read(f"{module}.weight", shape, index).astype("float32")
    columns = model.rounded(module, columns.reshape(columns.shape[-2:]))
    if model.rounds_in_full:
        columns = columns[:, outputs]
    norms: np.ndarray = np.linalg.norm(columns, axis=0)
    return norms
