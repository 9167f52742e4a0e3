"""Load balancing of experts: load counts over the global batch, the balance loss and the bias update.

Neither depends on how the batch is split. The balance loss acts on the scores of the gate (DeepSeek-V2, arXiv
2405.04434, section 2.2.3; per sequence). The bias, which counts for the selection of experts only, moves by a fixed
step after each optimizer step: up for experts with less than the mean load, down for those with more (Wang et al. 2024,
arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import tensor_of
from llmsuite.engine.rules import StepCallback
from llmsuite.models.experts import LoadBalance
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.program.experts import BALANCE_LOSS, LOADS, SHARES
from llmsuite.parallel.program.pipeline import LENGTHS
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.tensor import local_value


class ExpertBalance(StepCallback):
    """Balance of the expert layers of a rank; constructed on every rank, also on ranks without such layers."""

    def __init__(
        self,
        chunks: Sequence[Any],
        plan: ShardPlan,
        shards: Sequence[ParameterShard],
        mesh: Mesh,
        loss_factor: float,
        bias_rate: float,
        every_stage: Any = None,
    ):
        """
        Args:
            chunks: model chunks of this rank, parallelized and compiled already.
            plan: shard plan of their family, which has experts.
            shards: shards of their parameters.
            mesh: coordinates of this rank.
            loss_factor: weight of the balance loss relative to the stage's loss; 0 for none.
            bias_rate: step size of the bias update; 0 for no update.
            every_stage: modules of all pipeline stages, where compiled train steps return the loads of all of them;
                None otherwise.
        """
        self._mesh = mesh
        self._loss_factor = loss_factor
        self._bias_rate = bias_rate
        by_name = {shard.name: shard for shard in shards}
        self._layers: list[tuple[LoadBalance, ParameterShard | None]] = []
        own = [found for chunk in chunks for found in _gates(chunk, plan)]
        for name, module in own:
            module.balance = LoadBalance()
            self._layers.append((module.balance, by_name.get(f"{name}.{plan.gate_bias}")))
        names = [name for name, _ in (own if every_stage is None else _gates(every_stage, plan))]
        self._gate_numbers = [names.index(name) for name, _ in own]
        """Positions of this rank's gates among all gates of a program."""
        self.num_gates = len(names)
        """Number of gates whose loads a program returns."""
        self._loads: list[Tensor] = []
        self._summed: Tensor = None
        """Sum of the ratios of the largest to the mean load, their number, and the balance loss, over all ranks."""
        self._num_sequences = 0.0

    def before_passes(self, batches: Callable[[], Sequence[dict[str, Any]]], scale: float) -> None:
        """Reset the counts, and set the factor of the balance loss.

        Args:
            batches: returns the batches of this rank's micro-batches; none on middle stages of a pipeline.
            scale: factor of all gradients of the step.

        Raises:
            UserError: there is a balance loss, and the batches of the stage have no "weight" or "lengths".
        """
        for balance, _ in self._layers:
            balance.reset()
        if not self._loss_factor:
            return
        own_batches = batches()
        if any("weight" not in batch or "lengths" not in batch for batch in own_batches):
            raise UserError(
                "train.expert_balance_loss: batches of this stage do not have the weight of their loss; set it to 0"
            )
        own = [
            sum(float(batch["weight"]) for batch in own_batches),
            float(sum(len(batch["lengths"]) for batch in own_batches)),
        ]
        if not self._mesh.counts_losses:  # another rank with the same rows counts them
            own = [0.0, 0.0]
        weight, num_sequences = collective.sum_over_run(own)
        # at least one: a rehearsal of a rank that counts none gets no answer of those that do
        self._num_sequences = max(num_sequences, 1.0)
        # all gradients are divided by the weight of the stage's loss later, but this loss is a mean over sequences
        for balance, _ in self._layers:
            balance.factor = scale * self._loss_factor * weight / self._num_sequences

    @paddle.no_grad()
    def after_passes(self) -> None:
        """Sum the loads and the loss over all ranks."""
        self._loads = []
        mine: list[collective.Number] = [0.0, 0.0, 0.0]
        if self._layers:
            stacked = paddle.stack([local_value(balance.load) for balance, _ in self._layers])
            # each data rank has counted the rows of its own tokens; ranks of a tp group have counted the same ones
            collective.sum_in_group(stacked, self._mesh.data_group)
            self._loads = list(stacked)
            if self._mesh.coordinate["tp"] == 0:
                if self._mesh.data_rank == 0:
                    mine[:2] = (stacked.max(-1) / stacked.mean(-1)).sum(), float(len(self._layers))
                mine[2] = paddle.add_n([local_value(balance.loss).astype("float64") for balance, _ in self._layers])
        # one sum for all numbers, which stays on the device: only a step that is logged waits for it
        self._summed = collective.sum_on_device(mine)

    # for compiled train steps, instead of `before_passes` and `after_passes`

    def program_inputs(self, lengths: np.ndarray, num_rows: int) -> dict[str, np.ndarray]:
        """Return the inputs of a compiled train step for the balance, see `parallel.program.experts`.

        Args:
            lengths: tokens of each row of this rank without padding, in the order of the rows.
            num_rows: number of rows of all ranks.
        """
        inputs = {LENGTHS: np.asarray(lengths, "int64")}
        if self._loss_factor:
            inputs[SHARES] = np.full(len(lengths), self._loss_factor / num_rows, "float32")
        return inputs

    def use_program_sums(self, sums: dict[str, Any]) -> None:
        """Remove the loads and the balance loss from the sums of a compiled train step, and keep them."""
        loads = sums.pop(LOADS).reshape([self.num_gates, -1])
        self._loads = [tensor_of(loads[number], dtype="float32") for number in self._gate_numbers]
        ratios = float((loads.max(-1) / loads.mean(-1)).sum())
        # the program returns a mean over sequences, scaled by the factor
        loss = sums.pop(BALANCE_LOSS) / self._loss_factor if self._loss_factor else 0.0
        self._summed = tensor_of([ratios, float(len(loads)), loss], "float64")
        self._num_sequences = 1.0

    def metrics(self) -> dict[str, float]:
        """Return the ratio of the largest to the mean load of an expert, and the balance loss if there is one; nothing
        where no layer of the full model has experts, though its family supports them."""
        ratio, count, loss = collective.read(self._summed)
        if not count:
            return {}
        metrics = {"experts/max_load": ratio / count}
        if self._loss_factor:
            metrics["experts/balance_loss"] = loss / self._num_sequences
        return metrics

    @paddle.no_grad()
    def after_update(self) -> None:
        """Move the biases. Every rank that holds a copy of a bias computes the same value."""
        if not self._bias_rate:
            return
        for (_, shard), load in zip(self._layers, self._loads, strict=True):
            assert shard is not None, "refused by a rule"
            shard.gather()
            bias = local_value(shard.parameter) + self._bias_rate * paddle.sign(load.mean() - load)
            shard.load(bias)
            shard.free()


def _gates(model: Any, plan: ShardPlan) -> list[tuple[str, Any]]:
    """Gates of a model with their names, in the order of its layers."""
    return [(name, module) for name, module in model.named_sublayers() if fnmatch.fnmatchcase(name, plan.gates)]
