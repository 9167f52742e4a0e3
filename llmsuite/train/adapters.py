"""The adapters of a run: their configuration, and the values that they begin with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.errors import UserError
from llmsuite.models.shard_plan import (
    BEHIND,
    BETWEEN,
    FIRST_FACTOR,
    KRON_INNER,
    KRON_INNER_FIRST,
    KRON_INNER_SECOND,
    KRON_OUTER,
    MAGNITUDE,
    MIXER,
    SECOND_FACTOR,
    SQUARE,
    START_FIRST,
    START_SECOND,
)
from llmsuite.parallel.fill import ReadSlice
from llmsuite.schema.lora import LoraSection
from llmsuite.train.initial_values import initial_values


def adapter_config(lora: LoraSection) -> Any:
    """The `paddlenlp.peft.LoRAConfig` that a section with a rank stands for.

    Raises:
        UserError: paddlenlp is not installed.
    """
    from llmsuite.models.peft_configs import lora_config  # takes paddlenlp, which other runs do without

    assert lora.rank is not None
    return lora_config(
        lora.method,
        lora.init,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        rslora=lora.rslora,
        lora_plus_scale=lora.lora_plus_ratio,
    )


def with_factors(
    read: ReadSlice,
    seed: int,
    shapes: Mapping[str, Sequence[int]],
    embedding: str | None = None,
    lora: LoraSection | None = None,
    quantised: Collection[str] = (),
) -> ReadSlice:
    """The values of a model and of its adapters, which change nothing at first: B is zero, A is random, and so is a
    mixer; the matrix of MoRA is zero. The magnitudes of DoRA are the lengths of the columns of W. Those of PiSSA begin
    with the largest singular vectors of W, and are taken off; those of LoRA-GA are zero until there are gradients of W
    (`train.lora_ga`). Of VeRA both factors are random and the same for all
    matrices, d is 0.1, and b is zero. Of LoKr w1 is zero, and w2 random, as HF PEFT and PaddleNLP have it.

    A has the variance of PyTorch's default for a matrix of as many inputs, 1 / (3 I), as in HF PEFT and PaddleNLP. Of
    an embedding A is zero and B standard normal, as in HF PEFT.

    Args:
        read: values of the model, W as it is without quantisation.
        seed: of the recipe.
        shapes: of every parameter of the whole model.
        embedding: name of that module.
        lora: of the recipe; None for the default `init`.
        quantised: names of the modules whose W is stored so: DoRA begins with the lengths of what its codes stand for.
    """
    principal = PrincipalFactors(read, shapes, lora) if lora is not None and lora.init == "pissa" else None

    def magnitudes(module: str, index: Sequence[slice]) -> np.ndarray:
        whole = tuple(shapes[f"{module}.weight"])
        found = []
        for place in _matrices(index[:-1]):
            columns = read(f"{module}.weight", whole, [*place, slice(0, whole[-2]), index[-1]]).astype("float32")
            columns = columns.reshape(columns.shape[-2:])
            if module in quantised:
                assert lora is not None
                assert lora.base_format is not None
                columns = lora.base_format.dequantise(*lora.base_format.quantise(columns))
            found.append(np.linalg.norm(columns, axis=0))
        return np.stack(found) if len(whole) > 2 else found[0]

    def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        module, _, kind = name.rpartition(".")
        if principal is not None and kind in _OF_PAIR:
            return principal.read(module, _OF_PAIR[kind], index)
        if module == embedding and kind == SECOND_FACTOR:
            return initial_values(seed, name, shape, 1.0, index)
        if module == embedding and kind == FIRST_FACTOR:
            return np.zeros([part.stop - part.start for part in index], "float32")
        if lora is not None and lora.method == "vera" and kind in _VERA:
            return _VERA[kind](seed, shape, index)
        if lora is not None and lora.init == "lora_ga" and kind in _OF_PAIR:
            return np.zeros([part.stop - part.start for part in index], "float32")
        if kind in (FIRST_FACTOR, MIXER):
            return initial_values(seed, name, shape, (3 * shape[-2]) ** -0.5, index)
        if kind in (KRON_INNER, KRON_INNER_FIRST, KRON_INNER_SECOND):
            return initial_values(seed, name, shape, (3 * shape[-1]) ** -0.5, index)
        if kind in (SECOND_FACTOR, SQUARE, KRON_OUTER):
            return np.zeros([part.stop - part.start for part in index], "float32")
        if kind == MAGNITUDE:
            return magnitudes(module, index)
        return read(name, shape, index)

    return initial


def _shared_first(seed: int, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
    """A of VeRA: the first rows of one matrix for all, with the variance 2 / I (He et al. 2015, arXiv 1502.01852)."""
    return initial_values(seed, "vera_A", shape, (2 / shape[0]) ** 0.5, index)


def _shared_second(seed: int, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
    """B of VeRA: the first columns of one matrix for all, with the variance 2 / R."""
    return initial_values(seed, "vera_B", shape[::-1], (2 / shape[0]) ** 0.5, index[::-1]).T


def _filled(value: float) -> Callable[[int, Sequence[int], Sequence[slice]], np.ndarray]:
    return lambda seed, shape, index: np.full([part.stop - part.start for part in index], value, "float32")


_VERA = {START_FIRST: _shared_first, START_SECOND: _shared_second, BETWEEN: _filled(0.1), BEHIND: _filled(0.0)}
_OF_PAIR = {FIRST_FACTOR: 0, START_FIRST: 0, SECOND_FACTOR: 1, START_SECOND: 1}


def _matrices(stacked: Sequence[slice]) -> list[list[slice]]:
    """The places of the matrices in a slice of a stack, one after the other; of what is no stack the one there is."""
    return [[slice(n, n + 1)] for n in range(stacked[0].start, stacked[0].stop)] if stacked else [[]]


class PrincipalFactors:
    """Factors with scale A B = U S V: the R largest singular values of W [I, O] with their vectors, the root of S on
    either side (Meng et al. 2024, PiSSA, arXiv 2404.02948, eq. 2 and 3)."""

    def __init__(self, read: ReadSlice, shapes: Mapping[str, Sequence[int]], lora: LoraSection):
        """
        Args:
            read: values of the model.
            shapes: of every parameter of the whole model.
            lora: of the recipe.
        """
        assert lora.rank is not None
        self._read, self._shapes, self._rank, self._scale = read, shapes, lora.rank, lora.scale
        self._module = ""
        self._pairs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Those of the module that was read last, by the number of the matrix in its stack."""

    def read(self, module: str, factor: int, index: Sequence[slice]) -> np.ndarray:
        """A slice of A [I, R] (0) or B [R, O] (1) of a module, or of the stack of those of its matrices, in float32.

        Raises:
            UserError: W has fewer singular values.
        """
        if len(self._shapes[f"{module}.weight"]) == 2:
            return self._of(module, 0)[factor][tuple(index)]
        return np.stack([self._of(module, place.start)[factor][tuple(index[1:])] for (place,) in _matrices(index[:1])])

    def _of(self, module: str, number: int) -> tuple[np.ndarray, np.ndarray]:
        if self._module != module:
            self._module, self._pairs = module, {}
        if number not in self._pairs:
            shape = tuple(self._shapes[f"{module}.weight"])
            height, width = shape[-2:]
            if self._rank > min(height, width):
                raise UserError(
                    f"lora.rank: is {self._rank}, but {module} is {height} x {width} and has no more than "
                    f"{min(height, width)} singular vectors for pissa; lower it, or set lora.init to default"
                )
            stacked = [slice(number, number + 1)] * (len(shape) - 2)
            value = self._read(f"{module}.weight", shape, [*stacked, slice(0, height), slice(0, width)])
            self._pairs[number] = principal_factors(value.reshape(height, width), self._rank, self._scale)
        return self._pairs[number]


def principal_factors(matrix: np.ndarray, rank: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """The factors of `PrincipalFactors` of one matrix. The largest element of each column of A is positive, so that
    they are the same wherever they are computed."""
    u, s, v = singular_vectors(matrix, rank)
    roots = np.sqrt(s / scale)
    return (u * roots).astype("float32"), (roots[:, None] * v).astype("float32")


def singular_vectors(matrix: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """U [I, K], S [K] and V [K, O], float64, of the `count` largest singular values K of a matrix [I, O], which has as
    many. The largest element of each column of U is positive."""
    from scipy.sparse.linalg import svds  # takes a tenth of a second to import

    matrix = matrix.astype("float64")
    if 3 * count < min(matrix.shape):  # a few vectors: seconds where all of them take a minute
        u, s, v = svds(matrix, count, v0=np.ones(min(matrix.shape)), solver="arpack")
        u, s, v = u[:, ::-1], s[::-1], v[::-1]
    else:
        u, s, v = np.linalg.svd(matrix, full_matrices=False)
        u, s, v = u[:, :count], s[:count], v[:count]
    signs = np.sign(u[np.abs(u).argmax(0), np.arange(count)])
    return u * signs, s, signs[:, None] * v
