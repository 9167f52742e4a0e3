"""A Llama in a program has the kernels that it has op by op."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.ops import Ops
from llmsuite.models.linear_ops import use_linear_ops
from llmsuite.parallel.linear_ops import TensorParallelLinearOps
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.program.layout import MeshLayout
from llmsuite.parallel.program.optimizer import ProgramOptimizer
from llmsuite.parallel.program.programs import Options, StepPrograms
from llmsuite.parallel.recompute import recompute_layers
from tests.support import alone
from tests.support.devices import cpu_backend
from tests.support.program_batches import TRAIN, random_batch
from tests.support.program_loss import program_loss
from tests.support.tiny_llama import CONFIG, FAMILY, values


def _llama(ops: Ops | None = None) -> Any:
    model = FAMILY.factory()(CONFIG, ops or CpuBackend().ops("fp32"))
    for name, value in values().items():
        if (parameter := dict(model.named_parameters()).get(name)) is not None:
            parameter.set_value(value)
    return model


@pytest.mark.parametrize("with_documents", [False, True])
def test_equals_op_by_op(with_documents: bool) -> None:
    model = _llama()
    other = _llama()
    parameters = dict(model.named_parameters())
    batch = random_batch(with_documents)
    programs = StepPrograms(MeshLayout(model), ProgramOptimizer(alone.shards(parameters), TRAIN, 2), program_loss)
    outputs = programs.run(1, batch, 1)
    sums = program_loss(other, {name: paddle.to_tensor(array) for name, array in batch.items()})
    sums["loss"].backward()
    assert outputs["loss"] == pytest.approx(float(sums["loss"]), rel=1e-6)
    for name, parameter in other.named_parameters():
        expected = parameter.numpy() - 0.1 * parameter.grad.numpy()
        assert np.allclose(parameters[name].numpy(), expected, rtol=1e-5, atol=1e-6), name
    made = programs.operations()
    layers = CONFIG.num_hidden_layers
    kernels = {"attention": layers, "rms_norm": 2 * layers + 1, "rotary": 2 * layers, "swiglu": layers}
    for kernel, count in {**kernels, "cross_entropy": 1}.items():
        assert made[f"custom_op.llmsuite_{kernel}"] == made[f"custom_op.llmsuite_{kernel}_grad"] == count, kernel


@pytest.mark.parametrize("by_instructions", [False, None], ids=["by rounding", "as this processor has it"])
def test_products_in_bf16_are_those_op_by_op(by_instructions: bool | None) -> None:
    """But for a number of products whose inputs are rounded to another side; a program in float32 is off by more."""
    backend = cpu_backend(multiplies_bf16=by_instructions)
    changes = []
    batch = random_batch(False)
    for precision, compiles in (("bf16", False), ("bf16", True), ("fp32", True)):
        ops = backend.ops(precision)
        model = _llama(ops)
        if precision == "bf16":
            use_linear_ops(model, TensorParallelLinearOps(ops, Mesh(Degrees(1, 1, 1, 1), 0)))
        parameters = dict(model.named_parameters())
        before = {name: parameter.numpy().astype("float64") for name, parameter in parameters.items()}
        if compiles:
            programs = StepPrograms(
                MeshLayout(model), ProgramOptimizer(alone.shards(parameters), TRAIN, 2), program_loss
            )
            programs.run(1, batch, 1)
            made = programs.operations()
            name = f"custom_op.llmsuite_{backend.kernels_of('matmul', 'bf16').kernels('bf16')['program_matmul']}"
            count = (7 * CONFIG.num_hidden_layers + 1) * (precision == "bf16")
            assert made[name] == made[f"{name}_grad"] == count
            assert (made["pd_op.matmul"] == 0) == (precision == "bf16")
        else:
            program_loss(model, {name: paddle.to_tensor(array) for name, array in batch.items()})["loss"].backward()
            for parameter in parameters.values():
                parameter.set_value(parameter - 0.1 * parameter.grad)
        changes.append({name: parameters[name].numpy() - value for name, value in before.items()})
    by_op, by_program, in_float32 = changes
    for name, change in by_op.items():
        rounding = np.linalg.norm(in_float32[name] - change)
        assert 1e-4 * np.linalg.norm(change) < rounding
        assert np.linalg.norm(by_program[name] - change) <= rounding / 4, name


@pytest.mark.parametrize("every", [1, 2])
def test_layers_that_are_computed_again(every: int) -> None:
    batch = random_batch(False)
    found = []
    layers = CONFIG.num_hidden_layers
    for again in (False, True):
        model = _llama()
        if again:
            recompute_layers(model, FAMILY.shard_plan, every)
        model.train()
        parameters = dict(model.named_parameters())
        optimizer = ProgramOptimizer(alone.shards(parameters), TRAIN, 2)
        programs = StepPrograms(MeshLayout(model), optimizer, program_loss, options=Options(recompute=again))
        programs.run(1, batch, 1)
        found.append({name: parameter.numpy() for name, parameter in parameters.items()})
        times = layers + again * -(-layers // every)
        made = programs.operations()
        assert made["custom_op.llmsuite_attention"] == times
        assert made["custom_op.llmsuite_attention_grad"] == layers
    for name, value in found[0].items():
        assert np.array_equal(found[1][name], value), name
