"""The base model of adapters that were trained on quantised matrices (`lora.base_dtype`), with dequantised values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from llmsuite.base.fields import field_values
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.models.block_quant import BlockFormat
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.models.targets import quantised_modules


@dataclasses.dataclass(kw_only=True)
class DequantisedModel(ModelDirectory):
    """A model whose matrices are read with the values after quantising and dequantising, in float32."""

    format: BlockFormat
    rounded: frozenset[str]
    """Names of these matrices' parameters."""

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        if name not in self.rounded:
            return super().read(name, index)
        if index is None:
            return self._rounded(super().read(name))
        *stack, inputs, outputs = index
        start, stop, _ = inputs.indices(self.spec(name).shape[-2])
        if self.format.is_of_full:  # a scale depends on all of its matrix
            return self._rounded(super().read(name, [*stack, *[slice(None)] * 2]))[..., inputs, outputs]
        block = self.format.block
        first = start // block * block
        values = self._rounded(super().read(name, [*stack, slice(first, -(-stop // block) * block), outputs]))
        return values[..., start - first : stop - first, :]

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        return self.format.rounded(np.ascontiguousarray(values, "float32"))


def dequantised_model(model: ModelDirectory, format: BlockFormat) -> DequantisedModel:
    """The model with its matrices quantised to a format and dequantised."""
    carried = set(model.carried)  # they were no parameters when the adapters were trained
    shapes = {name: model.spec(name).shape for name in model.names if name not in carried}
    modules = quantised_modules(shapes, model.family.shard_plan or UNSHARDED)
    rounded = frozenset(f"{module}.weight" for module in modules)
    return DequantisedModel(**field_values(model), format=format, rounded=rounded)
