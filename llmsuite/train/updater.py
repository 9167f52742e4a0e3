"""How a run does its steps: op by op, or each as one program."""

from __future__ import annotations

import abc
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.devices.base import DeviceBackend
from llmsuite.errors import UserError
from llmsuite.launch import calls
from llmsuite.models.reft import chosen_tokens
from llmsuite.parallel import collective
from llmsuite.parallel.ledger_entries import COUNTS
from llmsuite.parallel.loss_ledger import LossLedger
from llmsuite.parallel.optimizer import Optimizer, SavedOptimizer
from llmsuite.parallel.program.annotated import AnnotatedPrograms
from llmsuite.parallel.program.experts import with_experts
from llmsuite.parallel.program.lengths import bucket, length_multiple, longest_row
from llmsuite.parallel.program.optimizer import ONE_OWNER, Owners, ProgramOptimizer
from llmsuite.parallel.program.passes import check_passes
from llmsuite.parallel.program.pipeline import LENGTHS, TOKEN_VALUES
from llmsuite.parallel.program.programs import Options, StepPrograms
from llmsuite.parallel.program.slices import SlicedShard
from llmsuite.recipe.resolve import RunPlan
from llmsuite.train.build import BuiltModel
from llmsuite.train.objective import Batch, ProgramObjective
from llmsuite.train.passes import BatchReader, Passes, run_prepasses
from llmsuite.train.step import StepRules, train_step

_WEIGHT = "weight of "


class Updater(abc.ABC):
    """Takes the steps of a run."""

    optimizer: SavedOptimizer

    @staticmethod
    def of(
        plan: RunPlan, backend: DeviceBackend, built: BuiltModel, objective: ProgramObjective | None, total_steps: int
    ) -> Updater:
        """The one that a recipe asks for."""
        if plan.recipe.engine.compiles_steps:
            assert objective is not None, "every rank has one where steps are programs"
            return ProgramUpdater(plan, built, objective, total_steps)
        return EagerUpdater(plan, backend, built, total_steps)

    @abc.abstractmethod
    def take(
        self,
        step: int,
        micro_batches: Sequence[Any],
        passes: Passes,
        rules: StepRules,
        votes: Mapping[str, bool],
        is_logged: bool,
    ) -> dict[str, float]:
        """Do one step, see `train_step`."""


class EagerUpdater(Updater):
    """Op by op, but for layers that are compiled: `train_step`."""

    def __init__(self, plan: RunPlan, backend: DeviceBackend, built: BuiltModel, total_steps: int):
        host = backend if plan.recipe.engine.offload_optimizer else None
        ops = backend.ops(plan.recipe.engine.precision)
        self.optimizer: Optimizer = Optimizer(built.shards, plan.recipe.train, total_steps, host, ops)

    def take(
        self,
        step: int,
        micro_batches: Sequence[Any],
        passes: Passes,
        rules: StepRules,
        votes: Mapping[str, bool],
        is_logged: bool,
    ) -> dict[str, float]:
        """As `train_step`."""
        self.optimizer.reserve()
        return train_step(step, micro_batches, passes, self.optimizer, rules, votes, is_logged)


class ProgramUpdater(Updater):
    """Each step as one program, which updates nothing in a step that the rules are not going to accept."""

    def __init__(self, plan: RunPlan, built: BuiltModel, objective: ProgramObjective, total_steps: int):
        """`objective` is on every rank: each makes programs of all of a step."""
        assert not plan.recipe.engine.offload_optimizer, "refused before the run"
        mesh, owners = collective.mesh(), ONE_OWNER
        if plan.recipe.parallel.sharding != "none":
            owners = Owners(plan.degrees.num_data_ranks, mesh.data_rank, mesh.data_group)
        shared_out = frozenset[str]() if built.pipeline is None else built.pipeline.shared_out
        self.optimizer: ProgramOptimizer = ProgramOptimizer(
            built.shards, plan.recipe.train, total_steps, owners, shared_out
        )
        self._objective, self._edited_ends = objective, built.part.edited_ends
        # a shape of a family with experts may have none
        self._balance = built.balance if built.balance is not None and built.balance.num_gates else None
        self._num_data_ranks = plan.degrees.num_data_ranks
        loss = objective.program_loss if self._balance is None else with_experts(objective.program_loss)
        slices = {s.name: s for s in built.every_shard if isinstance(s, SlicedShard) and s.is_sliced}
        self._scales_loss = plan.recipe.engine.precision == "fp16"
        model, ranks = built.part.model if built.pipeline is None else built.part, mesh.rows("tp")
        engine = plan.recipe.engine
        check_passes(engine.fused_passes)
        options = Options(
            recompute=engine.recompute != "none", scales_loss=self._scales_loss, passes=engine.fused_passes
        )
        self._programs: StepPrograms
        if plan.degrees.own_meshes:
            self._programs = AnnotatedPrograms(model, self.optimizer, loss, options)
        else:
            self._programs = StepPrograms(model, self.optimizer, loss, ranks, slices, built.pipeline, options)
        self._longest, self._multiple = longest_row(plan), length_multiple(plan)

    def take(
        self,
        step: int,
        micro_batches: Sequence[Any],
        passes: Passes,
        rules: StepRules,
        votes: Mapping[str, bool],
        is_logged: bool,
    ) -> dict[str, float]:
        """As `train_step`."""
        calls.step(step)
        passes.model.step = step
        ledger, batches = LossLedger(), BatchReader(passes.objective, micro_batches)
        ledger.vote(**votes)
        run_prepasses(passes, batches)
        taken = [batches.take(number) for number in range(len(batches.all()))]
        for batch in taken:  # none in the middle of a pipeline
            ledger.count(**{name: batch[entry] for name, entry in COUNTS.items()})
            ledger.count(**{_WEIGHT + name: own for name, own in self._objective.program_weights(batch).items()})
            ledger.book({"loss": (0.0, batch["weight"])})  # the loss itself comes out of the program, added up
        weight, metrics = ledger.reduce()
        rules.check_weight(step, weight)
        weights = {name.removeprefix(_WEIGHT): metrics.pop(name) for name in [*metrics] if name.startswith(_WEIGHT)}
        inputs = self._inputs(taken, weight)
        # differentiated is a sum over the samples, as op by op: the same gradients have to fit into 16 bits
        scale = rules.loss_scale.value * weight if self._scales_loss else 1.0
        told = self._programs.run(step, inputs, len(micro_batches), rules.guard.largest_norm, scale)
        is_updated = told.pop("updated") > 0
        if self._balance is not None:
            self._balance.take(told)
            metrics |= self._balance.metrics()
        metrics |= _means(told, weight, weights)
        metrics |= {
            "learning_rate": self.optimizer.learning_rate(step),
            "reader_seconds": batches.seconds,
            "programs": float(len(self._programs)),
            "program_seconds": self._programs.build_seconds,
        }
        is_accepted = rules.judge(step, weight, metrics) == "accept"
        assert is_accepted == is_updated, "the program has judged otherwise"
        if is_accepted:
            rules.loss_scale.grow()
            if self._balance is not None:
                self._balance.update()
            return metrics
        return {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON holds no others

    def _inputs(self, batches: Sequence[Batch], weight: float) -> dict[str, np.ndarray]:
        """The rows of all micro-batches of this rank, with the weights of the loss divided by that of the global
        batch: so the loss is a sum over a sum, whatever the program adds up. Zeros on ranks that read none."""
        lengths = [batch["input_ids"].shape[1] for batch in batches if "input_ids" in batch]
        (longest,) = collective.max_over_run([max(lengths, default=0)])
        if longest > self._longest:
            raise UserError(
                f"engine.program: is step, and a row of this stage has {int(longest)} tokens, more than "
                "data.max_length; its collate has to cut rows there; or set engine.program to layers"
            )
        # rows without tokens have a length that the stage knows
        length = bucket(int(longest), self._longest, self._multiple) if longest else 0
        inputs = dict[str, np.ndarray]()
        if batches:
            parts = [self._inputs_of(batch, length) for batch in batches]
            inputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            inputs["weights"] = (inputs["weights"] / weight).astype("float32")
            of_rows = inputs.pop(LENGTHS, None)  # for the gates of experts only
            if self._balance is not None:
                if of_rows is None:
                    raise UserError(
                        "engine.program: is step, and this stage's program_inputs do not say the lengths of the rows, "
                        "which families with routed experts need; set it to layers"
                    )
                inputs |= self._balance.program_inputs(of_rows, len(of_rows) * self._num_data_ranks)
        return _of_every_rank(inputs) if collective.mesh().has_middle else inputs

    def _inputs_of(self, batch: Batch, length: int) -> dict[str, np.ndarray]:
        """What the program takes of a micro-batch: what the stage says, and which tokens layers edit."""
        found = dict(self._objective.program_inputs(batch, length))
        if self._edited_ends is not None:
            wider = [(0, 0), (0, length - batch["prompt_lengths"].shape[1])]
            prompts, starts = np.pad(batch["prompt_lengths"], wider), found.get("document_starts")
            starts = None if starts is None else paddle.to_tensor(starts)
            chosen = chosen_tokens(paddle.to_tensor(prompts), starts, self._edited_ends)
            found[TOKEN_VALUES] = chosen.numpy().astype("int64")  # as pipelines send ids
        return found


def _of_every_rank(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs of a rank; where it has none, zeros in their place, which its program does not use."""
    of_first = [(name, array.shape, array.dtype.str) for name, array in inputs.items()]
    message = collective.message_of_first_rank(json.dumps(of_first).encode() if collective.rank() == 0 else None)
    return inputs or {name: np.zeros(shape, dtype) for name, shape, dtype in json.loads(message)}


def _means(sums: Mapping[str, float], weight: float, weights: Mapping[str, float]) -> dict[str, float]:
    """Sums that are divided by the weight of the loss as means: those with weights of their own are divided by these,
    and left out where they are 0."""
    own = {name: sums[name] * weight / of_sum for name, of_sum in weights.items() if of_sum}
    return {**{name: value for name, value in sums.items() if name not in weights}, **own}
