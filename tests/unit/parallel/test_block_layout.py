"""Blocks of 8-bit moments: numbers of the elements that a rank has."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmsuite.models.dynamic_map import BLOCK
from llmsuite.parallel.block_layout import BlockLayout, num_blocks
from llmsuite.parallel.block_moments import Blocks

SHAPES = [(5001,), (40, 156), (512, 12), (768, 256), (3, 79, 53), (4, 256, 16)]


def numbers_of(shape: tuple[int, ...], is_transposed: bool) -> np.ndarray:
    """The block of each element of a full parameter, shaped as it."""
    *stacked, rows, columns = (1, *shape) if len(shape) == 1 else shape
    inside = np.arange(rows * columns).reshape((columns, rows) if is_transposed else (rows, columns)) // BLOCK
    inside = inside.T if is_transposed else inside
    size = -(-rows * columns // BLOCK)
    matrices = np.arange(math.prod(stacked))[:, None, None]
    return (matrices * size + inside).reshape(shape)


def layouts(shape: tuple[int, ...], is_transposed: bool) -> list[tuple[BlockLayout, np.ndarray]]:
    """Shards of a parameter that is full, or cut along each dim that two ranks divide; with the blocks of their
    elements."""
    full = numbers_of(shape, is_transposed)
    found = []
    for dim in (None, *(dim for dim, size in enumerate(shape) if size % 2 == 0)):
        for part in range(1 if dim is None else 2):
            offsets = [0] * len(shape)
            local = full
            if dim is not None:
                local = np.split(full, 2, dim)[part]
                offsets[dim] = part * local.shape[dim]
            for num_shards in (1, 3, 7):
                each = -(-local.size // num_shards)
                for first in range(0, local.size, each):
                    own = slice(first, min(first + each, local.size))
                    layout = BlockLayout(shape, is_transposed, local.shape, tuple(offsets), own)
                    found.append((layout, local.reshape(-1)[own]))
    return found


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_have_the_blocks_of_their_elements(shape: tuple[int, ...], is_transposed: bool) -> None:
    for layout, expected in layouts(shape, is_transposed and len(shape) > 1):
        blocks = Blocks(layout)
        ids = blocks.ids.numpy()
        np.testing.assert_array_equal(ids, np.unique(expected))
        found = np.full(layout.num_owned, -1)
        for box in layout.boxes:
            lines = box.first + box.pitch * np.arange(box.num_lines)
            numbers = (lines[:, None] + np.arange(box.line_size)) // BLOCK
            numbers = numbers.T if box.is_transposed else numbers
            found[box.start : box.start + box.rows * box.columns] = numbers.reshape(-1)
        np.testing.assert_array_equal(found, expected)
        for chunk in (chunk for chunks in blocks.chunks() for chunk in chunks):
            numbers = chunk.numbers.numpy()
            assert (np.diff(numbers) >= 0).all()
        assert len(ids) <= layout.max_own_blocks <= layout.num_blocks
        assert layout.is_cut == (layout.num_owned < math.prod(shape))


def test_the_number_of_blocks_is_exact_where_lines_are_multiples_of_a_block() -> None:
    for shape, is_transposed in (((768, 256), True), ((256, 768), False), ((4, 256, 16), True)):
        for rows in (1, 100, 255, 256, 300):
            own = slice(0, rows * shape[-1])
            layout = BlockLayout(shape, is_transposed, shape, (0,) * len(shape), own)
            ids = Blocks(layout).ids.numpy() if layout.is_cut else range(num_blocks(shape))
            assert layout.max_own_blocks == len(ids), (shape, rows)


def test_num_blocks() -> None:
    assert num_blocks((257,)) == 2
    assert num_blocks((512, 3)) == 6
    assert num_blocks((3, 79, 53)) == 3 * 17
