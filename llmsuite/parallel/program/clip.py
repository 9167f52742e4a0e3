"""What a whole-step program does between the gradients of a step and its update: the global norm, the decision whether
the step is accepted, and clipping.
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

from llmsuite.parallel import collective
from llmsuite.typing import Tensor

_numbers = itertools.count()
LARGEST = float(np.finfo("float32").max)


def over_data(placements: Sequence[Any], dim: int | None) -> list[Any]:
    """Placements over [data, tp] of what is cut along a dim over the data ranks, or is whole on each."""
    return [dist.Replicate() if dim is None else dist.Shard(dim), *placements[1:]]


class StepNumber:
    """A number that a program is given in each run, such as a limit. Its variables are no inputs, which are cut into
    micro-batches."""

    def __init__(self) -> None:
        self.variables: list[str] = []
        """Their names, one for each time that a program reads it."""

    def read(self, mesh: Any) -> Any:
        """Its value [1] on a mesh, in the program that is being made."""
        self.variables.append(f"step_number_{next(_numbers)}")
        everywhere = paddle.base.libpaddle.pir.create_tensor_dist_attribute(mesh, [-1], {})
        first = paddle.nn.initializer.Constant(1.0)
        return paddle.pir.core.create_persistable_value(
            "float32", [1], self.variables[-1], initializer=first, dist_attr=everywhere
        )

    def given(self, value: float) -> dict[str, Tensor]:
        """The variables, for a run in which it has this value."""
        return {name: paddle.to_tensor(np.full([1], value, "float32")) for name in self.variables}


class NormClip(paddle.nn.ClipGradByGlobalNorm):
    """Clipping by the global norm; it also tells the norm, and decides whether the step is accepted. The norm is told
    where nothing is clipped, too."""

    def __init__(
        self,
        max_norm: float | None,
        dims: Mapping[str, int | None],
        scale: float = 1.0,
        loss_scale: StepNumber | None = None,
        shared_out: Collection[str] = (),
    ):
        """
        Args:
            max_norm: the limit; None for none.
            dims: by the name of a parameter, along which its gradient is cut over the data ranks.
            scale: factor that the gradients have, and Paddle takes off behind this; the norm is told, and limited,
                without it.
            loss_scale: a further factor, which is taken off here.
            shared_out: names of stacks of experts of which each data rank has its own. A program takes these for
                copies of one stack.
        """
        super().__init__(1.0 if max_norm is None else max_norm)
        self._max_norm, self._dims, self._scale, self._loss_scale = max_norm, dims, scale, loss_scale
        self._shared_out = shared_out
        self._accepted: dict[tuple[int, ...], Any] = {}
        self._rejected: dict[tuple[int, ...], Any] = {}
        self._factors: dict[tuple[int, ...], Any] = {}
        self.variable = f"global_norm_{next(_numbers)}"
        """Name of the variable in which a step leaves the norm before clipping, and 1 where it is accepted, [2]. Where
        programs have one in common, only the last one that was made writes it (Paddle 3.3.1), and Paddle's own numbers
        begin anew for each."""
        self._largest_norm = StepNumber()

    @property
    def variables(self) -> set[str]:
        """Names of all variables that it adds to a program."""
        return {self.variable, *self.given(math.inf, 1.0)}

    def given(self, largest_norm: float, loss_scale: float) -> dict[str, Tensor]:
        """The variables that a run of the program reads.

        Args:
            largest_norm: the largest global norm of a step that is accepted; infinite for any that is finite.
            loss_scale: factor of the loss; 1 for a program that has none.
        """
        assert loss_scale == 1 or self._loss_scale is not None
        limits = self._largest_norm.given(largest_float32(largest_norm))
        return limits if self._loss_scale is None else {**limits, **self._loss_scale.given(loss_scale)}

    def accepted(self, gradient: Any) -> Any:
        """Whether the step is accepted, [1], on the mesh of a gradient in the program that is being made."""
        return self._accepted[_ranks(gradient)]

    def rejected(self, gradient: Any) -> Any:
        """The contrary of `accepted`, made once on each mesh."""
        ranks = _ranks(gradient)
        if ranks not in self._rejected:
            self._rejected[ranks] = paddle.logical_not(self._accepted[ranks])
        return self._rejected[ranks]

    def clipped(self, gradient: Any) -> Any:
        """A gradient as its update takes it. To be asked for right in front of that, not by `_pir_clip`: of all
        gradients at once that would take as much memory as the parameters do."""
        if self._factors:
            return gradient * self._factors[_ranks(gradient)]
        # a copy: Paddle 3.3.1 divides what it updates with where it lies, and the norm may be made behind that
        return gradient if self._scale == 1 else paddle.scale(gradient, 1.0)

    def _pir_clip(self, params_grads: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Called while a program is made, with the gradients of a step; parameters that are frozen have none."""
        params_grads = [(p, g if g is None else self._summed(p, g)) for p, g in params_grads]
        norms = self._norms({p.name: gradient for p, gradient in params_grads if gradient is not None})
        for ranks, norm in norms.items():
            # of a norm that is no number, too, this is false
            self._accepted[ranks] = norm.reshape([1]) <= self._largest_norm.read(norm.process_mesh)
            if collective.rank() in ranks:
                told = paddle.concat([norm.reshape([1]), self._accepted[ranks].astype("float32")])
                told.persistable = True  # else it is freed before anybody can read it
                paddle._C_ops.set_persistable_value(told, self.variable)
        if self._max_norm is not None or self._loss_scale is not None:
            self._factors = {ranks: self._factor(norm) for ranks, norm in norms.items()}
        return params_grads

    def _norms(self, gradients: Mapping[str, Any]) -> dict[tuple[int, ...], Any]:
        """The norm over all gradients, by the names of their parameters, on each of their meshes: by its ranks."""
        of_mesh: dict[tuple[int, ...], dict[str, Any]] = {}
        for name, gradient in gradients.items():
            of_mesh.setdefault(_ranks(gradient), {})[name] = gradient
        squares = [_sum_of_squares(found, self._shared_out) for found in of_mesh.values()]
        if len(squares) > 1:  # of several pipeline stages; what is sent has at least one dim
            squares = [square.reshape([1]) for square in squares]
        meshes = [square.process_mesh for square in squares]
        total = squares[0]
        for square in squares[1:]:
            total = total + _on(meshes[0], square)
        norm = paddle.sqrt(total)
        if self._scale != 1:
            norm = norm / self._scale
        if self._loss_scale is not None:
            norm = norm.reshape([1]) / self._loss_scale.read(norm.process_mesh)
        return {ranks: _on(mesh, norm) for ranks, mesh in zip(of_mesh, meshes)}

    def _factor(self, norm: Any) -> Any:
        """What gradients are multiplied with, on the mesh of a norm."""
        factor = None
        if self._max_norm is not None:
            limit = paddle.full([], self._max_norm, "float32")
            factor = limit / paddle.maximum(norm, limit)
        if self._loss_scale is None:
            return factor
        return (1.0 if factor is None else factor) / self._loss_scale.read(norm.process_mesh)

    def _summed(self, parameter: Any, gradient: Any) -> Any:
        """A gradient summed over the data ranks, once for the norm and the update."""
        dim = self._dims[parameter.name]
        wanted = parameter.placements if dim is None else over_data(parameter.placements, dim)
        return dist.reshard(gradient, gradient.process_mesh, wanted)


def largest_float32(limit: float) -> float:
    """The largest finite float32 that is not above a limit: numbers in float32 are at most the one where they are
    finite and at most the other."""
    found = np.float32(min(limit, LARGEST))
    return float(found if float(found) <= limit else np.nextafter(found, np.float32(-np.inf)))


def _ranks(x: Any) -> tuple[int, ...]:
    return tuple(x.process_mesh.process_ids)


def _on(mesh: Any, x: Any) -> Any:
    """The same number on the mesh of another pipeline stage."""
    return x if x.process_mesh == mesh else dist.reshard(x, mesh, x.placements)


def _sum_of_squares(gradients: Mapping[str, Any], shared_out: Collection[str]) -> Any:
    """Over all elements of gradients, each counted once however many ranks hold it; `shared_out` as of `NormClip`.

    Where some are cut and others are not, their sums are not stacked together: Paddle 3.3.1 takes all of them for parts
    of a sum then, and counts once a rank what every rank has whole.
    """
    alike: dict[tuple[str, bool], list[Any]] = {}
    for name, gradient in gradients.items():
        key = str(gradient.placements), name in shared_out
        alike.setdefault(key, []).append(gradient.square().sum())
    sums = {key: _whole(paddle.stack(squares).sum()) for key, squares in alike.items()}
    return paddle.stack([_over_data(s) if is_part else s for (_, is_part), s in sums.items()]).sum()


def _whole(number: Any) -> Any:
    """The same sum on every rank of its mesh."""
    return dist.reshard(number, number.process_mesh, [dist.Replicate()] * len(number.placements))


def _over_data(number: Any) -> Any:
    """The sum over the data ranks of what each of them has in place of a copy."""
    mesh, placements = number.process_mesh, number.placements
    own = dtensor_to_local(number, mesh, placements)
    return _whole(dtensor_from_local(own, mesh, [dist.Partial(), *placements[1:]]))
