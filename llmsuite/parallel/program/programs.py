"""Whole training steps as programs: forward passes, loss, gradients, their sum, clipping and update, by
`dist.to_static`.

The model is the one that runs op by op. While a program is made, its parameters are distributed tensors; afterwards
they are its own again, in the memory that the program updates. So evaluation, checkpoints and generation need to know
nothing of programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.base.framework import EagerParamBase
from paddle.distributed.auto_parallel.api import dtensor_from_local
from paddle.distributed.auto_parallel.static.dist_input_spec import DistributedInputSpec

from llmsuite.devices.local_parts import whole_steps
from llmsuite.parallel import schedule
from llmsuite.parallel.program.callstacks import without_callstacks
from llmsuite.parallel.program.clip import NormClip, StepNumber, over_data
from llmsuite.parallel.program.constants import share_constants
from llmsuite.parallel.program.experts import makes_rows_again
from llmsuite.parallel.program.forward import LossFactor, Step, split, trained_sums
from llmsuite.parallel.program.jobs import Jobs, in_order
from llmsuite.parallel.program.masters import without_shared_memory
from llmsuite.parallel.program.optimizer import ProgramOptimizer, StepRate
from llmsuite.parallel.program.passes import kernels_of, use_passes
from llmsuite.parallel.program.pipeline import FIRST_INPUTS, Pipeline, StagedModel
from llmsuite.parallel.program.slices import SlicedShard, whole_where_used
from llmsuite.parallel.schedule import Action
from llmsuite.parallel.tensor import local_value
from llmsuite.typing import Tensor

Inputs = Mapping[str, np.ndarray]
"""Arrays of this rank's rows of a global batch by name, one micro-batch behind the other, rows first."""
ONE_RANK = np.zeros([1, 1], "int64")
Loss = Callable[[Any, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""The model and the inputs of a micro-batch to sums by name, numbers and vectors; what is trained is the one called
"loss", and with it that of `experts.BALANCE_LOSS`."""

ROWS = [dist.Shard(0), dist.Replicate()]
"""Placements of inputs: each data rank has rows of its own."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled step."""

    run: Any
    jobs: Jobs | None
    """What a step of several micro-batches runs in place of `run`."""
    rate: StepRate
    clip: NormClip
    sums: Mapping[str, int]
    """What it returns behind what is trained, see `Step.sums`."""
    variables: Mapping[str, Tensor]
    """What outlives a step by the name that the program has for it: parameters, and the state of the optimizer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What programs have beside a step as such."""

    recompute: bool = False
    """Whether layers of the model ask to be computed again (`parallel.recompute`)."""
    scales_loss: bool = False
    """Whether steps have a factor of the loss."""
    passes: Sequence[str] = ()
    """Passes of Paddle's, which change the programs."""


_STEP_ALONE = Options()


class StepPrograms:
    """The programs of a run, one for each shape of its batches, over one model and one optimizer."""

    def __init__(
        self,
        model: Any,
        optimizer: ProgramOptimizer,
        loss: Loss,
        ranks: np.ndarray = ONE_RANK,
        slices: Mapping[str, SlicedShard] = MappingProxyType({}),
        pipeline: Pipeline | None = None,
        options: Options = _STEP_ALONE,
    ):
        """
        Args:
            model: this rank's part of the model, as it runs op by op; of a pipeline, all its chunks.
            optimizer: over its parameters.
            loss: of the stage.
            ranks: all of them, [data, tp]: in a row those that have the same samples, and a part of the model each.
                Those of one pipeline stage stand before those of the next.
            slices: the parameters whose slices the data ranks have, by name; the model has none of them itself.
            pipeline: what the stages have of the model; None where this rank's part is all of it.
            options: what else the programs have.
        """
        self._optimizer, self._loss, self._pipeline = optimizer, loss, pipeline
        self._recompute = options.recompute or (pipeline is None and makes_rows_again(model))
        self._scales_loss, self._passes = options.scales_loss, options.passes
        stages = np.split(ranks, 1 if pipeline is None else pipeline.num_stages)
        self._meshes = [dist.ProcessMesh(of_stage, dim_names=["data", "tp"]) for of_stage in stages]
        self._programs: dict[Any, Program] = {}
        self._scope = paddle.static.Scope()
        """The variables of all programs, apart from those of others in this process."""
        self._slices = slices
        self._whole = model if pipeline is None else pipeline.model
        self._own = dict(model.named_parameters())
        updated = [name for name in self._own if self._updates(name)]
        self._masters = {s.name: s for s in optimizer.shards if s.has_master and s.name in updated}
        trained = {name: self._dtype(name, p) for name, p in self._whole.named_parameters() if not p.stop_gradient}
        self._narrow = {name: dtype for name, dtype in trained.items() if dtype in (paddle.bfloat16, paddle.float16)}
        """Dtypes of the parameters that have masters, on whatever rank."""
        assert self._narrow.keys() & {*updated} == self._masters.keys()
        self._parameters = {name: self._kept(name) for name in updated}
        self.build_seconds = 0.0
        """Seconds that making programs has taken."""

    def __len__(self) -> int:
        return len(self._programs)

    def _updates(self, name: str) -> bool:
        """Whether this rank updates a parameter."""
        return self._pipeline is None or self._pipeline.stage_of(name) == self._pipeline.stage

    def _dtype(self, name: str, parameter: Tensor) -> Any:
        """What the model computes with as a parameter, on whatever rank."""
        return parameter.dtype if self._pipeline is None else self._pipeline.dtype_of(name, parameter)

    def _kept(self, name: str) -> Tensor:
        """What a program has for a parameter that this rank updates: where the model computes in 16 bits, the float32
        master."""
        if name in self._masters:
            return self._masters[name].master_or_shard
        return self._slices[name].stored if name in self._slices else self._own[name]

    def operations(self) -> Counter[str]:
        """How many operations of each name all programs have."""
        made = (program.run.dist_main_program("train") for program in self._programs.values())
        return Counter(operation.name() for program in made for operation in program.global_block().ops)

    def run(
        self,
        step: int,
        inputs: Inputs,
        num_micro_batches: int,
        largest_norm: float = math.inf,
        loss_scale: float = 1.0,
    ) -> dict[str, Any]:
        """Do one step: update the parameters and the state of the optimizer, unless the loss of a micro-batch or the
        norm of the gradient is not finite, or the norm is too large.

        Args:
            step: counted from 1.
            inputs: of this rank, the same shapes on all ranks.
            num_micro_batches: of this rank, whose gradients are added up.
            largest_norm: of a gradient that updates, before it is clipped.
            loss_scale: factor of the loss in the backward pass.

        Returns:
            The sums of the loss over the global batch, numbers and vectors [n], "grad_norm", and "updated": 1 or 0.
        """
        key = num_micro_batches, tuple((name, array.shape, array.dtype.str) for name, array in inputs.items())
        with paddle.static.scope_guard(self._scope), in_order():
            if key not in self._programs:
                started = time.perf_counter()
                self._programs[key] = self._build(inputs, num_micro_batches)
                self.build_seconds += time.perf_counter() - started
            program = self._programs[key]
            program.rate.begin(step)
            # the factor of a pipeline is a part of this one: gradients in 16 bits are to be no larger than they need be
            given = loss_scale / self._scale(num_micro_batches) if self._scales_loss else loss_scale
            self._give({**program.variables, **program.clip.given(largest_norm, given)})
            with _quiet(), kernels_of(self._passes):
                returned = self._returned(program, inputs, num_micro_batches)
            self._take(program.variables)
            for shard in self._masters.values():
                shard.write_back()
            norm = np.asarray(self._scope.var(program.clip.variable).get_tensor())
        # in float64 no sum of finite numbers is infinite: so it is finite where the program has found its terms to be
        parts = None if returned is None else np.asarray(returned, "float64").reshape(num_micro_batches, -1)[:, 1:]
        count = sum(size or 1 for size in program.sums.values())
        told, norm = self._told(None if parts is None else parts.sum(0), norm, count)
        return {**split(told, program.sums), "grad_norm": float(norm[0]), "updated": float(norm[1])}

    def _returned(self, program: Program, inputs: Inputs, num_micro_batches: int) -> Any:
        """Run a program. Returns what it tells of all micro-batches, one behind the other; None on ranks that it tells
        nothing."""
        if program.jobs is not None:
            return program.jobs.run(inputs, num_micro_batches)
        return program.run(*(self._given(name, paddle.to_tensor(array)) for name, array in inputs.items()))

    def _told(self, own: np.ndarray | None, norm: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of a step on every rank, `count` of them, and the norm of its gradient and whether it was
        accepted [2]; `own` is what the program of this rank has told."""
        if self._pipeline is not None:
            own = self._pipeline.from_last(own, count)
            # the copy of a tied embedding is one of the model's own, in its dtype: another stage has no master of it
            of_model = {name: self._own[name] if name in self._narrow else self._kept(name) for name in self._own}
            self._pipeline.update_copies(of_model)
        assert own is not None
        return own, norm

    def _build(self, inputs: Inputs, num_micro_batches: int) -> Program:
        scale = self._scale(num_micro_batches)
        loss_scale = StepNumber() if self._scales_loss else None
        with self._distributed() as parameters, _quiet(), whole_steps(), without_callstacks():
            called = self._whole if self._pipeline is None else StagedModel(self._pipeline, self._meshes)
            loss = functools.partial(self._loss, called)
            net = Step(
                self._whole, tuple(inputs), loss, self._whole_number, LossFactor(scale, loss_scale), self._narrow
            )
            trained = [parameter for parameter in parameters.values() if not parameter.stop_gradient]
            optimizer, rate, clip = self._optimizer.of_paddle(trained, self._meshes[0], scale, loss_scale)
            specs = [self._spec(name, array, num_micro_batches) for name, array in inputs.items()]
            strategy = self._strategy(num_micro_batches)
            run = dist.to_static(net, None, trained_sums, optimizer, strategy=strategy, input_spec=[specs, []])
            use_passes(run, self._passes)
            making = contextlib.nullcontext() if self._pipeline is None else self._pipeline.making()
            with making, without_shared_memory():
                run.train()
        share_constants(run)
        self._take(self._parameters)
        variables = {**self._parameters, **self._state(run, clip.variables)}
        jobs = None if num_micro_batches == 1 else Jobs(run, self._order(num_micro_batches))
        return Program(run, jobs, rate, clip, net.sums, variables)

    def _order(self, num_micro_batches: int) -> Sequence[Action] | None:
        """The passes of a step on this rank; None where Paddle has an order for them."""
        if self._pipeline is None:
            return schedule.order("1F1B", 0, 1, num_micro_batches)
        return self._pipeline.order(num_micro_batches)

    def _scale(self, num_micro_batches: int) -> int:
        """A factor of the loss: the mean over micro-batches that pipelines make, whatever they are told (Paddle 3.3.1),
        is to be their sum."""
        return 1 if self._pipeline is None else num_micro_batches

    def _strategy(self, num_micro_batches: int) -> Any:
        strategy = dist.Strategy()
        strategy._recompute.enable = self._recompute
        if self._pipeline is not None:
            self._pipeline.configure(strategy, num_micro_batches)
        elif num_micro_batches > 1:
            merge = strategy.gradient_merge
            merge.enable, merge.k_steps, merge.avg = True, num_micro_batches, False
        return strategy

    def _mesh_of(self, given: str) -> Any:
        """The mesh of an input."""
        return self._meshes[0 if given in FIRST_INPUTS else -1]

    def _spec(self, name: str, array: np.ndarray, num_micro_batches: int) -> Any:
        """An input of a program, which gets the rows of this rank in micro-batches."""
        rows = self._meshes[0].shape[0] * len(array) // num_micro_batches
        shape, mesh = [rows, *array.shape[1:]], self._mesh_of(name)
        return DistributedInputSpec(shape, array.dtype.name, name=name, mesh=mesh, placements=ROWS)

    def _given(self, name: str, rows: Tensor) -> Tensor:
        """An input of a step."""
        return dtensor_from_local(rows, self._mesh_of(name), ROWS)

    def _whole_number(self, number: Tensor) -> Tensor:
        """A sum of the loss on every rank of the mesh that the loss lies on."""
        return dist.reshard(number, self._meshes[-1], [dist.Replicate()] * 2)

    def _state(self, run: Any, others: Collection[str]) -> dict[str, Tensor]:
        """The state of the optimizer, which lies beside `others`, by the names of a program: Paddle counts the programs
        of a process in them."""
        values, slots = self._optimizer.values, self._optimizer.own_slots
        # the bias of a gate is among them, and has no gradient
        has_state = {name for name in self._parameters if not self._own[name].stop_gradient}
        updated = [shard.name for shard in self._optimizer.shards if shard.name in has_state]
        names = run.dist_main_program("train").state_dict("opt", paddle.static.global_scope())
        found = {name: name.rpartition("_")[0] for name in names if name not in others}
        expected = [f"{name}_{slot}" for name in updated for slot in slots]
        assert sorted(found.values()) == sorted(expected), "Paddle has another state for the optimizer"
        return {name: values[slot] for name, slot in found.items()}

    @contextlib.contextmanager
    def _distributed(self) -> Iterator[dict[str, Tensor]]:
        """While active, the parameters of the model are distributed tensors with the names that programs know."""
        modules = dict(self._whole.named_sublayers(include_self=True))
        whole = dict(self._whole.named_parameters())
        places = {name: (modules[name.rpartition(".")[0]]._parameters, name.rpartition(".")[2]) for name in whole}
        placed = {name: self._placed(name, parameter) for name, parameter in whole.items()}
        try:
            for name, (table, attribute) in places.items():
                table[attribute] = placed[name]
            with whole_where_used(places, self._narrow):
                yield placed
        finally:
            for name, (table, attribute) in places.items():
                table[attribute] = whole[name]

    def _placed(self, name: str, parameter: Tensor) -> Tensor:
        """A distributed parameter in the memory of one of the model, with a name that programs know."""
        mesh = self._meshes[0 if self._pipeline is None else self._pipeline.stage_of(name)]
        if self._pipeline is not None and name not in self._parameters:
            dtype = paddle.float32 if name in self._narrow else self._dtype(name, parameter)
            local, over_tp, dim = self._pipeline.absent(name, parameter.shape, dtype, mesh.shape[1])
        else:
            own = self._own[name]
            over_tp = own.placements if own.is_dist() else [dist.Replicate()]
            local = local_value(self._parameters[name]).detach()
            dim = self._slices[name].dim if name in self._slices else None
        trained = not parameter.stop_gradient
        placed = EagerParamBase(shape=parameter.shape, dtype=local.dtype, name=name, trainable=trained)
        placed._set_impl(dtensor_from_local(local, mesh, over_data([dist.Replicate(), *over_tp], dim)))
        return placed

    def _give(self, variables: Mapping[str, Tensor]) -> None:
        """Let the variables of a program be these tensors, in their memory."""
        for name, tensor in variables.items():
            self._scope.var(name).get_tensor()._share_data_with(_memory(tensor))

    def _take(self, variables: Mapping[str, Tensor]) -> None:
        """Let these tensors be the variables of a program, in their memory: Paddle empties parameters that it took, and
        an operation may have put its result elsewhere."""
        for name, tensor in variables.items():
            _memory(tensor)._share_data_with(self._scope.var(name).get_tensor())


def _memory(tensor: Tensor) -> Any:
    """Where the part of a tensor that lies on this rank has its memory."""
    found = tensor.get_tensor()
    return found.get_tensor() if tensor.is_dist() else found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what Paddle 3.3.1 tells about each program that it makes; it configures the root logger for that."""
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        paddle.disable_static()  # where it has left that with an error, too
        logging.disable(disabled)
        root.handlers[:], root.level = handlers, level
