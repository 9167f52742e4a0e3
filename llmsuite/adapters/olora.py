"""OLoRA: LoRA that starts from orthonormal columns of W (Büyükakyüz 2024, arXiv 2406.01775)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmsuite.adapters.pissa import FACTOR_INDEX, Pissa, PrincipalFactors
from llmsuite.base.typing import ReadSlice
from llmsuite.models.adapter_method import AdaptedModel, split

if TYPE_CHECKING:
    import numpy as np


class Olora(Pissa):
    """PiSSA's layer with other factors: W + scale A B - scale A0 B0, where A and B start as A0 and B0."""

    name = "olora"
    help = "factors of a QR decomposition of W, with the initial A B subtracted from W"

    def initial(self, model: AdaptedModel) -> ReadSlice:
        """B has orthonormal rows that span the first R rows of W [I, O], and A what W has along them."""
        orthonormal = OrthonormalFactors(model.read, model.shapes, model.config)

        def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
            module, kind = split(name)
            return orthonormal.read(module, FACTOR_INDEX[kind], index)

        return initial


class OrthonormalFactors(PrincipalFactors):
    """OLoRA factors: with the QR decomposition of W transposed [O, I], B is the first R columns of Q and A the first R
    rows of its triangle, both transposed, as in PEFT. The scale is not divided out."""

    what = "orthonormal rows for olora"

    def factors(self, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute A [I, R] and B [R, O] for one matrix. The diagonal of the triangle is positive, so that the signs do
        not depend on where the decomposition ran; the product A B has none."""
        import numpy as np

        wide = matrix.astype("float64")
        # the first columns of Q depend on no other rows of W
        q, triangle = np.linalg.qr(wide[: self.rank].T)  # [O, R], [R, R]
        signs = np.where(np.diag(triangle) < 0, -1.0, 1.0)
        rows = (q * signs).T
        return (wide @ rows.T).astype("float32"), rows.astype("float32")
