"""Outputs of modules and the gradients by them, at chosen tokens, as each rank has them.

Hooks watch every module of a model whose output has a vector for each token. Of a tensor that is distributed over tp a
rank keeps what it has, and how that is part of the whole; `llmsuite.align.merge` brings the parts together.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import paddle

from llmsuite.align.contexts import chosen, contexts
from llmsuite.align.values import Sample, sample_of
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.schedule import Action
from llmsuite.parallel.tensor import local_value
from llmsuite.parallel.vocabulary import without_padding
from llmsuite.train.build import BuiltModel
from llmsuite.train.parts import StepPart
from llmsuite.typing import Tensor

Part = Literal["whole", "columns", "tokens", "sum"]
"""What a rank of a tensor parallel group has of a tensor: all of it, some columns, some tokens, or a term of a sum."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of one micro-batch."""

    micro_batch: int
    shape: tuple[int, int]
    """B and L."""
    names: np.ndarray
    """[T], uint64: contexts of the chosen tokens."""
    places: np.ndarray
    """[T]: their places among B L."""
    every_name: np.ndarray
    """[B L], uint64: contexts of all tokens."""
    is_exact: bool
    """Whether it is known which of them are padding."""

    @classmethod
    def of(cls, micro_batch: int, ids: Any, starts: Any, lengths: Any, every: int) -> Tokens:
        """The tokens of a batch; arguments as of `contexts` and `chosen`."""
        names = contexts(
            np.asarray(ids), *(None if given is None else np.asarray(given) for given in (starts, lengths))
        )
        places = chosen(names, every)
        flat = names.reshape(-1)
        is_exact = lengths is not None or starts is not None
        return cls(micro_batch, (names.shape[0], names.shape[1]), flat[places], places, flat, is_exact)

    def write(self, path: Path) -> None:
        """For the ranks in the middle of the pipeline, which see no ids; the file is there whole or not at all."""
        unfinished = path.with_suffix(".part.npz")
        np.savez(unfinished, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        os.replace(unfinished, path)

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """What `write` wrote."""
        with np.load(path) as stored:
            size, length = stored["shape"].tolist()
            names, places, every_name = (stored[name] for name in ("names", "places", "every_name"))
            return cls(int(stored["micro_batch"]), (size, length), names, places, every_name, bool(stored["is_exact"]))


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one rank has of a tensor, at the chosen tokens of one micro-batch."""

    part: Part
    names: np.ndarray
    """[T], uint64."""
    values: np.ndarray
    """[T, F], float32."""


class Activations:
    """What hooks have seen of the modules of a model: of each module and micro-batch one output and its gradient."""

    def __init__(self, now: Callable[[], Tokens | None], tp_rank: int = 0):
        """
        Args:
            now: the tokens of the pass that runs; None when nothing is to be noted.
            tp_rank: place of this rank in its tensor parallel group.
        """
        self._now, self._tp_rank = now, tp_rank
        self.order: dict[str, tuple[int, int]] = {}
        """Part of the pipeline, and a number within it, by which modules can be sorted as they are run."""
        self.outputs: dict[str, dict[int, Piece]] = {}
        self.gradients: dict[str, dict[int, Piece]] = {}
        self._has_hook: set[tuple[str, int]] = set()

    def watch(self, model: Any, part: int = 0) -> None:
        """Note what the modules of a model give from now on; `part` is its place in the pipeline."""

        def hook_of(name: str) -> Callable[..., None]:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                self._note(name, output[0] if isinstance(output, tuple) else output, part)

            return hook

        for name, module in model.named_sublayers():
            module.register_forward_post_hook(hook_of(name))
            if "forward_train" in vars(module):  # compiled: hooks inside run while the program is made
                vars(module)["forward_train"] = self._around(module.forward_train, name, part)

    def _around(self, function: Callable[..., Tensor], name: str, part: int) -> Callable[..., Tensor]:
        def forward_train(*inputs: Tensor | None) -> Tensor:
            output = function(*inputs)
            self._note(name, output, part)
            return output

        return forward_train

    def _note(self, name: str, output: Any, part: int) -> None:
        if not paddle.in_dynamic_mode() or not isinstance(output, paddle.Tensor):
            return
        tokens = self._now()
        if tokens is None or (piece := self._piece(output.detach(), tokens)) is None:
            return
        number = tokens.micro_batch
        self.order.setdefault(name, (part, len(self.order)))
        # under recompute a layer runs twice, the second time for the gradients
        self.outputs.setdefault(name, {}).setdefault(number, piece)
        # outputs of kernels of our own ask for gradients also where nothing will make any (Paddle 3.3.1)
        has_gradient = paddle.is_grad_enabled() and not output.stop_gradient
        if not has_gradient or (name, number) in self._has_hook:
            return
        self._has_hook.add((name, number))

        def hook(gradient: Tensor) -> None:
            found = self._piece(gradient.detach(), tokens)
            if found is not None:
                self.gradients.setdefault(name, {})[number] = found

        output.register_hook(hook)

    @paddle.no_grad()
    def _piece(self, tensor: Tensor, tokens: Tokens) -> Piece | None:
        """What this rank has of a tensor at the chosen tokens; None of one that is no vector a token."""
        size, length = tokens.shape
        if tuple(tensor.shape[:2]) != (size, length) or len(tensor.shape) < 3:
            return None
        part: Part = "whole"
        if tensor.is_dist():
            (placement,) = tensor.placements
            if placement.is_shard(0):
                return None
            part = "sum" if placement.is_partial() else "tokens" if placement.is_shard(1) else "whole"
            part = "columns" if placement.is_shard() and part == "whole" else part
        local, names, places = local_value(tensor), tokens.names, tokens.places
        if part == "tokens":
            here = local.shape[1]
            row, column = np.divmod(places, length)
            mine = column // here == self._tp_rank
            names, places = names[mine], (row * here + column % here)[mine]
        flat = local.reshape([local.shape[0] * local.shape[1], -1])
        if not len(places):
            return Piece(part, names, np.zeros([0, flat.shape[1]], "float32"))
        values = flat.index_select(paddle.to_tensor(places, dtype="int64"), 0).astype("float32").numpy()
        return Piece(part, names, values)


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
        arrays: dict[str, np.ndarray] = {}
        modules: dict[str, Any] = {}
        for name, place in self._activations.order.items():
            modules[name] = {"order": place}
            for kind in ("outputs", "gradients"):
                pieces = getattr(self._activations, kind).get(name, {})
                if pieces:
                    modules[name][kind] = next(iter(pieces.values())).part
                    ordered = [pieces[number] for number in sorted(pieces)]
                    arrays[f"{kind}|{name}"] = np.concatenate([piece.values for piece in ordered])
                    arrays[f"{kind}|{name}|names"] = np.concatenate([piece.names for piece in ordered])
        for kind, samples in (("parameters", self._parameters), ("parameter_gradients", gradients)):
            arrays |= {f"{kind}|{name}": found.values for name, found in samples.items()}
        known = list(self._known.values())
        arrays["tokens"] = np.concatenate([tokens.every_name for tokens in known]) if known else np.zeros(0, "uint64")
        about = {
            "coordinate": self._mesh.coordinate,
            "data_rank": self._mesh.data_rank,
            "modules": modules,
            "is_exact": all(tokens.is_exact for tokens in known),
            "parameters": {name: found.about() for name, found in self._parameters.items()},
            "parameter_gradients": {name: found.about() for name, found in gradients.items()},
        }
        rank = self._mesh.rank
        np.savez(self._directory / f"rank-{rank}.npz", **arrays)
        (self._directory / f"rank-{rank}.json").write_text(json.dumps(about), encoding="utf-8")

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
