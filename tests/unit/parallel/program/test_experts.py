"""Routed experts in a program compute as they do op by op, and its gates tell what they have counted."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle.base import core

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.ops import Ops
from llmsuite.models.experts import Experts, LoadBalance
from llmsuite.models.linear_ops import use_linear_ops
from llmsuite.models.moe import Gate
from llmsuite.parallel.linear_ops import TensorParallelLinearOps
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.program import experts
from llmsuite.parallel.program.experts import BALANCE_LOSS, LENGTHS, LOADS, SHARES, with_experts
from llmsuite.parallel.program.layout import MeshLayout
from llmsuite.parallel.program.optimizer import ProgramOptimizer
from llmsuite.parallel.program.programs import StepPrograms
from tests.support import alone
from tests.support.devices import cpu_backend
from tests.support.families import FAMILIES
from tests.support.program_batches import TRAIN
from tests.support.program_loss import program_loss

B = 4
L = 12
LENGTH = [12, 5, 1, 9]
SHARE = 0.2


def _model(family: str, ops: Ops) -> Any:
    spec = FAMILIES[family]
    model = spec.factory()(spec.config_cls(**spec.smoke), ops)
    draw = np.random.default_rng(3)
    for _, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.set_value(draw.normal(0, 0.1, parameter.shape).astype("float32"))
    model.train()
    return model


def _batch() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    is_token = np.arange(L) < np.array(LENGTH)[:, None]
    weights = (draw.random([B, L]) * is_token).astype("float32")
    ids = draw.integers(0, 300, [2, B, L])
    found = {"input_ids": ids[0], "targets": ids[1], "weights": weights / weights.sum()}
    return found | {LENGTHS: np.array(LENGTH), SHARES: np.full(B, SHARE, "float32")}


def _op_by_op(model: Any, batch: dict[str, np.ndarray]) -> tuple[list[float], list[float], float]:
    """Its loads, its balance loss, and its loss; gradients are there afterwards."""
    gates = [module for module in model.sublayers() if isinstance(module, Gate)]
    for gate in gates:
        gate.balance = LoadBalance()
        gate.balance.factor = SHARE
    starts = np.where(np.arange(L) < batch[LENGTHS][:, None], 0, -1)
    given = {name: paddle.to_tensor(batch[name]) for name in ("input_ids", "targets", "weights")}
    hidden, _ = model.hidden_states(given["input_ids"], document_starts=paddle.to_tensor(starts))
    nll = model.token_nll(hidden.flatten(0, 1), given["targets"].flatten())
    loss = (nll * given["weights"].flatten()).sum()
    loss.backward()
    loads = np.concatenate([gate.balance.load.numpy() for gate in gates])
    return loads.tolist(), [SHARE * float(sum(gate.balance.loss for gate in gates))], float(loss)


@pytest.mark.parametrize("family", ["qwen_moe", "deepseek", "ernie_moe"])
@pytest.mark.parametrize("is_plain", [False, True], ids=["kernels", "plain"])
def test_equals_op_by_op(family: str, is_plain: bool) -> None:
    ops = Ops() if is_plain else CpuBackend().ops("fp32")
    model = _model(family, ops)
    other = _model(family, ops)
    parameters = dict(model.named_parameters())
    batch = _batch()
    programs = StepPrograms(
        MeshLayout(model), ProgramOptimizer(alone.shards(parameters), TRAIN, 2), with_experts(program_loss)
    )
    outputs = programs.run(1, batch, 1)
    loads, balance, loss = _op_by_op(other, batch)
    assert outputs[LOADS].tolist() == loads
    assert outputs[BALANCE_LOSS] == pytest.approx(balance[0], rel=1e-6)
    assert outputs["loss"] == pytest.approx(loss, rel=1e-6)
    for name, parameter in other.named_parameters():
        change = np.zeros(parameter.shape) if parameter.grad is None else 0.1 * parameter.grad.numpy()
        assert np.allclose(parameters[name].numpy(), parameter.numpy() - change, rtol=1e-5, atol=1e-6), name
    made = programs.operations()
    count = 3 * sum(isinstance(module, Gate) for module in model.sublayers())
    for name in ("custom_op.llmsuite_grouped_product", "custom_op.llmsuite_grouped_product_grad"):
        assert made[name] == (0 if is_plain else count)
    assert not any("forward" in module.__dict__ for module in model.sublayers() if isinstance(module, Gate))


def test_products_are_rounded_where_those_op_by_op_are() -> None:
    """But for a number of inputs that are rounded to another side; a program in float32 is off by more."""
    backend = cpu_backend(multiplies_bf16=False)
    changes = []
    batch = _batch()
    for precision, compiles in (("bf16", False), ("bf16", True), ("fp32", True)):
        ops = backend.ops(precision)
        model = _model("qwen_moe", ops)
        if precision == "bf16":
            use_linear_ops(model, TensorParallelLinearOps(ops, Mesh(Degrees(1, 1, 1, 1), 0)))
        parameters = dict(model.named_parameters())
        before = {name: parameter.numpy().astype("float64") for name, parameter in parameters.items()}
        if compiles:
            optimizer = ProgramOptimizer(alone.shards(parameters), TRAIN, 2)
            StepPrograms(MeshLayout(model), optimizer, with_experts(program_loss)).run(1, batch, 1)
        else:
            _op_by_op(model, batch)
            for parameter in parameters.values():
                parameter.set_value(parameter - 0.1 * parameter.grad)
        changes.append({name: parameters[name].numpy() - value for name, value in before.items()})
    by_op, by_program, in_float32 = changes
    for name in (name for name in by_op if ".experts." in name):
        rounding = np.linalg.norm(in_float32[name] - by_op[name])
        assert rounding > 1e-4 * np.linalg.norm(by_op[name])
        assert np.linalg.norm(by_program[name] - by_op[name]) <= rounding / 4, name


def test_matrices_that_are_frozen_get_no_gradient() -> None:
    model = _model("deepseek", CpuBackend().ops("fp32"))
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = ".experts." in name or parameter.stop_gradient
    parameters = dict(model.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if not parameter.stop_gradient}
    before = {name: parameter.numpy() for name, parameter in parameters.items()}
    programs = StepPrograms(
        MeshLayout(model), ProgramOptimizer(alone.shards(trained), TRAIN, 2), with_experts(program_loss)
    )
    programs.run(1, _batch(), 1)
    made = programs.operations()
    assert made["custom_op.llmsuite_grouped_rows"] == made["custom_op.llmsuite_grouped_rows_grad"] > 0
    assert made["custom_op.llmsuite_grouped_product"] == 0
    for name, parameter in parameters.items():
        assert np.array_equal(parameter.numpy(), before[name]) == (name not in trained), name


def test_inputs_of_products_are_not_kept() -> None:
    """Rows of tokens, and what the last product takes of them: the same numbers, and a backward pass that asks for what
    the three products made alone."""
    outputs = []
    batch = _batch()
    num_rows = B // 2 * L * FAMILIES["qwen_moe"].smoke["num_experts_per_tok"]
    for is_kept in (False, True):
        model = _model("qwen_moe", CpuBackend().ops("fp32"))
        optimizer = ProgramOptimizer(alone.shards(dict(model.named_parameters())), TRAIN, 2)
        trained = mock.patch.object(experts, "_is_trained", return_value=False) if is_kept else contextlib.nullcontext()
        with trained:
            programs = StepPrograms(MeshLayout(model), optimizer, with_experts(program_loss))
            outputs.append(programs.run(1, batch, 2))
        (program,) = programs._programs.values()
        plan = program.run._engine._job_plan
        parts = {name: plan.ir_program(name) for name in plan.job_types()}
        shapes_alone = core.get_no_need_buffer_values(parts)["forward"]
        kept = parts["backward"].global_block().kwargs().items()
        needed = [list(value.shape) for name, value in kept if name not in shapes_alone]
        num_kept = sum(len(shape) == 2 and shape[0] == num_rows for shape in needed)
        num_layers = sum(isinstance(module, Experts) for module in model.sublayers())
        assert num_kept == (5 if is_kept else 3) * num_layers
    assert outputs[0].pop(LOADS).tolist() == outputs[1].pop(LOADS).tolist()
    assert outputs[0] == pytest.approx(outputs[1], rel=1e-6)
