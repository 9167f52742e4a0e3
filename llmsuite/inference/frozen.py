"""A frozen model next to the one that is trained, such as a teacher: in evaluation mode, with the kernels of training,
and unsharded or split over tensor parallel ranks.

Unlike `llmsuite.inference.load` it builds a model for passes over full sequences, several documents in a row included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.base.typing import ReadSlice
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.shapes import check_shapes
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.contract.specs import ModelFamily
from llmsuite.devices.base import DeviceBackend
from llmsuite.inference.load import check_answers
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.parallelize import parallelize_inference
from llmsuite.parallel.vocabulary import build_padded, is_padded, pad_values

ALONE = Mesh(Degrees(1, 1, 1, 1), 0)
"""The mesh of a model that is complete on this rank."""


def build_frozen(source: ModelDirectory, device: DeviceBackend, precision: str, mesh: Mesh = ALONE) -> Any:
    """Build the model of a directory, a `llmsuite.models.blocks.CausalLM`, on the current device.

    Args:
        source: its values, each read once.
        device: backend of the run.
        precision: of parameters and activations.
        mesh: this rank's coordinates; the model is split over its tensor parallel group.

    Raises:
        UserError: a file cannot be read, or has other shapes than its config.json says.
    """
    check_answers(source.family)
    built = unfilled(source.family, source.config, device, precision, mesh)
    true = _true_shapes(source.family, source.config, device, precision, mesh, built)
    check_shapes(source, true)

    def read(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        return source.read(name, index)

    return filled(built, source.family, device, precision, mesh, pad_values(read, true))


def unfilled(family: ModelFamily, config: Any, device: DeviceBackend, precision: str, mesh: Mesh = ALONE) -> Any:
    """Build a model without memory for its values; `filled` gives it some. Arguments are those of `build_frozen`."""
    with paddle.LazyGuard():
        return build_padded(family, config, device.ops(precision), mesh.degrees.tp)


def filled(
    built: Any, family: ModelFamily, device: DeviceBackend, precision: str, mesh: Mesh, read: ReadSlice | None
) -> Any:
    """Fill a model of `unfilled` with values, and split it over the ranks of `mesh`. `read` returns the values of the
    parameters of the model, with the padding of the vocabulary; None on a device that has no values."""
    dtype = device.parameter_dtype(precision)
    parallelize_inference(built, family.shard_plan or UNSHARDED, mesh, read, dtype)
    built.eval()
    return built


def _true_shapes(
    family: ModelFamily, config: Any, device: DeviceBackend, precision: str, mesh: Mesh, built: Any
) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a model without the padding of its vocabulary."""
    if is_padded(config, mesh.degrees.tp):
        built = unfilled(family, config, device, precision)
    return {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
