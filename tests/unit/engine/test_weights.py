"""Slices of matrices that are quantised while they are read."""

from __future__ import annotations

import numpy as np
import pytest

from llmsuite.engine.weights import QuantisedReads
from llmsuite.models.block_quant import BlockFormat

VALUES = {
    "matrix": np.random.default_rng(0).normal(size=[32, 72]).astype("float32"),
    "stack": np.random.default_rng(1).normal(size=[4, 16, 40]).astype("float32"),
}
FORMATS = [BlockFormat("nf4", 4), BlockFormat("nf4", 4, double_quant=True), BlockFormat("fp4", 2, double_quant=True)]


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("name", "dim"), [("matrix", 0), ("matrix", 1), ("stack", 0)])
def test_every_rank_reads_its_slice_of_what_one_process_stores(
    format: BlockFormat, ranks: int, name: str, dim: int
) -> None:
    values = VALUES[name]
    matrices = values.reshape(-1, *values.shape[-2:])
    stored = {part: np.stack([format.parts(matrix)[part] for matrix in matrices]) for part in format.dtypes}
    stored = {part: full.reshape(format.shapes(values.shape)[part]) for part, full in stored.items()}
    for rank in range(ranks):
        read = QuantisedReads(
            lambda asked, shape, index: VALUES[asked][tuple(index)], {n: v.shape for n, v in VALUES.items()}, format
        )
        for part, full in stored.items():
            index = [slice(0, size) for size in full.shape]
            if not (part.startswith("nested") and name == "matrix"):
                size = full.shape[dim] // ranks
                index[dim] = slice(rank * size, (rank + 1) * size)
            found = read(f"{name}.{part}", full.shape, index)
            assert found.dtype == format.dtypes[part]
            np.testing.assert_array_equal(found, full[tuple(index)])
