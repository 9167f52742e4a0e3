"""Parity of the forms of one model, module by module: in training, in generation, and as an exported program.

All of them have to be the same network. Each form runs on rows of tokens, the outputs of its modules are recorded, and
`llmsuite.observe.activations` finds the first module that differs.

Shapes: B rows, L positions, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.base.interrupts import held_interrupts
from llmsuite.base.typing import Tensor
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.tensors import tensor_of
from llmsuite.inference.decoder import Cache
from llmsuite.models.exact import describe_module
from llmsuite.observe.activations.compare import TOLERANCE, compare
from llmsuite.observe.activations.contexts import PADDING, contexts
from llmsuite.observe.activations.merge import Side, build_side
from llmsuite.observe.activations.recording import ActivationHooks, RankRecord, Tokens
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.pipeline import PipelineStage

ALONE = Mesh(Degrees(1, 1, 1, 1), 0)
LOGITS = "logits"
"""Name of the last output, next to those of modules."""
Forward = Callable[[np.ndarray, np.ndarray, Cache | None], tuple[np.ndarray, Cache]]
"""A `llmsuite.inference.decoder.Decoder.forward`."""


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Rows of random tokens of unequal length. The first pass reads a batch of prompts that is padded on the left,
    later passes one token of each row."""

    ids: np.ndarray
    """[B, L] int64, padded on the left by zeros."""
    padding: np.ndarray
    """[B] int64: number of padding positions at the beginning of each row."""
    prompt: int
    """Positions of the first pass."""

    @classmethod
    def random(cls, vocab_size: int, length: int, count: int = 3, seed: int = 0) -> TokenRows:
        """`count` random rows of at most `length` tokens, half of them prompt."""
        random = np.random.default_rng(seed)
        prompt = max(1, length // 2)
        ids = random.integers(0, vocab_size, [count, length])
        padding = np.asarray([0, *random.integers(0, prompt, count - 1)], "int64")
        ids[np.arange(length) < padding[:, None]] = 0
        return cls(ids.astype("int64"), padding, prompt)

    @property
    def names(self) -> np.ndarray:
        """[B, L], uint64: the contexts of all tokens."""
        at = np.arange(self.ids.shape[1])
        starts = np.where(at < self.padding[:, None], -1, self.padding[:, None])
        return contexts(self.ids, starts)

    @property
    def passes(self) -> list[slice]:
        """The positions of each pass."""
        return [slice(0, self.prompt), *(slice(i, i + 1) for i in range(self.prompt, self.ids.shape[1]))]

    def to_left(self, values: np.ndarray) -> np.ndarray:
        """Rows [B, L] with their padding moved to the right."""
        return np.stack([np.roll(row, -int(start)) for row, start in zip(values, self.padding)])


def tokens_of(number: int, names: np.ndarray) -> Tokens:
    """The tokens of a pass by their contexts [B, L]; none is left out of the comparison."""
    flat = names.reshape(-1)
    indices = np.nonzero(flat != PADDING)[0]
    return Tokens(number, (names.shape[0], names.shape[1]), flat[indices], indices, flat, is_exact=True)


class ActivationRecorder:
    """A recorder of the outputs of a model's modules in each pass."""

    def __init__(self, models: Sequence[Any], mesh: Mesh = ALONE):
        """
        Args:
            models: the parts of a model that this rank has; their modules get hooks.
            mesh: this rank's coordinates.
        """
        self._now: Tokens | None = None
        self._passes: list[Tokens] = []
        self._mesh = mesh
        self._activations = ActivationHooks(lambda: self._now, mesh.coordinate["tp"])
        for model in models:
            self._activations.watch(model, mesh.coordinate["pp"])

    def begin(self, names: np.ndarray) -> None:
        """Begin a pass over tokens of these contexts [B, L]."""
        self._now = tokens_of(len(self._passes), names)
        self._passes.append(self._now)

    def add(self, name: str, given: Any, output: Any) -> None:
        """Add input and output of a module that runs elsewhere."""
        self._activations.note(name, given, output)

    def logits(self, names: np.ndarray, values: np.ndarray) -> None:
        """Add logits [B, l, V] of tokens of these contexts [B, l]."""
        self._now = tokens_of(len(self._passes), names)
        self._activations.note(LOGITS, None, tensor_of(values.astype("float32")))

    def record(self) -> RankRecord:
        """The record of all passes."""
        return self._activations.record(self._mesh).with_tokens(self._passes)


@paddle.no_grad()
def record_training(model: Any, rows: TokenRows) -> RankRecord:
    """Record the forward pass of training, of an unsharded model on one device, in its present mode."""
    stage = PipelineStage([model], ALONE, model.config.hidden_size, [], None)
    recorder = ActivationRecorder([model])
    names = rows.to_left(rows.names)
    recorder.begin(names)
    hidden, _ = stage.hidden_states(tensor_of(rows.to_left(rows.ids)))
    recorder.logits(names, stage.logits(hidden).astype("float32").numpy())
    return recorder.record()


def record_decoding(model: Any, forward: Forward, rows: TokenRows, mesh: Mesh = ALONE) -> RankRecord:
    """Record the passes of generation: prompts, then token by token with the cache. Every rank of the mesh calls it.

    Args:
        model: this rank's shard, whose modules are recorded.
        forward: makes a pass of it.
        rows: to read.
        mesh: this rank's coordinates.
    """
    recorder = ActivationRecorder([model], mesh)
    names = rows.names
    cache = None
    for positions in rows.passes:
        recorder.begin(names[:, positions])
        logits, cache = forward(rows.ids[:, positions], rows.padding, cache)
        recorder.logits(names[:, positions][:, -1:], logits[:, None])
    return recorder.record()


def record_program(model: Any, step: Any, rows: TokenRows, shapes: Sequence[Sequence[int]], dtype: str) -> RankRecord:
    """Record the passes of a program, which is built here with the outputs of all modules as additional results.

    Args:
        model: in the form for programs.
        step: a layer with the model, whose forward becomes the program (`export.DecodeStep`).
        rows: to read.
        shapes: of the tensors of its cache (`export.cache_shapes`).
        dtype: of them.
    """
    recorder = ActivationRecorder([])
    names = rows.names
    traced = _TracedModules(model)

    def run(ids: Tensor, padding: Tensor, cache: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        traced.reset()
        return list(step(ids, padding, cache)), traced.values

    spec = paddle.static.InputSpec
    program = paddle.jit.to_static(
        # nothing in it branches on values, so its code needs no translation
        paddle.jit.not_to_static(run),
        input_spec=[
            spec([None, None], "int64"),
            spec([None], "int64"),
            [spec([None, *shape[:-2], None, shape[-1]], dtype) for shape in shapes],
        ],
        full_graph=True,
    )
    cache = [paddle.zeros([len(rows.ids), *shape], dtype) for shape in shapes]
    with paddle.no_grad():
        for positions in rows.passes:
            recorder.begin(names[:, positions])
            given = tensor_of(rows.ids[:, positions]), tensor_of(rows.padding)
            with held_interrupts():  # the first call builds the program
                (logits, *cache), values = program(*given, cache)
            for name, input_index, output_index in traced.entries:
                recorder.add(name, None if input_index is None else values[input_index], values[output_index])
            recorder.logits(names[:, positions][:, -1:], logits.astype("float32").numpy()[:, None])
    return recorder.record()


class _TracedModules:
    """Inputs and outputs of modules while a program is traced."""

    def __init__(self, model: Any):
        self.reset()
        for name, module in model.named_sublayers():
            module.register_forward_post_hook(self._hook(name))

    def reset(self) -> None:
        """Start again, because the program is traced again."""
        self.values: list[Tensor] = []
        self.entries: list[tuple[str, int | None, int]] = []
        self._indices: dict[int, int] = {}

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            found = [given[0] if isinstance(given, tuple) and given else given for given in (inputs, output)]
            input_index, output_index = map(self._index, found)
            if output_index is not None:
                self.entries.append((name, input_index, output_index))

        return hook

    def _index(self, value: Any) -> int | None:
        """Index of a value among the results; None for a value inside a branch of the program, or without a vector for
        each token."""
        if paddle.in_dynamic_mode() or not hasattr(value, "get_defining_op") or len(value.shape) < 3:
            return None
        if value.get_defining_op().get_parent_block() != paddle.static.default_main_program().global_block():
            return None
        if id(value) not in self._indices:
            self._indices[id(value)] = len(self.values)
            self.values.append(value)
        return self._indices[id(value)]


def side(records: Sequence[RankRecord], precision: str = "fp32") -> Side:
    """One side of a comparison, from the records of all ranks."""
    return build_side([(record.about, record.arrays) for record in records], {}, precision)


def first_difference(one: Side, other: Side, model: Any, tolerance: float | None = None) -> str | None:
    """The first module whose output differs between two forms of a model, with its class; None where all agree.

    Args:
        one: a form of the model.
        other: another form.
        model: the model with the modules.
        tolerance: largest relative difference that counts as equal; None for the tolerance of the precision.
    """
    limit = tolerance if tolerance is not None else TOLERANCE[one.precision]
    first = compare(one, other, ("", ""), limit).first_forward
    if first is None:
        return None
    module = dict(model.named_sublayers()).get(first.name)
    return first.name if module is None else describe_module(first.name, module)
