"""Workarounds for programs with 16-bit parameters on CPUs; programs themselves are tested in `tests/multi`."""

from __future__ import annotations

from collections.abc import Iterator

import paddle
import pytest

from llmsuite.base.typing import Tensor
from llmsuite.parallel.program.masters import without_shared_memory


@pytest.fixture
def program() -> Iterator[paddle.static.Program]:
    made = paddle.static.Program()
    paddle.enable_static()
    try:
        with paddle.static.program_guard(made):
            yield made
    finally:
        paddle.disable_static()


def _shared(program: paddle.static.Program, dtype: str) -> str:
    """The operation that a tensor in the memory of another one is made by."""
    x: Tensor = paddle.static.data(f"x of {dtype}", [2, 3], dtype)
    paddle._C_ops.share_data_(x)
    return str(program.global_block().ops[-1].name())


def test_bfloat16_is_copied(program: paddle.static.Program) -> None:
    with without_shared_memory():
        assert _shared(program, "bfloat16") == "pd_op.assign"
        assert _shared(program, "float32") == "pd_op.share_data_"
    assert _shared(program, "float16") == "pd_op.share_data_"


def test_paddle_has_no_shared_bfloat16(program: paddle.static.Program) -> None:
    """If it has, what is tested above can go."""
    with pytest.raises(TypeError, match="expected_dtype"):
        _shared(program, "bfloat16")
