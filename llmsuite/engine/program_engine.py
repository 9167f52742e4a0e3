"""Engine whose steps are compiled programs, each with the passes and the update."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.adapters.layers.reft import chosen_tokens
from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.engine.batch import Batch, ProgramBatch, program_inputs
from llmsuite.engine.build import BuiltModel
from llmsuite.engine.expert_balance import ExpertBalance
from llmsuite.engine.passes import MicroBatchLoader, Passes, ProgramObjective
from llmsuite.engine.rules import StepRules
from llmsuite.engine.train_engine import TrainEngine
from llmsuite.parallel import collective
from llmsuite.parallel.ledger_entries import COUNTS
from llmsuite.parallel.loss_ledger import BatchSum, total_of
from llmsuite.parallel.program.auto_parallel import AutoParallelLayout
from llmsuite.parallel.program.experts import with_experts
from llmsuite.parallel.program.forward import MAXIMUM
from llmsuite.parallel.program.layout import Layout, MeshLayout
from llmsuite.parallel.program.lengths import longest_row, padded_length
from llmsuite.parallel.program.optimizer import SINGLE_RANK, ProgramOptimizer, ZeroGroup
from llmsuite.parallel.program.passes import check_passes
from llmsuite.parallel.program.pipeline import LENGTHS, TOKEN_VALUES
from llmsuite.parallel.program.programs import Options, StepPrograms
from llmsuite.parallel.program.slices import SlicedShard
from llmsuite.recipe.plans import DataPlan, ParallelPlan

_SUM = "sum of "


class ProgramLoss:
    """The loss of a stage as step programs call it, while they are traced."""

    def __init__(self, objective: ProgramObjective):
        self._objective = objective
        self.denominators: dict[str, str] = {}
        """For each sum besides the loss, the entry of batches whose sum it is divided by."""

    def __call__(self, model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums of a micro-batch by name: "loss", which is differentiated, and those of `LossTerms`, which are not
        divided; and its maxima, with the prefix `MAXIMUM`."""
        batch = ProgramBatch(inputs, self._objective.batch_layout.has_pairs)
        terms = self._objective.loss(model, batch)
        found = {"loss": total_of(terms)}
        for name, (value, weight) in terms.sums.items():
            if not isinstance(weight, BatchSum):
                raise UserError(
                    f"engine.program: is step, and the loss of this stage divides {name} by {weight}; divide by "
                    "`total(batch, NAME)` of llmsuite.engine.batch, or set engine.program to layers"
                )
            self.denominators[name] = weight.entry
            found[name] = value
        for name, values in terms.maxima.items():
            # a vector with an entry for each row: a program sums over ranks, and gathers rows
            found[f"{MAXIMUM}{name}"] = values.flatten(1).max(-1) if values.ndim > 1 else values
        return found


class ProgramEngine(TrainEngine):
    """Runs each step as one compiled program, which has the passes and the update: it updates nothing in a step that
    the rules are not going to accept."""

    optimizer: ProgramOptimizer

    def __init__(
        self,
        passes: Passes,
        rules: StepRules,
        built: BuiltModel,
        objective: ProgramObjective,
        parallel_plan: ParallelPlan,
        data_plan: DataPlan,
        train: TrainSection,
        total_steps: int,
    ):
        """
        Args:
            passes: passes of the model, for pre-passes.
            rules: rules of the steps.
            built: the model.
            objective: stage of the run, on every rank: each compiles the program of the full step.
            parallel_plan: plan of the parallelism.
            data_plan: plan of the data.
            train: section of the recipe with the keys of the optimizer.
            total_steps: steps of the run.
        """
        engine = parallel_plan.engine
        assert not engine.offload_optimizer, "refused before the run"
        mesh = collective.mesh()
        zero_group = SINGLE_RANK
        if parallel_plan.section.sharding != "none":
            zero_group = ZeroGroup(parallel_plan.degrees.num_data_ranks, mesh.data_rank, mesh.data_group)
        expert_parallel = frozenset[str]() if built.pipeline is None else built.pipeline.expert_parallel
        optimizer = ProgramOptimizer(built.shards, train, total_steps, zero_group, expert_parallel)
        # the balance of experts is a part of the program
        callbacks = [callback for callback in rules.callbacks if not isinstance(callback, ExpertBalance)]
        super().__init__(passes, optimizer, dataclasses.replace(rules, callbacks=callbacks))
        self._objective = objective
        self._edited_ends = built.part.edited_ends
        # a family may support experts, and this shape of it have none
        self._balance: ExpertBalance | None = None
        if built.balance is not None and built.balance.num_gates:
            self._balance = built.balance
        self._num_data_ranks = parallel_plan.degrees.num_data_ranks
        self._loss = ProgramLoss(objective)
        loss: Any = self._loss
        if self._balance is not None:
            loss = with_experts(loss)
        self._scales_loss = engine.precision == "fp16"
        check_passes(engine.fused_passes)
        options = Options(
            recompute=engine.recompute != "none",
            scales_loss=self._scales_loss,
            passes=engine.fused_passes,
            one_executor=parallel_plan.device.factory().runs_job_plans,
        )
        self._programs = StepPrograms(_layout(built, parallel_plan), optimizer, loss, options)
        self._multiple = parallel_plan.length_multiple
        self._longest = longest_row(data_plan.section.longest_sample, self._multiple)

    def step(
        self, step: int, batches: MicroBatchLoader, requests: Mapping[str, bool], is_logged: bool = True
    ) -> dict[str, float]:
        """Run one step as a compiled program."""
        rules = self.rules
        ledger = self.begin_step(step, batches, requests)
        own = [batches.pop(number) for number in range(len(batches.all_batches()))]
        rules.before_passes(lambda: own)
        inputs = self._inputs(own)
        self._programs.prepare(inputs, len(batches))  # which denominators there are is known from the loss
        divided_by = dict.fromkeys(self._loss.denominators.values())  # in the same order on all ranks
        for batch in own:  # none on middle stages of a pipeline
            ledger.count(**{name: batch[entry] for name, entry in COUNTS.items()})
            ledger.count(**{_SUM + entry: float(np.sum(batch[entry], dtype="float64")) for entry in divided_by})
            ledger.book({"loss": (0.0, batch["weight"])})  # the program returns the sum of the loss itself
        weight, metrics = ledger.reduce()
        rules.check_weight(step, weight)
        batch_sums = {name.removeprefix(_SUM): metrics.pop(name) for name in [*metrics] if name.startswith(_SUM)}
        rules.after_passes(metrics, requests, is_logged)  # before the update: a callback may stop the run
        # the program differentiates a sum over the samples, as eager steps do, so gradients have the same range in fp16
        scale = rules.loss_scale.value * weight if self._scales_loss else 1.0
        sums = self._programs.run(step, inputs, len(batches), rules.guard.largest_norm, scale, weight)
        is_updated = sums.pop("updated") > 0
        if self._balance is not None:
            self._balance.use_program_sums(sums)
            metrics |= self._balance.metrics()
        metrics |= _means(sums, {name: batch_sums.get(entry, 0.0) for name, entry in self._loss.denominators.items()})
        metrics |= {
            "learning_rate": self.optimizer.learning_rate(step),
            "reader_seconds": batches.seconds,
            "programs": float(len(self._programs)),
            "program_seconds": self._programs.build_seconds,
        }
        # the program has made its own update depend on loss and norm, as they are not known before it ends. The rules
        # come to the same decision from the same numbers, and record it
        is_accepted = rules.decide(step, weight, metrics) == "accept"
        assert is_accepted == is_updated, "the program has decided otherwise"
        if not is_accepted:
            return rules.after_skip(metrics)
        if self._balance is not None:
            self._balance.after_update()
        rules.after_update()
        return metrics

    def _inputs(self, batches: Sequence[Batch]) -> dict[str, np.ndarray]:
        """Concatenate the program inputs of all micro-batches of this rank. Zeros on ranks without batches. All ranks
        call it: they agree on the longest row, so that their programs have the same shapes."""
        lengths = [batch["input_ids"].shape[1] for batch in batches if "input_ids" in batch]
        (longest,) = collective.max_over_run([max(lengths, default=0)])
        if longest > self._longest:
            raise UserError(
                f"engine.program: is step, and a row of this stage has {int(longest)} tokens, more than "
                "data.max_length; its collate has to cut rows there; or set engine.program to layers"
            )
        # 0 for rows without tokens, whose shape the stage decides
        length = 0
        if longest:
            length = padded_length(int(longest), self._longest, self._multiple)
        inputs = dict[str, np.ndarray]()
        if batches:
            parts = [self._inputs_of(batch, length) for batch in batches]
            for name in parts[0]:
                inputs[name] = np.concatenate([part[name] for part in parts])
            row_lengths = inputs.pop(LENGTHS, None)  # an input of the gates of experts only
            if self._balance is not None:
                if row_lengths is None:
                    raise UserError(
                        'engine.program: is step, and batches of this stage have no "lengths", which families with '
                        "routed experts need; set it to layers"
                    )
                inputs |= self._balance.program_inputs(row_lengths, len(row_lengths) * self._num_data_ranks)
        if collective.mesh().has_middle_stages:
            return _zeros_without_inputs(inputs)
        return inputs

    def _inputs_of(self, batch: Batch, length: int) -> dict[str, np.ndarray]:
        """Return the program inputs of a micro-batch: those of the loss, and the tokens that interventions edit."""
        inputs = program_inputs(batch, self._objective.batch_layout, length)
        if self._edited_ends is not None:
            wider = [(0, 0), (0, length - batch["prompt_lengths"].shape[1])]
            prompts = np.pad(batch["prompt_lengths"], wider)
            starts = inputs.get("document_starts")
            starts = None if starts is None else tensor_of(starts)
            chosen = chosen_tokens(tensor_of(prompts), starts, self._edited_ends)
            inputs[TOKEN_VALUES] = array_of(chosen).astype("int64")  # int64, the type in which pipelines send ids
        return inputs


def _layout(built: BuiltModel, parallel_plan: ParallelPlan) -> Layout:
    """Return the layout of a model: the one of our own meshes, or that of a model which shards itself."""
    model = built.part.model if built.pipeline is None else built.part
    if parallel_plan.degrees.auto_parallel:
        return AutoParallelLayout(model, built.shards)
    slices = {s.name: s for s in built.every_shard if isinstance(s, SlicedShard) and s.is_sliced}
    return MeshLayout(model, collective.mesh().rows("tp"), slices, built.pipeline)


def _zeros_without_inputs(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the inputs of this rank, or zeros of the shapes on rank 0 where it has none: its program needs inputs, but
    does not use their values."""
    of_rank0 = [(name, array.shape, array.dtype.str) for name, array in inputs.items()]
    own_message = json.dumps(of_rank0).encode() if collective.rank() == 0 else None
    message = collective.broadcast_message(own_message)
    if inputs:
        return inputs
    return {name: np.zeros(shape, dtype) for name, shape, dtype in json.loads(message)}


def _means(sums: Mapping[str, float], denominators: Mapping[str, float]) -> dict[str, float]:
    """Divide the sums of a global batch by their denominators; a sum without one is a mean already, and one whose
    denominator is 0 is omitted."""
    means = {name: value for name, value in sums.items() if name not in denominators}
    for name, denominator in denominators.items():
        if denominator:
            means[name] = sums[name] / denominator
    return means
