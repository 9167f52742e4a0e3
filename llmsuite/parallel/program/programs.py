"""Step programs: full training steps compiled by `dist.to_static`, with forward passes, loss, gradients, their sum,
clipping and update.

The model is the one of eager mode. While a program is built, its parameters are distributed tensors; afterwards they
are its own again, in the memory that the program updates. So evaluation, checkpoints and generation do not depend on
programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.base.framework import EagerParamBase
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.base.spans import span, spanned
from llmsuite.base.typing import Tensor
from llmsuite.devices.local_parts import tracing_step_program
from llmsuite.devices.tensors import tensor_of
from llmsuite.parallel import schedule
from llmsuite.parallel.program.clip import NormClip, StepScalar
from llmsuite.parallel.program.constants import share_constants
from llmsuite.parallel.program.experts import recomputes_expert_rows
from llmsuite.parallel.program.forward import LossFactor, Step, over_micro_batches, split, trained_sums
from llmsuite.parallel.program.jobs import Jobs, in_order
from llmsuite.parallel.program.layout import Inputs, Layout, Loss
from llmsuite.parallel.program.masters import without_shared_memory
from llmsuite.parallel.program.optimizer import ProgramOptimizer, StepRate
from llmsuite.parallel.program.passes import kernels_of, use_passes
from llmsuite.parallel.program.slices import gather_where_used
from llmsuite.parallel.schedule import Action


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled step."""

    run: Any
    jobs: Jobs | None
    """Jobs that a step of several micro-batches executes instead of `run`; None where `run` executes all of them."""
    rate: StepRate
    clip: NormClip
    inverse_weight: StepScalar
    """Factor of the loss that turns its sum into a mean."""
    sums: Mapping[str, int]
    """Sizes of the outputs after the differentiated loss, see `Step.sums`."""
    variables: Mapping[str, Tensor]
    """Tensors that outlive a step, by their names in the program: parameters, and the state of the optimizer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Optional features of step programs."""

    recompute: bool = False
    """True where layers of the model are recomputed (`parallel.recompute`)."""
    scales_loss: bool = False
    """True where steps have a factor of the loss."""
    passes: Sequence[str] = ()
    """Paddle's passes that change the programs."""
    one_executor: bool = False
    """True where Paddle's own plan runs a step of several micro-batches, see `DeviceBackend.runs_job_plans`."""


_NO_OPTIONS = Options()


class StepPrograms:
    """The programs of a run, one for each shape of its batches, over one model and one optimizer.

    The layout knows where everything lies. So our models and those that shard themselves have the same programs."""

    def __init__(self, layout: Layout, optimizer: ProgramOptimizer, loss: Loss, options: Options = _NO_OPTIONS):
        """
        Args:
            layout: of the model over the ranks.
            optimizer: over its parameters.
            loss: of the stage.
            options: of the programs.
        """
        self._layout = layout
        self._optimizer = optimizer
        self._loss = loss
        has_no_pipeline = layout.pipeline is None
        self._recompute = options.recompute or (has_no_pipeline and recomputes_expert_rows(layout.full_model))
        self._scales_loss = options.scales_loss
        self._passes = options.passes
        self._one_executor = options.one_executor
        self._programs: dict[Any, Program] = {}
        self._scope = paddle.static.Scope()
        """The variables of all programs, separate from other variables of this process."""
        self._own = layout.own_parameters
        updated = [name for name in self._own if layout.updates(name)]
        self._masters = {s.name: s for s in optimizer.shards if s.has_master and s.name in updated}
        all_parameters = layout.full_model.named_parameters()
        trained = {name: layout.dtype_of(name, p) for name, p in all_parameters if not p.stop_gradient}
        self._compute_dtypes = {
            name: dtype for name, dtype in trained.items() if dtype in (paddle.bfloat16, paddle.float16)
        }
        """Dtypes of the parameters that have masters, on any rank."""
        assert self._compute_dtypes.keys() & {*updated} == self._masters.keys()
        self._parameters = {name: self._kept(name) for name in updated}
        self.build_seconds = 0.0
        """Seconds spent on building programs."""

    def __len__(self) -> int:
        return len(self._programs)

    def _kept(self, name: str) -> Tensor:
        """The tensor that a program uses for a parameter that this rank updates: where the model computes in 16 bits,
        the float32 master."""
        return self._masters[name].main_param if name in self._masters else self._layout.stored(name)

    def operations(self) -> Counter[str]:
        """Number of operations of each name in all programs."""
        made = (program.run.dist_main_program("train") for program in self._programs.values())
        return Counter(operation.name() for program in made for operation in program.global_block().ops)

    @spanned("program")
    def run(
        self,
        step: int,
        inputs: Inputs,
        num_micro_batches: int,
        largest_norm: float = math.inf,
        loss_scale: float = 1.0,
        weight: float = 1.0,
    ) -> dict[str, Any]:
        """Run one step: update the parameters and the state of the optimizer, unless the loss of a micro-batch or the
        norm of the gradient is not finite, or the norm is too large.

        Args:
            step: counted from 1.
            inputs: of this rank, the same shapes on all ranks.
            num_micro_batches: of this rank, whose gradients are added up.
            largest_norm: above it, a gradient (before clipping) is not applied.
            loss_scale: factor of the loss in the backward pass.
            weight: the sum "loss" is divided by it; a step with weight 0 updates nothing.

        Returns:
            The sums of the loss over the global batch, numbers and vectors [n], "grad_norm", and "updated": 1 or 0.
        """
        program = self.prepare(inputs, num_micro_batches)
        with paddle.static.scope_guard(self._scope), in_order():
            program.rate.begin(step)
            # the factor of a pipeline is a part of the loss scale: 16-bit gradients should be no larger than necessary
            given = loss_scale / self._scale(num_micro_batches) if self._scales_loss else loss_scale
            limits = program.clip.feed(largest_norm, given)
            # without any weight the loss is no number, and the program rejects the step
            factor = program.inverse_weight.feed(1 / weight if weight else math.nan)
            self._bind_variables({**program.variables, **limits, **factor})
            with _quiet(), kernels_of(self._passes):
                returned = self._returned(program, inputs, num_micro_batches)
            self._read_back(program.variables)
            for shard in self._masters.values():
                shard.write_back()
            norm = np.asarray(self._scope.var(program.clip.variable).get_tensor())
        # in float64 a sum of finite float32 numbers is finite: so it is finite where the program found its terms finite
        own = None
        if returned is not None:
            parts = np.asarray(returned, "float64").reshape(num_micro_batches, -1)[:, 1:]
            own = over_micro_batches(parts, program.sums)
        count = sum(size or 1 for size in program.sums.values())
        outputs, norm = self._layout.synchronise(own, norm, count)
        # the copy of a tied embedding is a parameter of the model, in its dtype: other stages have no master of it
        self._layout.update_copies(
            {name: self._own[name] if name in self._compute_dtypes else self._kept(name) for name in self._own}
        )
        return {**split(outputs, program.sums), "grad_norm": float(norm[0]), "updated": float(norm[1])}

    def prepare(self, inputs: Inputs, num_micro_batches: int) -> Program:
        """The program for inputs of these shapes, which is built where there is none; arguments are those of `run`. A
        collective call."""
        key = num_micro_batches, tuple((name, array.shape, array.dtype.str) for name, array in inputs.items())
        if key not in self._programs:
            started = time.perf_counter()
            with paddle.static.scope_guard(self._scope), in_order(), span("compile"):
                self._programs[key] = self._build(inputs, num_micro_batches)
            self.build_seconds += time.perf_counter() - started
        return self._programs[key]

    def _returned(self, program: Program, inputs: Inputs, num_micro_batches: int) -> Any:
        """Run a program. Returns its outputs of all micro-batches, concatenated; None on ranks without outputs."""
        if program.jobs is not None:
            return program.jobs.run(inputs, num_micro_batches)
        return program.run(*(self._layout.place_input(name, tensor_of(array)) for name, array in inputs.items()))

    def _build(self, inputs: Inputs, num_micro_batches: int) -> Program:
        layout = self._layout
        layout.find_meshes(self._loss, {name: a[: len(a) // num_micro_batches] for name, a in inputs.items()})
        scale = self._scale(num_micro_batches)
        loss_scale = StepScalar() if self._scales_loss else None
        inverse_weight = StepScalar()
        with self._distributed() as parameters, _quiet(), tracing_step_program(), _without_callstacks():
            net = Step(
                layout.full_model,
                tuple(inputs),
                functools.partial(self._traced_loss, layout.model_to_trace()),
                layout.replicate,
                LossFactor(scale, loss_scale),
                self._compute_dtypes,
                inverse_weight,
            )
            trained = [parameter for parameter in parameters.values() if not parameter.stop_gradient]
            optimizer, rate, clip = self._optimizer.make_paddle_optimizer(trained, layout.data_mesh, scale, loss_scale)
            specs = [layout.input_spec(name, array, num_micro_batches) for name, array in inputs.items()]
            strategy = self._strategy(num_micro_batches)
            run = dist.to_static(net, None, trained_sums, optimizer, strategy=strategy, input_spec=[specs, []])
            use_passes(run, self._passes)
            build_context = contextlib.nullcontext() if layout.pipeline is None else layout.pipeline.build_context()
            with build_context, without_shared_memory():
                run.train()
        share_constants(run)
        self._read_back(self._parameters)
        variables = {**self._parameters, **self._state(run, {*clip.variables, *inverse_weight.variables})}
        is_one_run = num_micro_batches == 1 or self._one_executor
        jobs = None if is_one_run else Jobs(run, self._order(num_micro_batches))
        return Program(run, jobs, rate, clip, inverse_weight, net.sums, variables)

    def _traced_loss(self, model: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with self._layout.loss_context():
            return self._loss(model, inputs)

    def _order(self, num_micro_batches: int) -> Sequence[Action] | None:
        """The passes of a step on this rank; None for Paddle's own order."""
        if self._layout.pipeline is None:
            return schedule.order("1F1B", 0, 1, num_micro_batches)
        return self._layout.pipeline.order(num_micro_batches)

    def _scale(self, num_micro_batches: int) -> int:
        """A factor of the loss. Pipelines average over micro-batches, whatever their settings are (Paddle 3.3.1); with
        this factor the mean becomes the sum."""
        return 1 if self._layout.pipeline is None else num_micro_batches

    def _strategy(self, num_micro_batches: int) -> Any:
        strategy = dist.Strategy()
        strategy._recompute.enable = self._recompute
        if self._layout.pipeline is not None:
            self._layout.pipeline.configure(strategy, num_micro_batches)
        elif num_micro_batches > 1:
            merge = strategy.gradient_merge
            merge.enable = True
            merge.k_steps = num_micro_batches
            merge.avg = False
        return strategy

    def _state(self, run: Any, others: Collection[str]) -> dict[str, Tensor]:
        """The state of the optimizer by its variable names in a program, in which Paddle counts the programs of a
        process; `others` are other variables among them."""
        values = self._optimizer.values
        slots = self._optimizer.own_slots
        # the bias of a gate is among the parameters, and has no gradient
        has_state = {name for name in self._parameters if not self._own[name].stop_gradient}
        updated = [shard.name for shard in self._optimizer.shards if shard.name in has_state]
        names = run.dist_main_program("train").state_dict("opt", paddle.static.global_scope())
        found = {name: name.rpartition("_")[0] for name in names if name not in others}
        expected = [f"{name}_{slot}" for name in updated for slot in slots]
        assert sorted(found.values()) == sorted(expected), "Paddle has another state for the optimizer"
        return {name: values[slot] for name, slot in found.items()}

    @contextlib.contextmanager
    def _distributed(self) -> Iterator[dict[str, Tensor]]:
        """While active, the parameters of the model are distributed tensors with the names of program variables."""
        modules = dict(self._layout.full_model.named_sublayers(include_self=True))
        own = dict(self._layout.full_model.named_parameters())
        slots = {name: (modules[name.rpartition(".")[0]]._parameters, name.rpartition(".")[2]) for name in own}
        placed = {name: self._placed(name, parameter) for name, parameter in own.items()}
        try:
            for name, (table, attribute) in slots.items():
                table[attribute] = placed[name]
            with gather_where_used(slots, self._compute_dtypes):
                yield placed
        finally:
            for name, (table, attribute) in slots.items():
                table[attribute] = own[name]

    def _placed(self, name: str, parameter: Tensor) -> Tensor:
        """A distributed parameter in the memory of a parameter of the model, with the name of a program variable."""
        dtype = paddle.float32 if name in self._compute_dtypes else self._layout.dtype_of(name, parameter)
        found = self._layout.place(name, parameter, self._parameters.get(name), dtype)
        trained = not parameter.stop_gradient
        placed = EagerParamBase(shape=parameter.shape, dtype=found.local.dtype, name=name, trainable=trained)
        placed._set_impl(dtensor_from_local(found.local, found.mesh, found.placements))
        return placed

    def _bind_variables(self, variables: Mapping[str, Tensor]) -> None:
        """Make the variables of a program share the memory of these tensors."""
        for name, tensor in variables.items():
            self._scope.var(name).get_tensor()._share_data_with(_memory(tensor))

    def _read_back(self, variables: Mapping[str, Tensor]) -> None:
        """Make these tensors share the memory of the variables of a program: Paddle empties parameters that it has
        taken, and an operation may have put its result into other memory."""
        for name, tensor in variables.items():
            _memory(tensor)._share_data_with(self._scope.var(name).get_tensor())


def _memory(tensor: Tensor) -> Any:
    """The dense tensor of a tensor: that of this rank's shard where it is distributed."""
    found = tensor.get_tensor()
    return found.get_tensor() if tensor.is_dist() else found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """While active, the messages of Paddle 3.3.1 about each program that it builds are suppressed; it configures the
    root logger for them."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    level = root.level
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        paddle.disable_static()  # Paddle stays in static mode after an error
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.level = level


@contextlib.contextmanager
def _without_callstacks() -> Iterator[None]:
    """While active, new operations do not record their Python call stacks. Paddle 3.3.1 calls `traceback` for each of
    them, which takes a third of the time to build a program, and never frees the results: about 10 KB an operation."""
    empty = traceback.StackSummary()
    before = traceback.extract_stack
    traceback.extract_stack = lambda *_, **__: empty
    try:
        yield
    finally:
        traceback.extract_stack = before
