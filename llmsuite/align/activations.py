"""Inputs and outputs of modules and the gradients by these, at chosen tokens, as each rank has them.

Hooks watch every module of a model whose output has a vector for each token. Of a tensor that is distributed over tp a
rank keeps what it has, and how that is part of the whole; `llmsuite.align.merge` brings the parts together.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import paddle

from llmsuite.align.contexts import chosen, contexts
from llmsuite.align.values import Sample
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.tensor import local_value
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
    """What hooks have seen of the modules of a model: of each module and micro-batch its first input, one output and
    the gradient of this."""

    def __init__(self, now: Callable[[], Tokens | None], tp_rank: int = 0):
        """
        Args:
            now: the tokens of the pass that runs; None when nothing is to be noted.
            tp_rank: place of this rank in its tensor parallel group.
        """
        self._now, self._tp_rank = now, tp_rank
        self.order: dict[str, tuple[int, int]] = {}
        """Part of the pipeline, and a number within it, by which modules can be sorted as they are run."""
        self.kinds: dict[str, str] = {}
        """The class of each module."""
        self.inputs: dict[str, dict[int, Piece]] = {}
        self.outputs: dict[str, dict[int, Piece]] = {}
        self.gradients: dict[str, dict[int, Piece]] = {}
        self._has_hook: set[tuple[str, int]] = set()

    def watch(self, model: Any, part: int = 0) -> None:
        """Note what the modules of a model give from now on; `part` is its place in the pipeline."""

        def hook_of(name: str) -> Callable[..., None]:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                self.note(name, _first(inputs), _first(output), part)

            return hook

        for name, module in model.named_sublayers():
            self.kinds.setdefault(name, type(module).__name__)
            module.register_forward_post_hook(hook_of(name))
            if "forward_train" in vars(module):  # compiled: hooks inside run while the program is made
                vars(module)["forward_train"] = self._around(module.forward_train, name, part)

    def _around(self, function: Callable[..., Tensor], name: str, part: int) -> Callable[..., Tensor]:
        def forward_train(*inputs: Tensor | None) -> Tensor:
            output = function(*inputs)
            self.note(name, _first(inputs), output, part)
            return output

        return forward_train

    def note(self, name: str, given: Any, output: Any, part: int = 0) -> None:
        """A module has been run: its first input, and its output."""
        if not paddle.in_dynamic_mode() or not isinstance(output, paddle.Tensor):
            return
        tokens = self._now()
        if tokens is None or (piece := self._piece(output.detach(), tokens)) is None:
            return
        number = tokens.micro_batch
        self.order.setdefault(name, (part, len(self.order)))
        # under recompute a layer runs twice, the second time for the gradients
        if isinstance(given, paddle.Tensor) and (found := self._piece(given.detach(), tokens)) is not None:
            self.inputs.setdefault(name, {}).setdefault(number, found)
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

    def record(self, mesh: Mesh) -> Record:
        """What this rank has seen."""
        arrays: dict[str, np.ndarray] = {}
        modules: dict[str, Any] = {}
        for name, place in self.order.items():
            modules[name] = {"order": place, "class": self.kinds.get(name, "")}
            for kind in ("inputs", "outputs", "gradients"):
                pieces = getattr(self, kind).get(name, {})
                if pieces:
                    modules[name][kind] = next(iter(pieces.values())).part
                    ordered = [pieces[number] for number in sorted(pieces)]
                    arrays[f"{kind}|{name}"] = np.concatenate([piece.values for piece in ordered])
                    arrays[f"{kind}|{name}|names"] = np.concatenate([piece.names for piece in ordered])
        about = {"coordinate": mesh.coordinate, "data_rank": mesh.data_rank, "modules": modules}
        return Record(mesh.rank, about, arrays)


def _first(given: Any) -> Any:
    return given[0] if isinstance(given, (tuple, list)) and given else given


@dataclasses.dataclass(frozen=True)
class Record:
    """What one rank has seen, for `llmsuite.align.merge`."""

    rank: int
    about: dict[str, Any]
    """Its place, and what there is of each module; JSON data."""
    arrays: dict[str, np.ndarray]

    def with_tokens(self, known: Sequence[Tokens]) -> Record:
        """The same, with the tokens of its passes."""
        names = np.concatenate([tokens.every_name for tokens in known]) if known else np.zeros(0, "uint64")
        is_exact = all(tokens.is_exact for tokens in known)
        return Record(self.rank, {**self.about, "is_exact": is_exact}, {**self.arrays, "tokens": names})

    def with_samples(self, kind: str, samples: Mapping[str, Sample]) -> Record:
        """The same, with samples of tensors: of kind "parameters" or "parameter_gradients"."""
        about = {**self.about, kind: {name: found.about() for name, found in samples.items()}}
        values = {f"{kind}|{name}": found.values for name, found in samples.items()}
        return Record(self.rank, about, {**self.arrays, **values})

    def write(self, directory: Path) -> None:
        """Write it where `merge.read_side` looks."""
        np.savez(directory / f"rank-{self.rank}.npz", **self.arrays)
        (directory / f"rank-{self.rank}.json").write_text(json.dumps(self.about), encoding="utf-8")
