"""A pipeline stage: the model's face towards a training stage, and the passes between the ranks of the pipeline.

A training stage's loss asks for hidden states and gets them where the last layers are. On the other ranks the same
call receives activations, runs the layers that are here and sends the result on; what it returns there counts for
nothing. So a stage's code is the same with and without a pipeline.

Only local parts travel: a rank talks to the ranks with its own coordinate on every other axis.
"""

from __future__ import annotations

import bisect
import queue
import threading
from collections.abc import Callable
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.engine.mesh import Mesh
from llmsuite.engine.parallelize import local_value
from llmsuite.models.shard_plan import ShardPlan

Tensor = Any


class PipelineStage:
    """This rank's layers, called like the whole model. Also made for a pipeline of one stage, where it adds nothing."""

    def __init__(self, model: Any, mesh: Mesh, hidden_size: int, placements: list[Any], edges: Edges | None):
        """
        Args:
            model: has what belongs to this stage; see `keep_stage`.
            mesh: this rank's place.
            hidden_size: D of the activations [B, L, D] between stages.
            placements: of these activations over tp.
            edges: to the neighbours; None without a pipeline.
        """
        self.model, self._mesh, self._placements, self._edges = model, mesh, placements, edges
        self._hidden_size = hidden_size
        self.is_first, self.is_last = mesh.coordinate["pp"] == 0, mesh.coordinate["pp"] == mesh.degrees.pp - 1
        self._passed: tuple[Tensor, Tensor] | None = None

    def train(self) -> None:
        """As `paddle.nn.Layer.train`."""
        self.model.train()

    def eval(self) -> None:
        """As `paddle.nn.Layer.eval`."""
        self.model.eval()

    def hidden_states(self, input_ids: Tensor) -> tuple[Tensor, list[Any]]:
        """Hidden states [B, L, D] on the last stage; elsewhere zeros, once the activations are sent on."""
        x = self.model.embed(input_ids) if self.is_first else self._receive(input_ids.shape)
        y, _ = self.model.decode(x)
        if paddle.is_grad_enabled():
            assert self._passed is None, "a stage's loss may ask for hidden states once"
            self._passed = (x, y)
        if self.is_last:
            return self.model.finish(y), []
        assert self._edges is not None
        self._edges.send(local_value(y).detach(), forward=True)
        return paddle.zeros([*input_ids.shape, self._hidden_size]), []

    def token_nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability of each target, [N]; zeros where the last layers are not."""
        return self.model.token_nll(hidden, targets) if self.is_last else paddle.zeros([targets.shape[0]])

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D] to logits [..., V]; zeros where the last layers are not."""
        if self.is_last:
            return self.model.logits(hidden)
        return paddle.zeros([*hidden.shape[:-1], self.model.config.vocab_size])

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Ids [B, L] to logits [B, L, V]."""
        return self.logits(self.hidden_states(input_ids)[0])

    def take_pass(self) -> tuple[Tensor, Tensor]:
        """Input and output of the latest `hidden_states`, for `backward`."""
        assert self._passed is not None, "the stage's loss did not ask for hidden states"
        passed, self._passed = self._passed, None
        return passed

    def backward(self, passed: tuple[Tensor, Tensor], total: Tensor) -> None:
        """Gradients of a pass: from the loss on the last stage, elsewhere from what the next stage sends."""
        x, y = passed
        if self.is_last:
            total.backward()
        else:
            assert self._edges is not None
            gradient = self._edges.receive(local_value(y).shape, y.dtype, forward=False)
            paddle.autograd.backward([y], [self._spread(gradient)])
        if not self.is_first:
            gradient = x.grad
            if gradient.is_dist() and gradient.placements != self._placements:
                gradient = dist.reshard(gradient, self._mesh.tensor, self._placements)
            assert self._edges is not None
            self._edges.send(local_value(gradient).detach(), forward=False)

    def _receive(self, ids_shape: list[int]) -> Tensor:
        assert self._edges is not None
        shape = [*ids_shape, self._hidden_size]
        for placement in self._placements:
            if self._mesh.tensor is not None and placement.is_shard():
                shape[placement.get_dim()] //= self._mesh.degrees.tp
        x = self._spread(self._edges.receive(shape, next(iter(self.model.parameters())).dtype, forward=True))
        x.stop_gradient = not paddle.is_grad_enabled()
        return x

    def _spread(self, local: Tensor) -> Tensor:
        if self._mesh.tensor is None:
            return local
        return dtensor_from_local(local, self._mesh.tensor, self._placements).detach()


class Edges:
    """Sends to and receives from the neighbouring stages. A send never waits for its receiver.

    Each direction of each edge has a group of two: messages of one direction cannot get ahead of the other's.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._groups: dict[tuple[int, int], Any] = {}
        for line in mesh.pipeline_lines():
            for a, b in [pair for i in range(len(line) - 1) for pair in (line[i : i + 2], line[i : i + 2][::-1])]:
                group = dist.new_group(sorted((a, b)))
                if mesh.rank in (a, b):
                    self._groups[a, b] = group
        line = next((line for line in mesh.pipeline_lines() if mesh.rank in line), [mesh.rank])
        at = line.index(mesh.rank)
        self._next = line[at + 1] if at + 1 < len(line) else None
        self._previous = line[at - 1] if at > 0 else None
        self._tasks: list[Any] = []
        self._senders: dict[int, queue.Queue[Callable[[], None]]] = {}

    def send(self, value: Tensor, forward: bool) -> None:
        """Send to the next stage, or to the one before."""
        peer = self._next if forward else self._previous
        assert peer is not None
        group, copy = self._groups[self._mesh.rank, peer], value.clone()
        if dist.get_backend(group) != "GLOO":
            self._tasks = [task for task in self._tasks if not task.is_completed()]
            self._tasks.append(dist.isend(copy, peer, group))
            return

        # Gloo's send waits for its receiver, and in 1F1B neighbours send to each other at once
        def job() -> None:
            group.process_group.send(copy, group.get_group_rank(peer), True).wait()

        if peer not in self._senders:
            self._senders[peer] = queue.Queue()
            threading.Thread(target=_send_all, args=(self._senders[peer],), daemon=True).start()
        self._senders[peer].put(job)

    def receive(self, shape: list[int], dtype: Any, forward: bool) -> Tensor:
        """Receive from the stage before (a forward pass), or from the next one (a backward pass)."""
        peer = self._previous if forward else self._next
        assert peer is not None
        group, value = self._groups[peer, self._mesh.rank], paddle.empty(shape, dtype=dtype)
        group.process_group.recv(value, group.get_group_rank(peer), True).wait()
        return value


def _send_all(jobs: queue.Queue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()


def keep_stage(model: Any, plan: ShardPlan, stage: int, num_stages: int, tied: bool) -> None:
    """Take away what other pipeline stages have. Layers are dealt out evenly, the first stages get one more.

    Args:
        model: lazily built, whole.
        plan: of its family.
        stage: this rank's, from 0.
        num_stages: of the pipeline.
        tied: whether the last stage needs the modules in front of the layers too.
    """
    modules = dict(model.named_sublayers())
    layers = modules[plan.layers]
    bounds = stage_bounds(len(layers), num_stages)
    for i in range(len(layers)):
        if not bounds[stage] <= i < bounds[stage + 1]:
            del layers._sub_layers[str(i)]
    gone = [] if stage == 0 or (tied and stage == num_stages - 1) else list(plan.first)
    gone += [] if stage == num_stages - 1 else list(plan.last)
    for name in gone:
        owner, _, attribute = name.rpartition(".")
        if name in modules:
            setattr(modules[owner] if owner else model, attribute, None)


def owner_stage(parameter: str, plan: ShardPlan, num_layers: int, num_stages: int) -> int:
    """The stage that has a parameter; the first one of a tied parameter."""
    if parameter.startswith(f"{plan.layers}."):
        layer = int(parameter.removeprefix(f"{plan.layers}.").split(".")[0])
        return bisect.bisect_right(stage_bounds(num_layers, num_stages), layer) - 1
    in_front = any(parameter.startswith(f"{module}.") for module in plan.first)
    return 0 if in_front else num_stages - 1


def stage_bounds(num_layers: int, num_stages: int) -> list[int]:
    """Stage s has the layers from bound s to bound s + 1."""
    size, more = divmod(num_layers, num_stages)
    return [s * size + min(s, more) for s in range(num_stages + 1)]
