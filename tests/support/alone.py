"""A model, its optimizer and its checkpoint as the engine sees them in a process that is alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.checkpoint.save import GatheredTensor
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.contract.specs import StageProfile
from llmsuite.engine.eager_engine import EagerEngine, train_step
from llmsuite.engine.guard import Guard
from llmsuite.engine.passes import MicroBatchLoader, Passes
from llmsuite.engine.rules import LossScale, NoLossScale, StepRules
from llmsuite.parallel.loss_ledger import LossTerms
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.parallel.schedule import Action
from llmsuite.parallel.sharding import ParameterShard

MESH = Mesh(Degrees(1, 1, 1, 1), 0)

# optimizer


def shards(parameters: Mapping[str, Any]) -> list[ParameterShard]:
    """Each parameter whole, as a plain model has it."""
    return [ParameterShard(name, parameter, MESH, None, 0) for name, parameter in parameters.items()]


def optimizer(parameters: Mapping[str, Any], train: TrainSection, total_steps: int) -> Optimizer:
    return Optimizer(shards(parameters), train, total_steps)


def parameters(optimizer: Optimizer) -> dict[str, Any]:
    """The model's tensors by name."""
    return {shard.name: shard.parameter for shard in optimizer.shards}


def state(optimizer: Optimizer) -> dict[str, np.ndarray]:
    """Every tensor of the state by `parameter/slot`."""
    return {entry.name: entry.value.numpy() for entry in optimizer.state()}


def load_state(optimizer: Optimizer, values: Mapping[str, np.ndarray]) -> None:
    """Take over what `state` gave."""
    optimizer.load_state(lambda entry: values[entry.name])


# step


class AnyModel:
    """A model without the methods of a language model, such as a single layer, in place of a pipeline stage."""

    is_first = is_last = True

    def __init__(self, model: Any):
        self.model = model
        self.chunks = [model]
        self._totals: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *inputs: Any) -> Any:
        return self.model(*inputs)

    def owns_loss_or_inputs(self, chunk: int) -> bool:
        return True

    def forward(self, action: Action, loss: Callable[[], LossTerms], lengths: Any = None) -> LossTerms:
        terms = loss()
        self._totals[action.micro_batch] = terms.total
        return terms

    def backward(self, action: Action, scale: float = 1.0) -> None:
        (self._totals.pop(action.micro_batch) * scale).backward()


def step(
    number: int,
    micro_batches: Sequence[Sequence[Any]],
    objective: Any,
    model: Any,
    optimizer: Optimizer,
    stop: bool = False,
    scale: LossScale | None = None,
    guard: Guard | None = None,
) -> dict[str, float]:
    """`train_step` of a model that is whole, in full precision; `objective` collates the micro-batches too."""
    part: Any = AnyModel(model)
    if hasattr(model, "hidden_states"):
        part = PipelineStage([model], MESH, model.config.hidden_size, [], None)
    section = getattr(objective, "section", None)
    profile = section.profile() if hasattr(section, "profile") else StageProfile()
    passes = Passes(objective, part, "1F1B", [p.kind for p in profile.prepasses])
    rules = StepRules(guard or Guard(), scale or NoLossScale())
    batches = MicroBatchLoader(micro_batches, objective.collate)
    return train_step(EagerEngine(passes, optimizer, rules), number, batches, {"stop": stop})


# checkpoint


def whole(tensors: Mapping[str, Any]) -> list[GatheredTensor]:
    """Tensors that lie on this rank alone, for saving."""
    return [GatheredTensor(name, list(t.shape), dtype_of(t), lambda t=t: t) for name, t in tensors.items()]


def dtype_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("paddle.")


def whole_state(optimizer: Optimizer) -> list[GatheredTensor]:
    """The optimizer's state, for saving."""
    return whole({entry.name: entry.value for entry in optimizer.state()})


def same(some: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> bool:
    """Whether two sets of arrays are the same bit for bit, in the same order."""
    first, second = ([(n, a.shape, a.dtype, a.tobytes()) for n, a in arrays.items()] for arrays in (some, others))
    return first == second
