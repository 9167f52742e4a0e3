"""Recording of one step of a run, module by module, for `llmsuite align`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import paddle

from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import array_of
from llmsuite.engine.build import BuiltModel
from llmsuite.engine.rules import StepCallback
from llmsuite.observe.activations.recording import ActivationHooks, Tokens
from llmsuite.observe.activations.samples import Sample, sample_of
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.pipeline import PassRecorder
from llmsuite.parallel.vocabulary import without_padding


class StepRecording(StepCallback, PassRecorder):
    """Records one step of a run: tokens, activations, parameters and gradients, in a file of each rank."""

    def __init__(self, built: BuiltModel, optimizer: Optimizer, mesh: Mesh, directory: Path, every: int):
        """
        Args:
            built: this rank's part of the model, before the step.
            optimizer: optimizer of its parameters.
            mesh: coordinates of this rank.
            directory: directory to write into, the same on all ranks.
            every: activations are kept at about one token in `every`.
        """
        self._optimizer = optimizer
        self._mesh = mesh
        self._directory = directory
        self._every = every
        self._shapes = built.shapes
        model = built.part
        self._tokens: dict[int, Tokens] = {}
        self._micro_batch: int | None = None
        self._lengths: Any = None
        self._activations = ActivationHooks(self._current_tokens, mesh.coordinate["tp"])
        for number, chunk in enumerate(model.chunks):
            self._activations.watch(chunk, number * mesh.degrees.pp + mesh.coordinate["pp"])
        self._parameters = self._samples((shard.name, shard.gather_parameter()) for shard in optimizer.shards)
        model.recorder = self

    # during the passes

    @contextlib.contextmanager
    def in_pass(self, micro_batch: int | None, lengths: Any = None) -> Iterator[None]:
        """Know the micro-batch whose layers run. Pre-passes, which have no gradients, are not recorded."""
        self._micro_batch = micro_batch
        self._lengths = lengths
        try:
            yield
        finally:
            self._micro_batch = None

    def see_tokens(self, input_ids: Tensor, document_starts: Tensor | None) -> None:
        """Choose the tokens of a micro-batch whose activations are kept."""
        number = self._micro_batch
        if number is not None and number not in self._tokens:
            self._tokens[number] = Tokens.of(number, input_ids, document_starts, self._lengths, self._every)
            if self._mesh.coordinate["pp"] == 0 and self._mesh.coordinate["tp"] == 0:
                self._tokens[number].write(
                    self._file_of(number)
                )  # the next stages read the file, so write it before they get activations

    def _current_tokens(self) -> Tokens | None:
        if self._micro_batch is None:
            return None
        if self._micro_batch not in self._tokens:  # in the middle of a pipeline
            self._tokens[self._micro_batch] = Tokens.read(self._file_of(self._micro_batch))
        return self._tokens[self._micro_batch]

    def _file_of(self, micro_batch: int) -> Path:
        return self._directory / f"tokens-{self._mesh.data_rank}-{micro_batch}.npz"

    # after the passes

    def after_passes(self) -> None:
        """Write the record of this rank. A collective call: it gathers gradients."""
        gradients = self._samples(self._full_gradients())
        record = self._activations.record(self._mesh).with_tokens(list(self._tokens.values()))
        record = record.with_samples("parameters", self._parameters).with_samples("parameter_gradients", gradients)
        record.write(self._directory)

    @paddle.no_grad()
    def _full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        finished = dict(self._optimizer.final_gradients())
        for shard in self._optimizer.shards:
            gradient = finished.get(shard)  # None where this rank has no shard of the parameter, or no pass used it
            own = paddle.zeros_like(shard.main_param.detach()) if gradient is None else gradient
            yield shard.name, shard.gather_shard(own)

    def _samples(self, values: Iterable[tuple[str, Tensor]]) -> dict[str, Sample]:
        """Sample full tensors, one after the other. Of the ranks with the same parameters only the first keeps
        samples."""
        keeps = not self._mesh.data_rank and not self._mesh.coordinate["tp"]
        samples = {}
        for name, value in values:  # the iterator gathers each tensor, so all ranks have to exhaust it
            if keeps:
                unpadded = without_padding(value, self._shapes[name])  # the vocabulary may be padded
                samples[name] = sample_of(array_of(unpadded.astype("float32")))
        return samples
