"""Constants of programs: equal small ones are one, unless somebody writes to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from llmsuite.parallel.program.constants import share_constants
from llmsuite.parallel.program.layout import MeshLayout
from llmsuite.parallel.program.optimizer import ProgramOptimizer
from llmsuite.parallel.program.programs import StepPrograms
from tests.support import alone
from tests.support.step_programs import ADAMW, make_batch


class Vectors(nn.Layer):
    """Rows times each of several vectors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        ones = nn.initializer.Constant(1.0)
        self.names = [f"vector_{number}" for number in range(count)]
        for name in self.names:
            setattr(self, name, self.create_parameter([3], default_initializer=ones))

    def forward(self, x: Any) -> Any:
        return sum((x * getattr(self, name)).sum(-1) for name in self.names)


def _of_update(count: int) -> Counter[str]:
    """Operations of the program that updates so many vectors."""
    model = Vectors(count)
    optimizer = ProgramOptimizer(alone.shards(dict(model.named_parameters())), ADAMW, 4)
    programs = StepPrograms(
        MeshLayout(model), optimizer, lambda net, given: {"loss": (net(given["x"]) * given["weights"]).square().sum()}
    )
    programs.run(1, make_batch(1), 2)
    (program,) = programs._programs.values()
    block = program.run._engine._job_plan.ir_program("optimize").global_block()
    return Counter(operation.name() for operation in block.ops)


def test_an_update_has_no_more_of_them_for_more_parameters() -> None:
    few = _of_update(2)
    many = _of_update(5)
    for name in ("pd_op.full", "pd_op.full_int_array", "pd_op.logical_not"):
        assert few[name] == many[name] > 0, name
    assert (few["pd_op.adamw_"], many["pd_op.adamw_"]) == (2, 5)


def _one_value(number: float) -> Any:
    return paddle.full([1], number)


@pytest.mark.parametrize(
    ("make", "constants"),
    [
        (lambda: [_one_value(2.0) + _one_value(2.0), _one_value(2.0) * _one_value(3.0)], 2),
        (lambda: [paddle.zeros([2, 1]).sum(0), paddle.zeros([2, 1]).sum(1)], 4),  # both large; over two dims
        (lambda: [paddle._C_ops.add_(_one_value(2.0), _one_value(3.0)), _one_value(2.0) * 1.5], 4),  # 1.5 and a bias
        (lambda: [_one_value(2.0) + paddle.full([1], 2, "float64").astype("float32")], 2),
    ],
    ids=["equal", "large", "written", "other dtype"],
)
def test_which_are_one(make: Callable[[], list[Any]], constants: int) -> None:
    """Results are those of the program that has all of them."""
    paddle.enable_static()
    try:
        outputs = []
        for share in (False, True):
            program = paddle.static.Program()
            with paddle.static.program_guard(program):
                results = make()
            if share:
                share_constants(SimpleNamespace(_engine=SimpleNamespace(_job_plan=None, main_program=program)))
                names = Counter(operation.name() for operation in program.global_block().ops)
                assert names["pd_op.full"] + names["pd_op.full_int_array"] == constants, names
            outputs.append(paddle.static.Executor(paddle.CPUPlace()).run(program, fetch_list=results))
    finally:
        paddle.disable_static()
    for unshared, shared in zip(*outputs):
        np.testing.assert_array_equal(unshared, shared)
