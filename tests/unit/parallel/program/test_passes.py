"""Passes of Paddle's over programs, which a recipe names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.parallel.program.layout import MeshLayout
from llmsuite.parallel.program.optimizer import ProgramOptimizer
from llmsuite.parallel.program.passes import check_passes, kernels_of
from llmsuite.parallel.program.programs import Options, StepPrograms
from tests.support import alone
from tests.support.step_programs import SGD, Product, make_batch


def test_what_paddle_does_not_have() -> None:
    check_passes(["eliminate_transpose", "fused_gemm_epilogue_pass"])
    with pytest.raises(UserError, match=r"engine.fused_passes: Paddle .* has no pass 'fused_gemm'; .* end in _pass"):
        check_passes(["eliminate_transpose", "fused_gemm"])


def _loss(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """With a term that is computed twice, and one that turns what has a dim of one."""
    scores = model(inputs["x"])
    return {"loss": (scores.square() + scores.square() + scores.unsqueeze(0).transpose([1, 0, 2]).squeeze(1)).sum()}


def _run(parts: int, *passes: str) -> tuple[dict[str, Any], Any, Counter[str]]:
    model = Product()
    optimizer = ProgramOptimizer(alone.shards({"vector": model.vector}), SGD, 4)
    programs = StepPrograms(MeshLayout(model), optimizer, _loss, options=Options(passes=passes))
    outputs = programs.run(1, make_batch(1), parts)
    (program,) = programs._programs.values()
    plan = program.run._engine._job_plan
    made = [program.run._engine.main_program] if plan is None else map(plan.ir_program, plan.job_types())
    return outputs, model.vector.numpy(), Counter(op.name() for part in made for op in part.global_block().ops)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("name", "goes"),
    [("common_subexpression_elimination_pass", "pd_op.square"), ("eliminate_transpose", "pd_op.transpose")],
)
def test_a_program_is_changed_and_computes_the_same(parts: int, name: str, goes: str) -> None:
    plain, values, made = _run(parts)
    outputs, changed, made_by_pass = _run(parts, name)
    assert made_by_pass[goes] < made[goes]
    assert outputs == pytest.approx(plain, rel=1e-6)
    assert changed == pytest.approx(values, rel=1e-6)
    assert paddle.in_dynamic_mode()


def test_an_operation_that_the_device_does_not_have() -> None:
    with (
        pytest.raises(UserError, match=r"fused_passes: has put a_fused_one into the program, .* leave out .*, of a, b"),
        kernels_of(["a", "b"]),
    ):
        raise RuntimeError("(NotFound) The kernel `a_fused_one` is not registered.")
    for names, message in (((), "The kernel `x` is not registered."), (("a",), "out of memory")):
        with pytest.raises(RuntimeError, match=message), kernels_of(names):
            raise RuntimeError(message)
