"""Operations of a step program between gradients and update: the global norm, the decision to accept the step, and
clipping.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import tensor_of
from llmsuite.parallel import collective

_numbers = itertools.count()
LARGEST = float(np.finfo("float32").max)


def over_data(placements: Sequence[Any], dim: int | None) -> list[Any]:
    """Placements over [data, tp] of a tensor that is cut along a dim over the data ranks; replicated where `dim` is
    None."""
    return [dist.Replicate() if dim is None else dist.Shard(dim), *placements[1:]]


class StepScalar:
    """A number that changes from run to run of a program, such as a limit. It is passed in variables, because inputs
    are cut into micro-batches."""

    def __init__(self) -> None:
        self.variables: list[str] = []
        """Names of the variables, one for each read in a program."""

    def read(self, mesh: Any) -> Any:
        """Its value [1] on a mesh, in the program that is being built."""
        self.variables.append(f"step_number_{next(_numbers)}")
        everywhere = paddle.base.libpaddle.pir.create_tensor_dist_attribute(mesh, [-1], {})
        first = paddle.nn.initializer.Constant(1.0)
        return paddle.pir.core.create_persistable_value(
            "float32", [1], self.variables[-1], initializer=first, dist_attr=everywhere
        )

    def feed(self, value: float) -> dict[str, Tensor]:
        """The variables for a run with this value."""
        return {name: tensor_of(np.full([1], value, "float32")) for name in self.variables}


class NormClip(paddle.nn.ClipGradByGlobalNorm):
    """Clipping by the global norm, which also outputs the norm and decides whether the step is accepted. The norm is
    computed even without clipping."""

    def __init__(
        self,
        max_norm: float | None,
        dims: Mapping[str, int | None],
        scale: float = 1.0,
        loss_scale: StepScalar | None = None,
        expert_parallel: Collection[str] = (),
    ):
        """
        Args:
            max_norm: the limit; None for none.
            dims: by the name of a parameter, along which its gradient is cut over the data ranks.
            scale: factor of the gradients, which Paddle divides out afterwards; norm and limit are without it.
            loss_scale: another factor, which is divided out here.
            expert_parallel: names of stacks of experts where each data rank has its own. A program takes these for
                copies of one stack.
        """
        super().__init__(1.0 if max_norm is None else max_norm)
        self._max_norm = max_norm
        self._dims = dims
        self._scale = scale
        self._loss_scale = loss_scale
        self._expert_parallel = expert_parallel
        self._accepted: dict[tuple[int, ...], Any] = {}
        self._rejected: dict[tuple[int, ...], Any] = {}
        self._factors: dict[tuple[int, ...], Any] = {}
        self.variable = f"global_norm_{next(_numbers)}"
        """Name of the variable with the norm before clipping, and 1 where the step is accepted, [2]. Its number is our
        own: if programs shared a variable, only the last one built would write it, and Paddle's counters restart for
        each program (Paddle 3.3.1)."""
        self._largest_norm = StepScalar()

    @property
    def variables(self) -> set[str]:
        """Names of all variables that it adds to a program."""
        return {self.variable, *self.feed(math.inf, 1.0)}

    def feed(self, largest_norm: float, loss_scale: float) -> dict[str, Tensor]:
        """The variables that a run of the program reads.

        Args:
            largest_norm: the largest global norm of a step that is accepted; infinite to accept every finite norm.
            loss_scale: factor of the loss; 1 for a program without one.
        """
        assert loss_scale == 1 or self._loss_scale is not None
        limits = self._largest_norm.feed(largest_float32(largest_norm))
        return limits if self._loss_scale is None else {**limits, **self._loss_scale.feed(loss_scale)}

    def accepted(self, gradient: Any) -> Any:
        """True where the step is accepted, [1], on the mesh of a gradient in the program that is being built."""
        return self._accepted[_ranks(gradient)]

    def rejected(self, gradient: Any) -> Any:
        """The negation of `accepted`, made once on each mesh."""
        ranks = _ranks(gradient)
        if ranks not in self._rejected:
            self._rejected[ranks] = paddle.logical_not(self._accepted[ranks])
        return self._rejected[ranks]

    def clipped(self, gradient: Any) -> Any:
        """The clipped gradient for the update. It is called right before each update, not in `_pir_clip`: clipped
        copies of all gradients together would take as much memory as the parameters."""
        if self._factors:
            return gradient * self._factors[_ranks(gradient)]
        # a copy: Paddle 3.3.1 divides the gradient in place, and the norm may be computed after that
        return gradient if self._scale == 1 else paddle.scale(gradient, 1.0)

    def _pir_clip(self, params_grads: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Called while a program is built, with the gradients of a step; frozen parameters have none."""
        params_grads = [(p, g if g is None else self._summed(p, g)) for p, g in params_grads]
        norms = self._norms({p.name: gradient for p, gradient in params_grads if gradient is not None})
        for ranks, norm in norms.items():
            # also false for a norm that is NaN
            self._accepted[ranks] = norm.reshape([1]) <= self._largest_norm.read(norm.process_mesh)
            if collective.rank() in ranks:
                outputs = paddle.concat([norm.reshape([1]), self._accepted[ranks].astype("float32")])
                outputs.persistable = True  # otherwise it is freed before it can be read
                paddle._C_ops.set_persistable_value(outputs, self.variable)
        if self._max_norm is not None or self._loss_scale is not None:
            self._factors = {ranks: self._factor(norm) for ranks, norm in norms.items()}
        return params_grads

    def _norms(self, gradients: Mapping[str, Any]) -> dict[tuple[int, ...], Any]:
        """The norm over all gradients (by the names of their parameters), on each of their meshes, by the ranks of the
        mesh."""
        of_mesh: dict[tuple[int, ...], dict[str, Any]] = {}
        for name, gradient in gradients.items():
            of_mesh.setdefault(_ranks(gradient), {})[name] = gradient
        squares = [_sum_of_squares(found, self._expert_parallel) for found in of_mesh.values()]
        if len(squares) > 1:  # of several pipeline stages; a message has at least one dim
            squares = [square.reshape([1]) for square in squares]
        meshes = [square.process_mesh for square in squares]
        total = squares[0]
        # added on the first stage's mesh, one stage after the other, and sent back: the meshes share no ranks
        for square in squares[1:]:
            total = total + _on(meshes[0], square)
        norm = paddle.sqrt(total)
        if self._scale != 1:
            norm = norm / self._scale
        if self._loss_scale is not None:
            norm = norm.reshape([1]) / self._loss_scale.read(norm.process_mesh)
        return {ranks: _on(mesh, norm) for ranks, mesh in zip(of_mesh, meshes)}

    def _factor(self, norm: Any) -> Any:
        """Factor of the gradients, on the mesh of a norm."""
        factor = None
        if self._max_norm is not None:
            limit = paddle.full([], self._max_norm, "float32")
            factor = limit / paddle.maximum(norm, limit)
        if self._loss_scale is None:
            return factor
        return (1.0 if factor is None else factor) / self._loss_scale.read(norm.process_mesh)

    def _summed(self, parameter: Any, gradient: Any) -> Any:
        """A gradient summed over the data ranks, once for both the norm and the update."""
        dim = self._dims[parameter.name]
        # an all-reduce, or a reduce-scatter to the slices of the data ranks where the state is cut
        target = parameter.placements if dim is None else over_data(parameter.placements, dim)
        return dist.reshard(gradient, gradient.process_mesh, target)


def largest_float32(limit: float) -> float:
    """The largest finite float32 that is not above a limit: a float32 number is at most this one exactly where it is
    finite and at most the limit."""
    found = np.float32(min(limit, LARGEST))
    return float(found if float(found) <= limit else np.nextafter(found, np.float32(-np.inf)))


def _ranks(x: Any) -> tuple[int, ...]:
    return tuple(x.process_mesh.process_ids)


def _on(mesh: Any, x: Any) -> Any:
    """The number on the mesh of another pipeline stage."""
    return x if x.process_mesh == mesh else dist.reshard(x, mesh, x.placements)


def _sum_of_squares(gradients: Mapping[str, Any], expert_parallel: Collection[str]) -> Any:
    """Sum of squares over all elements of gradients, each counted once however many ranks hold it; `expert_parallel` is
    that of `NormClip`.

    Sums of gradients with different placements are not stacked together: Paddle 3.3.1 would take all of them for
    partial sums, and count replicated ones once for each rank.
    """
    alike: dict[tuple[str, bool], list[Any]] = {}
    for name, gradient in gradients.items():
        key = str(gradient.placements), name in expert_parallel
        alike.setdefault(key, []).append(gradient.square().sum())
    sums = {key: _replicated(paddle.stack(squares).sum()) for key, squares in alike.items()}
    return paddle.stack([_over_data(s) if is_part else s for (_, is_part), s in sums.items()]).sum()


def _replicated(number: Any) -> Any:
    """The number with its partial sums reduced, so that every rank of its mesh has the total."""
    return dist.reshard(number, number.process_mesh, [dist.Replicate()] * len(number.placements))


def _over_data(number: Any) -> Any:
    """Sum over the data ranks of a number that differs on each of them, though its placement says that it is
    replicated."""
    mesh = number.process_mesh
    placements = number.placements
    own = dtensor_to_local(number, mesh, placements)
    return _replicated(dtensor_from_local(own, mesh, [dist.Partial(), *placements[1:]]))
