"""Calibrated quantisation to 4 bits: matrices are rounded by the inputs that layers get for texts (`models.gptq`).

The values of nf4 and fp4 are written as an ordinary model, those of int4 as a GPTQ checkpoint. `--precision` of the
same name stores them without another error. Layers are rounded in order: the inputs of each one are the outputs of the
rounded layers before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 by it)
import numpy as np
import paddle
from paddle import nn

from llmsuite.base.errors import UserError
from llmsuite.base.progress import track
from llmsuite.base.typing import Tensor
from llmsuite.checkpoint.finite_model import with_finite_check
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.shapes import check_shapes
from llmsuite.checkpoint.tensors import InMemoryTensors
from llmsuite.devices.ops import Ops
from llmsuite.devices.tensors import tensor_of
from llmsuite.inference.plain_decoder import unsupported_reason
from llmsuite.models.block_quant import block_format
from llmsuite.models.gptq import rounded_by_inputs
from llmsuite.models.hf_tensors import HfTensors
from llmsuite.models.linear import is_matrix

_ROWS = 8
"""Windows in a batch."""
_LEAST_GROUP = 32
"""Fewest inputs of a group in kernels for GPTQ checkpoints."""
_PER_WORD = 8
"""Outputs whose zeros share a word in GPTQ checkpoints."""


def token_windows(texts: Sequence[Sequence[int]], length: int, most: int) -> np.ndarray:
    """Concatenate the token ids of texts, and cut them into windows [N, L].

    Args:
        texts: token ids.
        length: of a window.
        most: most windows.

    Raises:
        UserError: the texts are too short for one window.
    """
    ids = [token for text in texts for token in text][: length * most]
    if len(ids) < length:
        raise UserError(f"the texts have {len(ids)} tokens; one window of --max_length {length} needs more")
    return np.asarray(ids[: len(ids) // length * length], "int64").reshape(-1, length)


def check_calibratable(source: ModelDirectory) -> None:
    """Check that a model can be calibrated. Raises UserError for layers that cannot: experts get only some of the
    tokens, and some matrices are not linear layers."""
    with paddle.LazyGuard():  # layers are looked at, and take no memory
        model = source.family.factory()(source.config, Ops())
    if reason := unsupported_reason(model):
        raise UserError(
            f"{source.path}: models of this kind are not calibrated ({source.family.name}): {reason}. `--precision` of "
            "generate, serve and eval rounds it when it is loaded"
        )


@paddle.no_grad()
def calibrate_model(source: ModelDirectory, windows: np.ndarray, precision: str) -> ModelDirectory:
    """Round the layers of a model, with a progress bar; returns the model, to be written.

    Args:
        source: the model, which `check_calibratable` has accepted.
        windows: token ids, [N, L].
        precision: nf4, fp4 or int4.

    Raises:
        UserError: a value is not finite.
    """
    source = with_finite_check(source)
    model = source.family.factory()(source.config, Ops())
    check_shapes(source, {name: tuple(p.shape) for name, p in model.named_parameters()})
    values = {name: np.asarray(source.read(name)) for name in source.names}
    for name, parameter in model.named_parameters():
        parameter.set_value(values[name].astype("float32"))
    model.eval()
    states = [model.embed(tensor_of(windows[i : i + _ROWS])) for i in range(0, len(windows), _ROWS)]
    inputs = model.layer_inputs(0, windows.shape[1], states[0].dtype)
    for number, layer in enumerate(track(model.model.layers, "rounding layers")):
        for name, (linear, hessian) in _input_hessians(layer, states, inputs).items():
            weight = f"model.layers.{number}.{name}.weight"
            found = rounded_by_inputs(linear.weight.numpy(), hessian, block_format(precision, len(hessian)))
            linear.weight.set_value(found)
            # int4 stays float32: codes times float16 scales have too many bits for a 16 bit number
            values[weight] = found if precision == "int4" else found.astype(values[weight].dtype)
        states = [layer(state, *inputs)[0] for state in states]
    tensors = {name: HfTensors((name,)) for name in values}
    held = InMemoryTensors(values, source.files.paths)
    return dataclasses.replace(source, layout="hf", tensors=tensors, files=held, linears_transposed=False, is_fp8=False)


def rounded_matrices(model: ModelDirectory) -> list[str]:
    """The parameters that `calibrate_model` rounds, by llmsuite's names."""
    names = model.family.names()
    layers = "model.layers."
    return [name for name in model.names if name.startswith(layers) and names.is_linear(name)]


def common_group_size(model: ModelDirectory) -> int:
    """Inputs of a block of int4: in a GPTQ checkpoint all matrices have the same number.

    Raises:
        UserError: there is no common number, or the matrices do not fit the format.
    """
    shapes = {name: model.spec(name).shape for name in rounded_matrices(model)}
    blocks = {block_format("int4", num_inputs).block for num_inputs, _ in shapes.values()}
    odd = next((name for name, shape in shapes.items() if shape[1] % _PER_WORD), None)
    if len(blocks) != 1 or odd is not None or min(blocks) < _LEAST_GROUP:
        sizes = sorted({shape[0] for shape in shapes.values()})
        reason = f"{odd} has {shapes[odd][1]} outputs" if odd else f"inputs are {', '.join(map(str, sizes))}"
        raise UserError(
            f"{model.path}: --precision int4 has groups of 64 inputs in all matrices, or of {_LEAST_GROUP}, and "
            f"outputs that are a multiple of {_PER_WORD}; here {reason}. Choose nf4"
        )
    return blocks.pop()


def _input_hessians(
    layer: Any, states: Sequence[Tensor], inputs: Sequence[Any]
) -> dict[str, tuple[nn.Linear, np.ndarray]]:
    """The matrices of a layer, each with its Hessian of GPTQ: the sum of x xᵀ over its inputs, [I, I]."""
    found = {name: module for name, module in layer.named_sublayers() if is_matrix(module)}
    sums: dict[str, np.ndarray] = {}

    def make_hook(name: str) -> Callable[..., None]:
        def add(module: Any, given: Any) -> None:
            x = given[0].reshape([-1, given[0].shape[-1]])
            # accumulated in float64: a sum over all tokens of all windows
            sums[name] = sums.get(name, 0.0) + paddle.matmul(x, x, transpose_x=True).numpy().astype("float64")

        return add

    hooks = [module.register_forward_pre_hook(make_hook(name)) for name, module in found.items()]
    for state in states:
        layer(state, *inputs)
    for hook in hooks:
        hook.remove()
    return {name: (module, sums[name]) for name, module in found.items()}
