"""PiSSA: LoRA that starts from the largest singular vectors of W (Meng et al. 2024, arXiv 2404.02948)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmsuite.adapters.lora import FIRST_FACTOR, LORA, SECOND_FACTOR, Lora
from llmsuite.base.errors import UserError
from llmsuite.base.typing import ReadSlice
from llmsuite.models.adapter_method import AdaptedModel, AdapterConfig, AdapterLayers, AdapterParameter, Array, split

if TYPE_CHECKING:
    import numpy as np

START_FIRST = "lora_A0"
START_SECOND = "lora_B0"
"""Names of the starting values of the factors, which are not trained."""
FACTOR_INDEX = {FIRST_FACTOR: 0, START_FIRST: 0, SECOND_FACTOR: 1, START_SECOND: 1}


class Pissa(Lora):
    """W + scale A B - scale A0 B0, where A and B start as A0 and B0."""

    name = "pissa"
    help = "the principal singular vectors of W, with the initial A B subtracted from W"
    is_init = True
    parameters: Mapping[str, AdapterParameter] = {
        **Lora.parameters,
        START_FIRST: AdapterParameter(by_inputs=0, is_trained=False),
        START_SECOND: AdapterParameter(by_outputs=1, is_trained=False),
    }
    is_plain = False
    num_sums = 2

    def layers(self) -> AdapterLayers:
        from llmsuite.adapters.layers.pissa import PissaEmbedding, PissaExperts, PissaLinear

        return AdapterLayers(PissaLinear, PissaExperts, PissaEmbedding)

    def shapes(self, rank: int, num_inputs: int, num_outputs: int) -> dict[str, tuple[int, ...]]:
        pair = super().shapes(rank, num_inputs, num_outputs)
        return {**pair, START_FIRST: pair[FIRST_FACTOR], START_SECOND: pair[SECOND_FACTOR]}

    def initial(self, model: AdaptedModel) -> ReadSlice:
        """A and B have the largest singular vectors of W."""
        principal = PrincipalFactors(model.read, model.shapes, model.config)

        def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
            module, kind = split(name)
            return principal.read(module, FACTOR_INDEX[kind], index)

        return initial

    def product(self, parameters: Mapping[str, Array]) -> Array:
        return super().product(parameters) - parameters[START_FIRST] @ parameters[START_SECOND]

    def kept_width(self, rank: int, num_outputs: float, uses_device_matmul: bool) -> float:
        # the second product with a first factor, and two updates
        return rank + (0.0 if uses_device_matmul else float(rank))

    def folded(self, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A pair of twice the rank: A B - A0 B0 is [A, A0] [B; -B0]."""
        import numpy as np

        return {
            FIRST_FACTOR: np.concatenate([parameters[FIRST_FACTOR], parameters[START_FIRST]], -1),
            SECOND_FACTOR: np.concatenate([parameters[SECOND_FACTOR], -parameters[START_SECOND]], -2),
        }

    def folded_config(self, config: AdapterConfig) -> AdapterConfig:
        alpha = config.alpha * (math.sqrt(2) if config.rslora else 2)  # which keeps the scale
        return dataclasses.replace(config, method=LORA, rank=2 * config.rank, alpha=alpha)


class PrincipalFactors:
    """PiSSA factors with scale A B = U S V: the R largest singular values of W [I, O] with their vectors, sqrt(S) on
    each side (Meng et al. 2024, arXiv 2404.02948, eq. 2 and 3)."""

    what = "singular vectors for pissa"
    """Vectors of which a matrix has to have `rank`, for messages."""

    def __init__(self, read: ReadSlice, shapes: Mapping[str, Sequence[int]], config: AdapterConfig):
        """
        Args:
            read: values of the model.
            shapes: shape of every parameter of the full model.
            config: rank and scale.
        """
        self._read = read
        self._shapes = shapes
        self.rank = config.rank
        self._scale = config.scale
        self._module = ""
        self._pairs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """A and B of the module that was read last, by the number of the matrix in its stack."""

    def read(self, module: str, factor: int, index: Sequence[slice]) -> np.ndarray:
        """Return a slice of A [I, R] (factor 0) or B [R, O] (factor 1) of a module, or of a stack of them, in float32.

        Raises:
            UserError: W has fewer singular values than the rank.
        """
        import numpy as np

        if len(self._shapes[f"{module}.weight"]) == 2:
            return self._factors(module, 0)[factor][tuple(index)]
        numbers = range(index[0].start, index[0].stop)
        return np.stack([self._factors(module, number)[factor][tuple(index[1:])] for number in numbers])

    def _factors(self, module: str, number: int) -> tuple[np.ndarray, np.ndarray]:
        if self._module != module:
            self._module = module
            self._pairs = {}
        if number not in self._pairs:
            shape = tuple(self._shapes[f"{module}.weight"])
            height, width = shape[-2:]
            if self.rank > min(height, width):
                raise UserError(
                    f"lora.rank: is {self.rank}, but {module} is {height} x {width} and has no more than "
                    f"{min(height, width)} {self.what}; lower it, or set lora.init to default"
                )
            stacked = [slice(number, number + 1)] * (len(shape) - 2)
            value = self._read(f"{module}.weight", shape, [*stacked, slice(0, height), slice(0, width)])
            self._pairs[number] = self.factors(value.reshape(height, width))
        return self._pairs[number]

    def factors(self, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute A [I, R] and B [R, O] for one matrix [I, O]."""
        return principal_factors(matrix, self.rank, self._scale)


def principal_factors(matrix: np.ndarray, rank: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute A [I, R] and B [R, O] of `PrincipalFactors` for one matrix. The largest element of each column of A is
    positive, so that the signs do not depend on where the SVD ran."""
    import numpy as np

    u, s, v = singular_vectors(matrix, rank)
    roots = np.sqrt(s / scale)
    return (u * roots).astype("float32"), (roots[:, None] * v).astype("float32")


def singular_vectors(matrix: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute U [I, K], S [K] and V [K, O], float64, of the K = `count` largest singular values of a matrix [I, O]. The
    largest element of each column of U is positive."""
    import numpy as np
    from scipy.sparse.linalg import svds  # the import takes a tenth of a second

    matrix = matrix.astype("float64")
    if 3 * count < min(matrix.shape):  # a truncated SVD takes seconds where the full one takes a minute
        u, s, v = svds(matrix, count, v0=np.ones(min(matrix.shape)), solver="arpack")
        u = u[:, ::-1]
        s = s[::-1]
        v = v[::-1]
    else:
        u, s, v = np.linalg.svd(matrix, full_matrices=False)
        u = u[:, :count]
        s = s[:count]
        v = v[:count]
    signs = np.sign(u[np.abs(u).argmax(0), np.arange(count)])
    return u * signs, s, signs[:, None] * v
