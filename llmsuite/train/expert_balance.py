"""How evenly tokens are spread over experts: counted over the global batch, and what training does about it.

Two remedies, both the same however the batch is cut. A loss pulls at the gate's scores (DeepSeek-V2, arXiv 2405.04434,
section 2.2.3; sequence by sequence). And a bias, which counts for the choice only, is moved a fixed step after each
optimizer step: up for experts that had less than the mean, down for those that had more (Wang et al. 2024, arXiv
2408.15664; DeepSeek-V3, arXiv 2412.19437).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.errors import UserError
from llmsuite.models.experts import Balance
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.program.experts import BALANCE_LOSS, LOADS, SHARES
from llmsuite.parallel.program.pipeline import LENGTHS
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.tensor import local_value
from llmsuite.train.parts import StepPart
from llmsuite.typing import Tensor


class ExpertBalance(StepPart):
    """Balance over the expert layers of a rank; made on every rank, also where there are no such layers."""

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
            chunks: the models of this rank, parallelized and compiled already.
            plan: shard plan of their family, which has experts.
            shards: their parameters.
            mesh: this rank's place.
            loss_factor: weight of the balance loss relative to the stage's loss; 0 for none.
            bias_rate: by how much a bias is moved; 0 to leave it as it is.
            every_stage: the modules of all pipeline stages, where programs tell of all of them; None where `chunks`
                are the whole model.
        """
        self._mesh, self._loss_factor, self._bias_rate = mesh, loss_factor, bias_rate
        by_name = {shard.name: shard for shard in shards}
        self._layers: list[tuple[Balance, ParameterShard | None]] = []
        own = [found for chunk in chunks for found in _gates(chunk, plan)]
        for name, module in own:
            module.balance = Balance()
            self._layers.append((module.balance, by_name.get(f"{name}.{plan.gate_bias}")))
        names = [name for name, _ in (own if every_stage is None else _gates(every_stage, plan))]
        self._places, self.num_gates = [names.index(name) for name, _ in own], len(names)
        """Where the gates of this rank are among all that a program tells of, and how many these are."""
        self._loads: list[Tensor] = []
        self._summed: Tensor = None
        """Ratios of the fullest expert to the mean, their number, and the loss, added up over all ranks."""
        self._num_sequences = 0.0

    def begin(self, batches: Callable[[], Sequence[dict[str, Any]]], scale: float) -> None:
        """Before the passes, with the weight of the balance loss.

        Args:
            batches: makes the batches of this rank's micro-batches; none in the middle of a pipeline.
            scale: factor of all gradients of the step.

        Raises:
            UserError: there is a loss, and the stage does not say what its own one weighs.
        """
        for balance, _ in self._layers:
            balance.begin()
        if not self._loss_factor:
            return
        made = batches()
        if any("weight" not in batch or "lengths" not in batch for batch in made):
            raise UserError(
                "train.expert_balance_loss: batches of this stage do not say what their loss weighs; set it to 0"
            )
        own = [sum(float(batch["weight"]) for batch in made), float(sum(len(batch["lengths"]) for batch in made))]
        weight, self._num_sequences = collective.sum_over_run(own if self._mesh.counts_losses else [0.0, 0.0])
        # gradients are divided by the weight of the stage's loss in the end, and this one is a mean over sequences
        for balance, _ in self._layers:
            balance.factor = scale * self._loss_factor * weight / self._num_sequences

    @paddle.no_grad()
    def finish(self) -> None:
        """Add up what all ranks have seen."""
        self._loads = []
        mine: list[collective.Number] = [0.0, 0.0, 0.0]
        if self._layers:
            stacked = paddle.stack([local_value(balance.load) for balance, _ in self._layers])
            collective.sum_in_group(stacked, self._mesh.data_group)
            self._loads = list(stacked)
            if self._mesh.coordinate["tp"] == 0:
                if self._mesh.data_rank == 0:
                    mine[:2] = (stacked.max(-1) / stacked.mean(-1)).sum(), float(len(self._layers))
                mine[2] = paddle.add_n([local_value(balance.loss).astype("float64") for balance, _ in self._layers])
        self._summed = collective.sum_on_device(mine)

    # where a step is a program, in place of `begin` and `finish`

    def program_inputs(self, lengths: np.ndarray, num_rows: int) -> dict[str, np.ndarray]:
        """What the program of a step takes for the balance, see `parallel.program.experts`.

        Args:
            lengths: tokens of each row of this rank that are no padding, in the order of the rows.
            num_rows: of all ranks.
        """
        found = {LENGTHS: np.asarray(lengths, "int64")}
        if self._loss_factor:
            found[SHARES] = np.full(len(lengths), self._loss_factor / num_rows, "float32")
        return found

    def take(self, sums: dict[str, Any]) -> None:
        """Take what the program of a step has told out of its sums."""
        loads = sums.pop(LOADS).reshape([self.num_gates, -1])
        self._loads = [paddle.to_tensor(loads[place], dtype="float32") for place in self._places]
        ratios = float((loads.max(-1) / loads.mean(-1)).sum())
        # it is a mean over sequences already
        loss = sums.pop(BALANCE_LOSS) / self._loss_factor if self._loss_factor else 0.0
        self._summed, self._num_sequences = paddle.to_tensor([ratios, float(len(loads)), loss], "float64"), 1.0

    def metrics(self) -> dict[str, float]:
        """Load of the fullest expert over the mean, and the balance loss if there is one; neither where no layer of the
        whole model has experts, though its family has some."""
        ratio, count, loss = collective.read(self._summed)
        if not count:
            return {}
        found = {"experts/max_load": ratio / count}
        if self._loss_factor:
            found["experts/balance_loss"] = loss / self._num_sequences
        return found

    @paddle.no_grad()
    def update(self) -> None:
        """Move the biases. All ranks that have one do the same to it."""
        if not self._bias_rate:
            return
        for (_, shard), load in zip(self._layers, self._loads, strict=True):
            assert shard is not None, "refused by a rule"
            shard.gather()
            bias = local_value(shard.parameter) + self._bias_rate * paddle.sign(load.mean() - load)
            shard.load(bias)
            shard.free()


def _gates(model: Any, plan: ShardPlan) -> list[tuple[str, Any]]:
    """The gates of a model by name, in the order of its layers."""
    return [(name, module) for name, module in model.named_sublayers() if fnmatch.fnmatchcase(name, plan.gates)]
