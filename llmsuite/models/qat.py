"""Quantisation-aware training: linear layers that round inputs and weights to the int8 grid, for one card.

Values are float32 on a symmetric grid of 255 steps, q s with q from -127 to 127 (Jacob et al. 2018, arXiv 1712.05877,
section 3; the zero point is 0, as in Krishnamoorthi 2018, arXiv 1806.08342, section 2.2). Weights have a scale for each
output, the largest magnitude / 127, and so are never clipped. Inputs have one scale per layer, which is given and is
constant within a step or an evaluation. Rounding is to the nearest, ties to even (IEEE 754, as NumPy's `rint`).

Gradients pass the rounding unchanged (straight-through estimator, Bengio et al. 2013, arXiv 1308.3432), and are zero
for inputs that are clipped.

Shapes: I inputs and O outputs of a matrix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import paddle
from paddle import nn

from llmsuite.base.typing import Tensor
from llmsuite.devices.ops import identity
from llmsuite.models.blocks import is_mtp
from llmsuite.models.int8_grid import LEAST, LEVELS
from llmsuite.models.linear import WithLinear, is_plain_linear
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.models.targets import pick_modules


def weight_scale(weight: Tensor) -> Tensor:
    """The scale of each output of a weight [I, O], [O] in float32: the largest magnitude / 127."""
    return _float32(weight.detach()).abs().max(0).clip(min=LEAST) * (1.0 / LEVELS)


def fake_quantize_weight(weight: Tensor) -> Tensor:
    """round(w / s) s of a weight [I, O]; its gradient is passed to the weight unchanged."""
    wide = _float32(weight).detach()  # cast first: Paddle 3.3.1 has no `detach` of 16 bits in programs on CPUs
    scale = weight_scale(wide)
    rounded = (paddle.round(wide / scale) * scale).astype(weight.dtype)
    if weight.stop_gradient:
        return rounded
    own = wide if wide.dtype == weight.dtype else wide.astype(weight.dtype)
    # a zero that carries the gradient: w + (rounded - w) would not be on the grid, to the last bit
    return rounded + (weight - own)


def fake_quantize(x: Tensor, scale: float) -> Tensor:
    """clip(round(x / s), -127, 127) s; its gradient is passed unchanged where |x| <= 127 s, and zero elsewhere."""
    own = x.detach()
    wide = _float32(own)
    rounded = (paddle.round(wide * (1.0 / scale)).clip(-LEVELS, LEVELS) * scale).astype(x.dtype)
    if x.stop_gradient:
        return rounded
    inside = (wide.abs() <= LEVELS * scale).astype(x.dtype)
    return rounded + (x - own) * inside


class FakeQuantLinear(nn.Layer, WithLinear):
    """A linear layer with fake-quantised inputs and weight, and the parameters of a plain one; the bias is not
    rounded."""

    def __init__(self, linear: nn.Linear, rounds_weight: bool):
        """
        Args:
            linear: the layer it replaces.
            rounds_weight: False where the weight is already on the grid.
        """
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.rounds_weight = rounds_weight
        self.input_scale: float | None = None
        """Scale of the inputs; without one they are not rounded."""
        self.is_observing = False
        """True while the layer records the largest magnitude of its inputs."""
        self.token_mask: Tensor | None = None
        """[B, L]: true for tokens, false for padding; None for all. Padding is not observed: its amount depends on how
        a batch was packed."""
        self.largest: Tensor | None = None
        """Scalar: the largest magnitude of the inputs observed on this rank since this was last set to None."""
        self.local_part: Callable[[Tensor], Tensor] = identity
        """Maps the inputs to this rank's shard before they are observed."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        if self.is_observing:
            self._observe(self.local_part(x.detach()))
        if self.input_scale is not None:
            x = fake_quantize(x, self.input_scale)
        weight = fake_quantize_weight(self.weight) if self.rounds_weight else self.weight
        return self.linear(x, weight, self.bias)

    @paddle.no_grad()
    def _observe(self, x: Tensor) -> None:
        magnitudes = x.abs()
        if self.token_mask is not None and x.ndim == 3:  # after the layers only supervised tokens are left, [N, I]
            magnitudes = paddle.where(self.token_mask.unsqueeze(-1), magnitudes, paddle.zeros_like(magnitudes))
        largest = magnitudes.max().astype("float32")
        self.largest = largest if self.largest is None else paddle.maximum(self.largest, largest)


def rounded_modules(model: nn.Layer, plan: ShardPlan, patterns: Sequence[str] | None) -> list[str]:
    """Names of the linear layers of an unsharded model that are fake-quantised (see `pick_modules`): not routed
    experts, nor MTP layers, which generation does not use."""
    modules = list(model.named_sublayers())
    mtp = tuple(f"{name}." for name, module in modules if is_mtp(module))
    candidates = [name for name, module in modules if is_plain_linear(module) and not name.startswith(mtp)]
    return pick_modules(candidates, plan, patterns, "qat.target_modules")


def fake_quantize_layers(model: nn.Layer, modules: Sequence[str], rounds_weight: bool) -> None:
    """Replace these linear layers by `FakeQuantLinear`."""
    found = dict(model.named_sublayers(include_self=True))
    for name in modules:
        owner, _, attribute = name.rpartition(".")
        setattr(found[owner], attribute, FakeQuantLinear(found[name], rounds_weight))


def fake_quantized(model: nn.Layer) -> Iterator[tuple[str, FakeQuantLinear]]:
    """The fake-quantised layers of a model by name."""
    return ((name, module) for name, module in model.named_sublayers() if isinstance(module, FakeQuantLinear))


@contextlib.contextmanager
def observing(layers: Collection[FakeQuantLinear]) -> Iterator[None]:
    """While active, these layers record the largest magnitude of their inputs."""
    for layer in layers:
        layer.is_observing = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_observing = False


def _float32(x: Tensor) -> Tensor:
    return x if x.dtype == paddle.float32 else x.astype("float32")
