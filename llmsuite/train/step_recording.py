"""Records one step of a run, module by module: what `llmsuite align` compares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import paddle

from llmsuite.align.activations import Activations, Tokens
from llmsuite.align.values import Sample, sample_of
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.schedule import Action
from llmsuite.parallel.vocabulary import without_padding
from llmsuite.train.build import BuiltModel
from llmsuite.train.parts import StepPart
from llmsuite.typing import Tensor


class StepRecording(StepPart):
    """Records one step of a run: tokens, activations, parameters and gradients, in a file of each rank."""

    def __init__(self, built: BuiltModel, optimizer: Optimizer, mesh: Mesh, directory: Path, every: int):
        """
        Args:
            built: this rank's part of the model, before the step.
            optimizer: over its parameters.
            mesh: this rank's place.
            directory: to write into; the same on all ranks.
            every: activations are kept at about one token in so many.
        """
        self._optimizer, self._mesh, self._directory, self._every = optimizer, mesh, directory, every
        self._shapes, model = built.shapes, built.part
        self._known: dict[int, Tokens] = {}
        self._running: int | None = None
        self._lengths: Any = None
        self._activations = Activations(self._now, mesh.coordinate["tp"])
        for number, chunk in enumerate(model.chunks):
            self._activations.watch(chunk, number * mesh.degrees.pp + mesh.coordinate["pp"])
        self._parameters = self._samples((shard.name, shard.gather_parameter()) for shard in optimizer.shards)
        self._forward, self._backward, self._hidden = model.forward, model.backward, model.hidden_states
        # of this one model, as a stage and the engine call it
        vars(model).update(forward=self._noted_forward, backward=self._noted_backward, hidden_states=self._noted_hidden)

    # around the passes

    def _noted_forward(self, action: Action, loss: Any, lengths: Any = None) -> Any:
        # pre-passes have no gradients
        self._running = action.micro_batch if paddle.is_grad_enabled() else None
        self._lengths = lengths
        try:
            return self._forward(action, loss, lengths)
        finally:
            self._running = None

    def _noted_backward(self, action: Action, scale: float = 1.0) -> None:
        self._running = action.micro_batch  # recompute runs layers again
        try:
            self._backward(action, scale)
        finally:
            self._running = None

    def _noted_hidden(self, input_ids: Tensor, document_starts: Tensor | None = None) -> Any:
        number = self._running
        if number is not None and number not in self._known:
            self._known[number] = Tokens.of(number, input_ids, document_starts, self._lengths, self._every)
            if self._mesh.coordinate["pp"] == 0 and self._mesh.coordinate["tp"] == 0:
                self._known[number].write(self._file_of(number))  # before the activations are sent on
        return self._hidden(input_ids, document_starts=document_starts)

    def _now(self) -> Tokens | None:
        if self._running is None:
            return None
        if self._running not in self._known:  # in the middle of a pipeline
            self._known[self._running] = Tokens.read(self._file_of(self._running))
        return self._known[self._running]

    def _file_of(self, micro_batch: int) -> Path:
        return self._directory / f"tokens-{self._mesh.data_rank}-{micro_batch}.npz"

    # after them

    def finish(self) -> None:
        """Write what this rank has seen. Every rank of the run calls it."""
        gradients = self._samples(self._whole_gradients())
        record = self._activations.record(self._mesh).with_tokens(list(self._known.values()))
        record = record.with_samples("parameters", self._parameters).with_samples("parameter_gradients", gradients)
        record.write(self._directory)

    @paddle.no_grad()
    def _whole_gradients(self) -> Iterator[tuple[str, Tensor]]:
        finished = dict(self._optimizer.finished)
        for shard in self._optimizer.shards:
            gradient = finished.get(shard)  # none where a rank owns nothing of a parameter, or nothing has used it
            own = paddle.zeros_like(shard.master_or_shard.detach()) if gradient is None else gradient
            yield shard.name, shard.gather_shard(own)

    def _samples(self, values: Iterable[tuple[str, Tensor]]) -> dict[str, Sample]:
        """Samples of whole tensors, one after the other. One rank of those that have the same parameters keeps them."""
        keeps, found = not self._mesh.data_rank and not self._mesh.coordinate["tp"], {}
        for name, value in values:  # which all ranks bring together
            if keeps:
                true = without_padding(value, self._shapes[name])  # of a vocabulary
                found[name] = sample_of(true.astype("float32").numpy())
        return found
