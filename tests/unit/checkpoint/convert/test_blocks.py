"""Tensors cut into blocks: any cut is put together again exactly, and a cut that is none is named."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.convert.blocks import Block, BlockFiles, coverage_error
from llmsuite.checkpoint.tensors import TensorSpec


def block(value: np.ndarray, offset: Sequence[int], shape: Sequence[int], file: str = "f") -> Block:
    part = value[tuple(slice(o, o + n) for o, n in zip(offset, shape))]
    return Block(tuple(offset), tuple(shape), file, lambda index: part[tuple(index)])


def files(value: np.ndarray, blocks: Sequence[Block]) -> BlockFiles:
    result = BlockFiles(Path("there"), [], {"t": TensorSpec("t", value.shape, value.dtype.name)})
    result.add("t", blocks)
    return result


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[np.ndarray, list[Block]]:
    """A tensor and any grid of blocks of it, in any order; each block may be cut once more on its own."""
    shape = draw(st.lists(st.integers(1, 7), min_size=0, max_size=3))
    value = np.arange(int(np.prod(shape)), dtype=draw(st.sampled_from(["float32", "int64", "float16"]))).reshape(shape)
    edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    blocks = []
    for cell in itertools.product(*(list(itertools.pairwise(e)) for e in edges)):
        offset = [a for a, _ in cell]
        size = [b - a for a, b in cell]
        if shape and draw(st.booleans()):
            dim = draw(st.integers(0, len(shape) - 1))
            first = draw(st.integers(0, size[dim]))
            second = [o + first * (d == dim) for d, o in enumerate(offset)]
            blocks.append(block(value, second, [n - first * (d == dim) for d, n in enumerate(size)]))
            size[dim] = first
        blocks.append(block(value, offset, size))
    return value, draw(st.permutations(blocks))


@given(case=cut_tensors(), data=st.data())
def test_any_partition_into_blocks_is_joined_exactly(case: tuple[np.ndarray, list[Block]], data: st.DataObject) -> None:
    value, blocks = case
    complete = files(value, blocks)
    assert complete.read("t").dtype == value.dtype
    assert np.array_equal(complete.read("t"), value)
    starts = [data.draw(st.integers(0, size - 1)) for size in value.shape]
    index = [slice(start, data.draw(st.integers(start + 1, size))) for start, size in zip(starts, value.shape)]
    assert np.array_equal(complete.read("t", index), value[tuple(index)])


@given(case=cut_tensors(), data=st.data())
def test_a_block_that_is_missing_or_double_is_named(case: tuple[np.ndarray, list[Block]], data: st.DataObject) -> None:
    value, blocks = case
    full = [b for b in blocks if np.prod(b.shape, dtype=int)]
    victim = data.draw(st.sampled_from(full))
    with pytest.raises(UserError, match=r"there: 't'.*is in no file"):
        files(value, [b for b in blocks if b is not victim])
    with pytest.raises(UserError, match=r"there: 't'.*overlap"):
        files(value, [*blocks, victim])


def test_messages_name_the_position_of_a_gap() -> None:
    value = np.zeros((4, 6), "float32")
    top = block(value, (0, 0), (2, 6), "a")
    left = block(value, (2, 0), (2, 3), "b")
    with pytest.raises(UserError) as caught:
        files(value, [top, left])
    assert str(caught.value) == "there: 't' of shape [4, 6]: [2:4, 3:6] is in no file"
    with pytest.raises(UserError, match=r"\[0:2, 0:6\] in a and \[1:4, 3:6\] in c overlap"):
        files(value, [top, left, block(value, (1, 3), (3, 3), "c")])
    for offset, shape in (((2, 3), (2, 4)), ((2, 3), (2,)), ((-1, 0), (1, 1))):
        with pytest.raises(UserError, match="in c does not lie in it"):
            files(value, [top, left, Block(offset, shape, "c", lambda index: value)])


def test_very_many_blocks_take_time_by_their_number() -> None:
    began = time.process_time()
    rows = [Block((i,), (1,), "a", lambda index: np.zeros(1)) for i in range(100_000)]
    assert "is in 100,000 blocks; at most 16,384" in str(coverage_error((100_000,), rows))
    # a gap in a grid of very many cells: eight dims, and an edge at each place of each
    ones = [Block((i,) * 8, (1,) * 8, "a", lambda index: np.zeros(1)) for i in range(200)]
    assert coverage_error((200,) * 8, ones) == "[0:1, 0:1, 0:1, 0:1, 0:1, 0:1, 0:1, 1:2] is in no file"
    filled = [Block((0,) * 7 + (i,), (1,) * 7 + (1,), "a", lambda index: np.zeros(1)) for i in range(9_000)]
    far = [Block((1,) * 7 + (i,), (1,) * 7 + (1,), "a", lambda index: np.zeros(1)) for i in range(0, 4_000, 2)]
    assert coverage_error((2,) * 7 + (9_000,), [*filled, *far]) == "1,141,000 of its elements are in no file"
    assert time.process_time() - began < 30
