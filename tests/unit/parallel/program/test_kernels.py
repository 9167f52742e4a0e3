"""A Llama in a program has the kernels that it has op by op."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.devices.cpu import CpuBackend
from llmsuite.parallel.program.optimizer import ProgramOptimizer
from llmsuite.parallel.program.programs import StepPrograms
from llmsuite.schema.recipe import TrainSection
from llmsuite.stages.language_model import program_loss
from tests.unit import alone
from tests.unit.tiny_llama import CONFIG, FAMILY, values

TRAIN = TrainSection(
    max_steps=2,
    global_batch_size=4,
    micro_batch_size=4,
    learning_rate=0.1,
    optimizer="sgd",
    lr_schedule="constant",
    warmup_ratio=0.0,
    max_grad_norm=None,
)
B, L = 4, 12


def _llama() -> Any:
    model = FAMILY.factory()(CONFIG, CpuBackend().ops("fp32"))
    for name, value in values().items():
        if (parameter := dict(model.named_parameters()).get(name)) is not None:
            parameter.set_value(value)
    return model


def random_batch(with_documents: bool) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    weights = draw.random([B, L], "float32")
    ids = draw.integers(0, CONFIG.vocab_size, [2, B, L])
    found = {"input_ids": ids[0], "targets": ids[1], "weights": weights / weights.sum()}
    return found | ({"document_starts": np.repeat([[0] * 5 + [5] * 7], B, 0)} if with_documents else {})


@pytest.mark.parametrize("with_documents", [False, True])
def test_equals_op_by_op(with_documents: bool) -> None:
    model, other = _llama(), _llama()
    parameters, batch = dict(model.named_parameters()), random_batch(with_documents)
    programs = StepPrograms(model, ProgramOptimizer(alone.shards(parameters), TRAIN, 2), program_loss)
    told = programs.run(1, batch, 1)
    sums = program_loss(other, {name: paddle.to_tensor(array) for name, array in batch.items()})
    sums["loss"].backward()
    assert told["loss"] == pytest.approx(float(sums["loss"]), rel=1e-6)
    for name, parameter in other.named_parameters():
        expected = parameter.numpy() - 0.1 * parameter.grad.numpy()
        assert np.allclose(parameters[name].numpy(), expected, rtol=1e-5, atol=1e-6), name
    made, layers = programs.operations(), CONFIG.num_hidden_layers
    kernels = {"attention": layers, "rms_norm": 2 * layers + 1, "rotary": 2 * layers, "swiglu": layers}
    for kernel, count in {**kernels, "cross_entropy": 1}.items():
        assert made[f"custom_op.llmsuite_{kernel}"] == made[f"custom_op.llmsuite_{kernel}_grad"] == count, kernel
