"""A frozen model next to the one that is trained, such as a reference model: unsharded, in evaluation mode, with the
kernels of training.

Unlike `llmsuite.inference.load` it builds a model for passes over full sequences, several documents in a row included.
"""

from __future__ import annotations

from typing import Any

import paddle

from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.shapes import check_shapes
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.base import DeviceBackend
from llmsuite.inference.load import check_answers
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.parallelize import parallelize_inference


def build_frozen(source: ModelDirectory, device: DeviceBackend, precision: str) -> Any:
    """Build the model of a directory, a `llmsuite.models.blocks.CausalLM`, on the current device.

    Args:
        source: its values, each read once.
        device: backend of the run.
        precision: of parameters and activations.

    Raises:
        UserError: a file cannot be read, or has other shapes than its config.json says.
    """
    family = source.family
    check_answers(family)
    with paddle.LazyGuard():
        built = family.factory()(source.config, device.ops(precision))
    check_shapes(source, {name: tuple(parameter.shape) for name, parameter in built.named_parameters()})
    alone = Mesh(Degrees(1, 1, 1, 1), 0)
    plan = family.shard_plan or UNSHARDED
    dtype = device.parameter_dtype(precision)
    parallelize_inference(built, plan, alone, lambda name, shape, index: source.read(name, index), dtype)
    built.eval()
    return built
