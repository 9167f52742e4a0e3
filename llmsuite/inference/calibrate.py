"""Rounds the matrices of a model's layers to 4 bits by what its layers see of given texts, see `models.gptq`.

The values of nf4 and fp4 are written as an ordinary model, those of int4 as a GPTQ checkpoint. `--precision` of the
same name stores them without another error. Layers follow each other: each one sees what the rounded ones in front of
it make of the texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 by it)
import numpy as np
import paddle
from paddle import nn

from llmsuite.checkpoint.finite_model import checked
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.shapes import check_shapes
from llmsuite.checkpoint.tensors import HeldTensors
from llmsuite.devices.ops import Ops
from llmsuite.errors import UserError
from llmsuite.inference.next_logits import uncovered
from llmsuite.inference.packing import block_format
from llmsuite.models.gptq import rounded_by_inputs
from llmsuite.models.hf_tensors import HfTensors
from llmsuite.progress import track
from llmsuite.typing import Tensor

_ROWS = 8
"""Windows that go through a layer at once."""
_LEAST_GROUP, _PER_WORD = 32, 8
"""What kernels for GPTQ checkpoints take: inputs of a group, outputs of a word of zeros."""


def windows_of(texts: Sequence[Sequence[int]], length: int, most: int) -> np.ndarray:
    """Token ids of texts, one behind the other, as windows [N, L]; at most so many.

    Raises:
        UserError: they are too short for one window.
    """
    ids = [token for text in texts for token in text][: length * most]
    if len(ids) < length:
        raise UserError(f"the texts have {len(ids)} tokens; one window of --max_length {length} needs more")
    return np.asarray(ids[: len(ids) // length * length], "int64").reshape(-1, length)


def check_layers(source: ModelDirectory) -> None:
    """Raise UserError for a model with layers that are not calibrated: experts do not see all tokens, and some matrices
    are no layers of their own."""
    with paddle.LazyGuard():
        model = source.family.factory()(source.config, Ops())
    if reason := uncovered(model):
        raise UserError(
            f"{source.path}: is of a kind that is not calibrated ({source.family.name}): {reason}. `--precision` of "
            "generate, serve and eval rounds it as it is loaded"
        )


@paddle.no_grad()
def calibrated(source: ModelDirectory, windows: np.ndarray, precision: str) -> ModelDirectory:
    """A model whose layers are rounded, to be written; with a progress bar.

    Args:
        source: the model, which `check_layers` has seen.
        windows: token ids, [N, L].
        precision: nf4, fp4 or int4.

    Raises:
        UserError: a value is not finite.
    """
    source = checked(source)
    model = source.family.factory()(source.config, Ops())
    check_shapes(source, {name: tuple(p.shape) for name, p in model.named_parameters()})
    values = {name: np.asarray(source.read(name)) for name in source.names}
    for name, parameter in model.named_parameters():
        parameter.set_value(values[name].astype("float32"))
    model.eval()
    states = [model.embed(paddle.to_tensor(windows[i : i + _ROWS])) for i in range(0, len(windows), _ROWS)]
    inputs = model.layer_inputs(0, windows.shape[1], states[0].dtype)
    for number, layer in enumerate(track(model.model.layers, "rounding layers")):
        for name, (linear, hessian) in _seen(layer, states, inputs).items():
            weight = f"model.layers.{number}.{name}.weight"
            found = rounded_by_inputs(linear.weight.numpy(), hessian, block_format(precision, len(hessian)))
            linear.weight.set_value(found)
            # codes times float16 scales have too many bits for a 16 bit number
            values[weight] = found if precision == "int4" else found.astype(values[weight].dtype)
        states = [layer(state, *inputs)[0] for state in states]
    tensors = {name: HfTensors((name,)) for name in values}
    held = HeldTensors(values, source.files.paths)
    return dataclasses.replace(source, layout="hf", tensors=tensors, files=held, linears_transposed=False, is_fp8=False)


def matrices_of(model: ModelDirectory) -> list[str]:
    """The parameters that `calibrated` rounds, by our names."""
    names, layers = model.family.names(), "model.layers."
    return [name for name in model.names if name.startswith(layers) and names.is_linear(name)]


def group_of(model: ModelDirectory) -> int:
    """Inputs of a block of int4, which a GPTQ checkpoint has for all matrices alike.

    Raises:
        UserError: the model has no such number, or its matrices cannot be stored so.
    """
    shapes = {name: model.spec(name).shape for name in matrices_of(model)}
    blocks = {block_format("int4", num_inputs).block for num_inputs, _ in shapes.values()}
    odd = next((name for name, shape in shapes.items() if shape[1] % _PER_WORD), None)
    if len(blocks) != 1 or odd is not None or min(blocks) < _LEAST_GROUP:
        sizes = sorted({shape[0] for shape in shapes.values()})
        why = f"{odd} has {shapes[odd][1]} outputs" if odd else f"inputs are {', '.join(map(str, sizes))}"
        raise UserError(
            f"{model.path}: --precision int4 has groups of 64 inputs in all matrices, or of {_LEAST_GROUP}, and "
            f"outputs that are a multiple of {_PER_WORD}; here {why}. Choose nf4"
        )
    return blocks.pop()


def _seen(layer: Any, states: Sequence[Tensor], inputs: Sequence[Any]) -> dict[str, tuple[nn.Linear, np.ndarray]]:
    """The matrices of a layer, each with the sum of x xᵀ over its inputs, [I, I]."""
    found = {name: module for name, module in layer.named_sublayers() if type(module) is nn.Linear}
    sums: dict[str, np.ndarray] = {}

    def watch(name: str) -> Callable[..., None]:
        def add(module: Any, given: Any) -> None:
            x = given[0].reshape([-1, given[0].shape[-1]])
            sums[name] = sums.get(name, 0.0) + paddle.matmul(x, x, transpose_x=True).numpy().astype("float64")

        return add

    hooks = [module.register_forward_pre_hook(watch(name)) for name, module in found.items()]
    for state in states:
        layer(state, *inputs)
    for hook in hooks:
        hook.remove()
    return {name: (module, sums[name]) for name, module in found.items()}
