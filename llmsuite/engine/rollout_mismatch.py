"""Diagnosis of differences between the sampling model and the trained model: the first module that differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from llmsuite.base.typing import ReadSlice
from llmsuite.contract.specs import ModelFamily
from llmsuite.devices.base import DeviceBackend
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.fused import disable_decoder_kernels
from llmsuite.inference.load import AS_TRAINED, build_model, parameter_shapes
from llmsuite.inference.parity import ALONE, TokenRows, first_difference, record_decoding, record_training, side
from llmsuite.inference.refresh import RefreshableModel
from llmsuite.models.initial_values import initial_values
from llmsuite.models.linear_ops import LinearOps, use_linear_ops
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.parallel.parallelize import parallelize_inference

_MAX_PARAMETERS = 1 << 25
"""Models with more parameters are replaced by the smoke shape of their family, as two more copies are built."""
_LENGTH = 12
_STD = 0.1


def find_rollout_mismatch(family: ModelFamily, config: Any, backend: DeviceBackend, precision: str) -> str:
    """Find the first module whose output differs between the sampling model and the trained model; returns a message.

    Both are built on this device, with the same random values: the state of the run is not used, and no other rank
    takes part.
    """
    shapes = parameter_shapes(family, config)
    if sum(int(np.prod(shape)) for shape in shapes.values()) > _MAX_PARAMETERS:
        config = family.config_cls(**family.smoke)
        shapes = parameter_shapes(family, config)

    def read(name: str, shape: Any, index: Any) -> np.ndarray:
        return initial_values(0, name, shapes[name], _STD, index) + (len(shapes[name]) == 1)

    rows = TokenRows.random(config.vocab_size, min(_LENGTH, config.max_position_embeddings))
    trained = _trained(family, config, backend, precision, read)
    sampler = build_model(family, config, backend, precision, None, lambda model: read, packed=AS_TRAINED)
    refreshable = RefreshableModel(sampler, backend.ops(precision))
    refreshable.refresh(trained.named_parameters())
    disable_decoder_kernels(sampler)
    sampled = side([record_decoding(sampler, ModelDecoder(sampler).forward, rows)], precision)
    found = first_difference(side([record_training(trained, rows)], precision), sampled, trained)
    if found is None:
        return "with random values both forms of the model agree in every module"
    return f"first module that differs: {found}"


def _trained(family: ModelFamily, config: Any, backend: DeviceBackend, precision: str, read: ReadSlice) -> Any:
    ops = backend.ops(precision)
    with paddle.LazyGuard():  # the next line fills its parameters
        model = family.factory()(config, ops)
    parallelize_inference(model, family.shard_plan or UNSHARDED, ALONE, read, backend.parameter_dtype(precision))
    if ops.matmuls.has_device_matmul:
        use_linear_ops(model, LinearOps(ops))
    model.train()
    return model
