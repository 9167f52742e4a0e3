"""Recording of inputs and outputs of modules, and of the gradients of outputs, at selected tokens on each rank.

Forward hooks record every module whose output has a vector for each token. For a tensor that is distributed over tp, a
rank stores its local part and the kind of partition; `llmsuite.observe.activations.merge` combines the parts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import paddle

from llmsuite.base.fields import field_values
from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.models.blocks import DecoderLayer, LayerExecution
from llmsuite.observe.activations.contexts import contexts, select_tokens
from llmsuite.observe.activations.samples import Sample
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.tensor import local_value

Part = Literal["whole", "columns", "tokens", "sum"]
"""The part of a tensor on a rank of a tensor parallel group: all of it, some columns, some tokens, or a term of a
sum."""


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of one micro-batch."""

    micro_batch: int
    shape: tuple[int, int]
    """B and L."""
    names: np.ndarray
    """[T], uint64: contexts of the selected tokens."""
    places: np.ndarray
    """[T]: their positions in the flattened [B L]."""
    every_name: np.ndarray
    """[B L], uint64: contexts of all tokens."""
    is_exact: bool
    """True where it is known which of them are padding."""

    @classmethod
    def of(cls, micro_batch: int, ids: Any, starts: Any, lengths: Any, every: int) -> Tokens:
        """The tokens of a batch.

        Args:
            micro_batch: its number.
            ids: [B, L].
            starts: [B, L] or None, as for `contexts`.
            lengths: [B] or None, as for `contexts`.
            every: about one token in `every` is selected.
        """
        optional = [None if given is None else np.asarray(given) for given in (starts, lengths)]
        names = contexts(np.asarray(ids), *optional)
        places = select_tokens(names, every)
        flat = names.reshape(-1)
        is_exact = lengths is not None or starts is not None
        return cls(micro_batch, (names.shape[0], names.shape[1]), flat[places], places, flat, is_exact)

    def write(self, path: Path) -> None:
        """Write the tokens for ranks in the middle of the pipeline, which have no ids; the file appears atomically."""
        unfinished = path.with_suffix(".part.npz")
        np.savez(unfinished, **field_values(self))
        os.replace(unfinished, path)

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """Read the tokens that `write` has written."""
        with np.load(path) as stored:
            size, length = stored["shape"].tolist()
            names, places, every_name = (stored[name] for name in ("names", "places", "every_name"))
            return cls(int(stored["micro_batch"]), (size, length), names, places, every_name, bool(stored["is_exact"]))


@dataclasses.dataclass(frozen=True)
class LocalPart:
    """The part of a tensor on one rank, at the selected tokens of one micro-batch."""

    part: Part
    names: np.ndarray
    """[T], uint64."""
    values: np.ndarray
    """[T, F], float32."""


class _RecordedExecution(LayerExecution):
    """Another execution of a layer, whose first input and output are recorded."""

    is_plain = False

    def __init__(self, inner: LayerExecution, note: Callable[[Any, Any], None]):
        self.is_recomputed = inner.is_recomputed
        self._inner = inner
        self._note = note

    def run(self, function: Callable[..., Tensor], x: Tensor, *context: Tensor | None) -> Tensor:
        output = self._inner.run(function, x, *context)
        self._note(x, output)
        return output


class ActivationHooks:
    """Records modules of a model by hooks: for each module and micro-batch its first input, one output and the gradient
    of this output."""

    def __init__(self, now: Callable[[], Tokens | None], tp_rank: int = 0):
        """
        Args:
            now: returns the tokens of the present pass; None when nothing is to be recorded.
            tp_rank: rank in the tensor parallel group.
        """
        self._current_tokens = now
        self._tp_rank = tp_rank
        self.order: dict[str, tuple[int, int]] = {}
        """Pipeline chunk of each module, and its number in the order of execution."""
        self.kinds: dict[str, str] = {}
        """The class of each module."""
        self.inputs: dict[str, dict[int, LocalPart]] = {}
        self.outputs: dict[str, dict[int, LocalPart]] = {}
        self.gradients: dict[str, dict[int, LocalPart]] = {}
        self._has_hook: set[tuple[str, int]] = set()

    def watch(self, model: Any, part: int = 0) -> None:
        """Record the modules of a model from now on; `part` is the number of its pipeline chunk."""

        def hook_of(name: str) -> Callable[..., None]:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                self.note(name, _first(inputs), _first(output), part)

            return hook

        for name, module in model.named_sublayers():
            self.kinds.setdefault(name, type(module).__name__)
            module.register_forward_post_hook(hook_of(name))
            if isinstance(module, DecoderLayer) and not module.execution.is_plain:
                # compiled: hooks inside would run while the program is traced
                module.execution = _RecordedExecution(module.execution, functools.partial(self.note, name, part=part))

    def note(self, name: str, given: Any, output: Any, part: int = 0) -> None:
        """Record a call of a module: its first input and its output."""
        if not paddle.in_dynamic_mode() or not isinstance(output, paddle.Tensor):
            return
        tokens = self._current_tokens()
        piece = None
        if tokens is not None:
            piece = self._local_part(output.detach(), tokens)
        if tokens is None or piece is None:
            return
        number = tokens.micro_batch
        self.order.setdefault(name, (part, len(self.order)))
        # under recompute a layer runs twice, the second time for the gradients: the first values are kept
        found = None
        if isinstance(given, paddle.Tensor):
            found = self._local_part(given.detach(), tokens)
        if found is not None:
            self.inputs.setdefault(name, {}).setdefault(number, found)
        self.outputs.setdefault(name, {}).setdefault(number, piece)
        # outputs of custom operators have stop_gradient=False also under no_grad (Paddle 3.3.1)
        has_gradient = paddle.is_grad_enabled() and not output.stop_gradient
        if not has_gradient or (name, number) in self._has_hook:
            return
        self._has_hook.add((name, number))

        def hook(gradient: Tensor) -> None:
            found = self._local_part(gradient.detach(), tokens)
            if found is not None:
                self.gradients.setdefault(name, {})[number] = found

        output.register_hook(hook)

    @paddle.no_grad()
    def _local_part(self, tensor: Tensor, tokens: Tokens) -> LocalPart | None:
        """This rank's part of a tensor [B, L, F] at the selected tokens; None for a tensor of another shape."""
        size, length = tokens.shape
        if tuple(tensor.shape[:2]) != (size, length) or len(tensor.shape) < 3:
            return None
        part: Part = "whole"
        if tensor.is_dist():
            (placement,) = tensor.placements
            if placement.is_shard(0):
                return None
            if placement.is_partial():
                part = "sum"
            elif placement.is_shard(1):
                part = "tokens"
            elif placement.is_shard():
                part = "columns"
        local = local_value(tensor)
        names = tokens.names
        places = tokens.places
        if part == "tokens":
            here = local.shape[1]
            row, column = np.divmod(places, length)
            mine = column // here == self._tp_rank
            names = names[mine]
            places = (row * here + column % here)[mine]
        flat = local.reshape([local.shape[0] * local.shape[1], -1])
        if not len(places):
            return LocalPart(part, names, np.zeros([0, flat.shape[1]], "float32"))
        values = array_of(flat.index_select(tensor_of(places, dtype="int64"), 0).astype("float32"))
        return LocalPart(part, names, values)

    def record(self, mesh: Mesh) -> RankRecord:
        """The record of this rank."""
        arrays: dict[str, np.ndarray] = {}
        modules: dict[str, Any] = {}
        by_kind = {"inputs": self.inputs, "outputs": self.outputs, "gradients": self.gradients}
        for name, place in self.order.items():
            modules[name] = {"order": place, "class": self.kinds.get(name, "")}
            for kind, by_module in by_kind.items():
                pieces = by_module.get(name, {})
                if pieces:
                    modules[name][kind] = next(iter(pieces.values())).part
                    ordered = [pieces[number] for number in sorted(pieces)]
                    arrays[f"{kind}|{name}"] = np.concatenate([piece.values for piece in ordered])
                    arrays[f"{kind}|{name}|names"] = np.concatenate([piece.names for piece in ordered])
        about = {"coordinate": mesh.coordinate, "data_rank": mesh.data_rank, "modules": modules}
        return RankRecord(mesh.rank, about, arrays)


def _first(given: Any) -> Any:
    if isinstance(given, (tuple, list)) and given:
        return given[0]
    return given


@dataclasses.dataclass(frozen=True)
class RankRecord:
    """The record of one rank, for `llmsuite.observe.activations.merge`."""

    rank: int
    about: dict[str, Any]
    """Coordinate of the rank, and the arrays that exist for each module; JSON data."""
    arrays: dict[str, np.ndarray]

    def with_tokens(self, known: Sequence[Tokens]) -> RankRecord:
        """Return a copy with the tokens of its passes."""
        names = np.concatenate([tokens.every_name for tokens in known]) if known else np.zeros(0, "uint64")
        is_exact = all(tokens.is_exact for tokens in known)
        return RankRecord(self.rank, {**self.about, "is_exact": is_exact}, {**self.arrays, "tokens": names})

    def with_samples(self, kind: str, samples: Mapping[str, Sample]) -> RankRecord:
        """Return a copy with samples of tensors: of kind "parameters" or "parameter_gradients"."""
        about = {**self.about, kind: {name: found.about() for name, found in samples.items()}}
        values = {f"{kind}|{name}": found.values for name, found in samples.items()}
        return RankRecord(self.rank, about, {**self.arrays, **values})

    def write(self, directory: Path) -> None:
        """Write the files that `merge.read_side` reads."""
        np.savez(directory / f"rank-{self.rank}.npz", **self.arrays)
        (directory / f"rank-{self.rank}.json").write_text(json.dumps(self.about), encoding="utf-8")
