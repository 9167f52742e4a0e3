"""A second model beside the one that is trained: whole on this rank, in evaluation mode, with the kernels of training.

Unlike `llmsuite.inference.load` it makes a model for passes over whole sequences, several documents in a row included.
"""

from __future__ import annotations

from typing import Any

import paddle

from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.shapes import check_shapes
from llmsuite.devices.base import DeviceBackend
from llmsuite.inference.load import check_answers
from llmsuite.models.shard_plan import WHOLE
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.parallelize import parallelize_inference
from llmsuite.schema.degrees import Degrees


def build_frozen(source: ModelDirectory, device: DeviceBackend, precision: str) -> Any:
    """The model of a directory, `llmsuite.models.blocks.CausalLM`, on this device.

    Args:
        source: its values, each read once; the device that it goes to is the current one.
        device: of the run.
        precision: of parameters and activations.

    Raises:
        UserError: a file cannot be read, or has other shapes than its config.json says.
    """
    family = source.family
    check_answers(family)
    with paddle.LazyGuard():
        built = family.factory()(source.config, device.ops(precision))
    check_shapes(source, {name: tuple(parameter.shape) for name, parameter in built.named_parameters()})
    alone, plan = Mesh(Degrees(1, 1, 1, 1), 0), family.shard_plan or WHOLE
    dtype = device.parameter_dtype(precision)
    parallelize_inference(built, plan, alone, lambda name, shape, index: source.read(name, index), dtype)
    built.eval()
    return built
