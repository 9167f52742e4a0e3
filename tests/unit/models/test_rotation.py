"""Tables of cos and sin, which are kept on the device between passes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import paddle
import pytest

from llmsuite.models import rotation as tables
from llmsuite.models.rotation import rotation

FREQUENCIES = tuple(10000.0 ** (-np.arange(8) / 8))
SCALE = 1.25


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    before = dict(tables._KEPT)
    tables._KEPT.clear()
    yield
    tables._KEPT.clear()
    tables._KEPT.update(before)


def computed(start: int, length: int) -> list[np.ndarray]:
    """Cos and sin by NumPy, for these positions alone."""
    angles = np.outer(np.arange(start, start + length), np.asarray(FREQUENCIES))
    return [(f(angles) * SCALE).astype("float32") for f in (np.cos, np.sin)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_tables_have_the_bits_of_computed_ones(dtype: str) -> None:
    # longer and shorter than what is kept, from the start and from elsewhere, as a text that is generated has them
    for start, length in [(0, 5), (0, 5), (5, 1), (6, 1), (0, 3), (0, 700), (699, 2), (3, 400)]:
        found = rotation(FREQUENCIES, SCALE, start, length, dtype)
        for own, expected in zip(found, computed(start, length), strict=True):
            assert own.shape == [1, length, 1, 8]
            assert own.stop_gradient
            rounded = paddle.to_tensor(expected).astype(dtype).astype("float32").numpy()
            assert np.array_equal(own.astype("float32").numpy()[0, :, 0], rounded), (start, length)


def test_positions_in_documents_are_looked_up() -> None:
    starts = paddle.to_tensor(np.array([[0, 0, 2, 2, 2], [0, 1, 1, 3, 3]]))
    rotation(FREQUENCIES, SCALE, 0, 9, "float32")  # what is kept is longer than the rows
    for own, expected in zip(rotation(FREQUENCIES, SCALE, 0, 5, "float32", starts), computed(0, 5), strict=True):
        assert np.array_equal(own.numpy()[:, :, 0], expected[[[0, 1, 0, 1, 2], [0, 0, 1, 0, 1]]])


def test_passes_of_one_length_share_their_tables() -> None:
    before = tables._tables(FREQUENCIES, SCALE, 6, "float32")
    assert tables._tables(FREQUENCIES, SCALE, 6, "float32")[0] is before[0]
    assert tables._tables(FREQUENCIES, SCALE, 4, "float32")[1] is before[1]
    assert tables._tables(FREQUENCIES, 1.0, 6, "float32")[0] is not before[0], "another scale"
    assert tables._tables(FREQUENCIES, SCALE, 6, "float16")[0].dtype == paddle.float16
    assert tables._tables(FREQUENCIES[:4], SCALE, 6, "float32")[0].shape == [6, 4]
    own, _ = rotation(FREQUENCIES, SCALE, 0, 6, "float32")
    assert own is not before[0], "an operation may turn what a pass gets into a distributed tensor"


def test_few_tables_are_kept() -> None:
    """And a table that grows by a position at a time is made rarely."""
    for length in range(1, 200):
        tables._tables(FREQUENCIES, SCALE, length, "float32")
    assert [cos.shape[0] for cos, _ in tables._KEPT.values()] == [256]
    for scale in range(20):
        tables._tables(FREQUENCIES, float(scale), 2, "float32")
        tables._tables(FREQUENCIES, SCALE, 2, "float32")  # it is in use
    assert len(tables._KEPT) == tables._MAX_KEPT
    assert any(cos.shape[0] == 256 for cos, _ in tables._KEPT.values())


def test_a_program_has_tables_of_its_own() -> None:
    def rotate(x: paddle.Tensor) -> paddle.Tensor:
        return x * rotation(FREQUENCIES, SCALE, 0, 3, "float32")[0]

    found = paddle.jit.to_static(rotate, full_graph=True)(paddle.ones([1, 3, 1, 8]))
    assert np.array_equal(found.numpy()[0, :, 0], computed(0, 3)[0])
    assert not tables._KEPT
