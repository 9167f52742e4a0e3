"""Methods whose update of W is no pair of factors that could be cut with W; their layers recompute it (see
`layers.structured`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmsuite.contract.hookspecs import AdapterMethod
from llmsuite.models.adapter_method import Array

if TYPE_CHECKING:
    import numpy as np


class StructuredMethod(AdapterMethod):
    """W + f, where f is the matrix of an update of all inputs. Every rank has all parameters."""

    on_experts = ""
    on_embedding = "its update is a function of an input vector, but the input of an embedding is ids"
    supports_programs = False
    num_sums = 0

    def update(self, parameters: Mapping[str, np.ndarray], shape: tuple[int, ...], scale: float) -> np.ndarray:
        """f [I, O], in float32, of a matrix of this shape."""
        raise AssertionError(f"{type(self).__name__} has to define `update`")

    def update_of(self, x: Any, parameters: Mapping[str, Any], num_outputs: int, scale: float) -> Any:
        """f applied to inputs x [..., I] by the function of the layer, as Paddle tensors: [..., O]."""
        raise AssertionError(f"{type(self).__name__} has to define `update_of`")

    def merged(self, weight: Array, parameters: Mapping[str, Array], scale: float) -> Array:
        import numpy as np

        if isinstance(weight, np.ndarray):  # files are merged without Paddle
            return weight + self.update(parameters, weight.shape, scale)
        from llmsuite.plugins.adapters_extra.layers.structured import update_matrix

        return weight.astype("float32") + update_matrix(self.update_of, parameters, weight.shape, scale)

    def kept_width(self, rank: int, num_outputs: float, uses_device_matmul: bool) -> float:
        return 0.0

    def fits(self, stored: Mapping[str, tuple[int, ...]], shape: tuple[int, ...], rank: int | None) -> bool:
        if any(len(of) != 2 or 0 in of for of in (shape, *stored.values())):
            return False
        return self.fits_matrix(stored, shape)

    def fits_matrix(self, stored: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]) -> bool:
        """`fits` of stored matrices that are not empty. The rank need not be that of the configuration."""
        raise AssertionError(f"{type(self).__name__} has to define `fits_matrix`")
