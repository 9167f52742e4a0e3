"""A model from its directory, ready to answer."""

from __future__ import annotations

from typing import Any

from llmsuite.checkpoint.fill import fill_parameters
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.devices.base import DeviceBackend
from llmsuite.errors import UserError
from llmsuite.models.head import head_of
from llmsuite.plugins.hookspecs import ModelFamily


def load_model(source: ModelDirectory, backend: DeviceBackend) -> Any:
    """Build the model on the current device in float32, in evaluation mode.

    Raises:
        UserError: it is a reward model, which gives answers a score and none itself.
    """
    if head_of(source.config) == "score":
        raise UserError(f"{source.path}: is a reward model, which scores answers and gives none")
    model = source.family.factory()(source.config, backend.ops("fp32"))
    fill_parameters(model, source)
    model.eval()
    return model


def parameter_shapes(family: ModelFamily, config: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of a model, by our names; no parameter is made."""
    import paddle

    from llmsuite.devices.ops import Ops

    with paddle.LazyGuard():
        model = family.factory()(config, Ops())
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
