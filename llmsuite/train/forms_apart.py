"""Which module computes something else in rollouts than in training: said where a run stops for that."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.ops import matmul
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.forms import ALONE, Rows, as_decoded, as_trained, first_apart, side
from llmsuite.inference.fused import layer_by_layer
from llmsuite.inference.load import AS_TRAINED, build_model, parameter_shapes
from llmsuite.inference.refresh import RefreshableModel
from llmsuite.models.products import Products, use_products
from llmsuite.models.shard_plan import WHOLE
from llmsuite.parallel.fill import ReadSlice
from llmsuite.parallel.parallelize import parallelize_inference
from llmsuite.specs import ModelFamily
from llmsuite.train.initial_values import initial_values

_MOST = 1 << 25
"""Parameters of a model that is built a second and a third time; of a larger one the family's smallest shape is."""
_LENGTH, _STD = 12, 0.1


def forms_apart(family: ModelFamily, config: Any, backend: DeviceBackend, precision: str) -> str:
    """The first module that gives something else in the form that draws than in the one that is trained, for a message.

    Both are built on this device alone, with the same random values: nothing of the run is touched, and no other rank
    takes part.
    """
    shapes = parameter_shapes(family, config)
    if sum(int(np.prod(shape)) for shape in shapes.values()) > _MOST:
        config = family.config_cls(**family.smoke)
        shapes = parameter_shapes(family, config)

    def read(name: str, shape: Any, index: Any) -> np.ndarray:
        return initial_values(0, name, shapes[name], _STD, index) + (len(shapes[name]) == 1)

    rows = Rows.random(config.vocab_size, min(_LENGTH, config.max_position_embeddings))
    trained = _trained(family, config, backend, precision, read)
    drawing = build_model(family, config, backend, precision, None, lambda model: read, stored=AS_TRAINED)
    refreshable = RefreshableModel(drawing, backend.ops(precision))
    refreshable.refresh(trained.named_parameters())
    layer_by_layer(drawing)
    seen = side([as_decoded(drawing, ModelDecoder(drawing).forward, rows)], precision)
    found = first_apart(side([as_trained(trained, rows)], precision), seen, trained)
    if found is None:
        return "with random values both forms of the model agree in every module"
    return f"first module that differs: {found}"


def _trained(family: ModelFamily, config: Any, backend: DeviceBackend, precision: str, read: ReadSlice) -> Any:
    ops = backend.ops(precision)
    with paddle.LazyGuard():
        model = family.factory()(config, ops)
    parallelize_inference(model, family.shard_plan or WHOLE, ALONE, read, backend.parameter_dtype(precision))
    if ops.matmul is not matmul:
        use_products(model, Products(ops))
    model.train()
    return model
