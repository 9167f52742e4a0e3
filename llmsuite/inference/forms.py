"""The forms of one model, module by module: as it is trained, as it answers, and as a program.

All of them are to be the same network. A form is run on rows of tokens, every module of it is watched, and
`llmsuite.align` names the first one that gives something else.

Shapes: B rows, L columns, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.align.activations import Activations, Record, Tokens
from llmsuite.align.compare import TOLERANCE, compare
from llmsuite.align.contexts import PADDING, contexts
from llmsuite.align.merge import Side, side_of
from llmsuite.inference.decoder import Cache
from llmsuite.models.exact import named_kind
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.schema.degrees import Degrees
from llmsuite.typing import Tensor

ALONE = Mesh(Degrees(1, 1, 1, 1), 0)
LOGITS = "logits"
"""What the last output is called beside those of modules."""
Forward = Callable[[np.ndarray, np.ndarray, Cache | None], tuple[np.ndarray, Cache]]
"""As `llmsuite.inference.decoder.Decoder.forward`."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of random tokens of unequal length, and how they are read: the first columns at once, as a batch of prompts
    that is padded on the left, the others one by one."""

    ids: np.ndarray
    """[B, L] int64, padded on the left by zeros."""
    padding: np.ndarray
    """[B] int64: how many of the first columns are padding."""
    prompt: int
    """Columns that are read at once."""

    @classmethod
    def random(cls, vocab_size: int, length: int, count: int = 3, seed: int = 0) -> Rows:
        """`count` rows of `length` columns at most, half of them prompt."""
        draw, prompt = np.random.default_rng(seed), max(1, length // 2)
        ids = draw.integers(0, vocab_size, [count, length])
        padding = np.asarray([0, *draw.integers(0, prompt, count - 1)], "int64")
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
        """The columns of each pass."""
        return [slice(0, self.prompt), *(slice(i, i + 1) for i in range(self.prompt, self.ids.shape[1]))]

    def to_left(self, values: np.ndarray) -> np.ndarray:
        """Rows [B, L] with their padding on the right."""
        return np.stack([np.roll(row, -int(start)) for row, start in zip(values, self.padding)])


def tokens_of(number: int, names: np.ndarray) -> Tokens:
    """The tokens of a pass, all of which are looked at, by their contexts [B, L]."""
    flat = names.reshape(-1)
    places = np.nonzero(flat != PADDING)[0]
    return Tokens(number, (names.shape[0], names.shape[1]), flat[places], places, flat, is_exact=True)


class Watched:
    """Modules that are watched while passes are made."""

    def __init__(self, models: Sequence[Any], mesh: Mesh = ALONE):
        """`models`: the parts of a model that this rank has."""
        self._now: Tokens | None = None
        self._known: list[Tokens] = []
        self._mesh = mesh
        self._activations = Activations(lambda: self._now, mesh.coordinate["tp"])
        for model in models:
            self._activations.watch(model, mesh.coordinate["pp"])

    def begin(self, names: np.ndarray) -> None:
        """A pass over tokens of these contexts [B, L] comes."""
        self._now = tokens_of(len(self._known), names)
        self._known.append(self._now)

    def note(self, name: str, given: Any, output: Any) -> None:
        """A module, run elsewhere, has given this."""
        self._activations.note(name, given, output)

    def logits(self, names: np.ndarray, values: np.ndarray) -> None:
        """Logits [B, l, V] of tokens of these contexts [B, l]."""
        self._now = tokens_of(len(self._known), names)
        self._activations.note(LOGITS, None, paddle.to_tensor(values.astype("float32")))

    def record(self) -> Record:
        """What was seen."""
        return self._activations.record(self._mesh).with_tokens(self._known)


@paddle.no_grad()
def as_trained(model: Any, rows: Rows) -> Record:
    """The pass that a training stage makes of a whole model on one device, in the mode that it is in."""
    stage = PipelineStage([model], ALONE, model.config.hidden_size, [], None)
    watched, names = Watched([model]), rows.to_left(rows.names)
    watched.begin(names)
    hidden, _ = stage.hidden_states(paddle.to_tensor(rows.to_left(rows.ids)))
    watched.logits(names, stage.logits(hidden).astype("float32").numpy())
    return watched.record()


def as_decoded(model: Any, forward: Forward, rows: Rows, mesh: Mesh = ALONE) -> Record:
    """The passes of generation: prompts, and then token by token with the cache. Every rank of the mesh calls it.

    Args:
        model: this rank's part, whose modules are watched.
        forward: makes a pass of it.
        rows: to read.
        mesh: this rank's place.
    """
    watched, names, cache = Watched([model], mesh), rows.names, None
    for columns in rows.passes:
        watched.begin(names[:, columns])
        logits, cache = forward(rows.ids[:, columns], rows.padding, cache)
        watched.logits(names[:, columns][:, -1:], logits[:, None])
    return watched.record()


def as_program(model: Any, step: Any, rows: Rows, shapes: Sequence[Sequence[int]], dtype: str) -> Record:
    """The passes of a program, which is made here with the outputs of all modules as further results.

    Args:
        model: in the form for programs.
        step: a layer that has it, whose forward becomes the program (`export.DecodeStep`).
        rows: to read.
        shapes: of the tensors of its cache (`export.cache_shapes`).
        dtype: of them.
    """
    watched, names, traced = Watched([]), rows.names, _Traced(model)

    def run(ids: Tensor, padding: Tensor, cache: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        traced.forget()
        return list(step(ids, padding, cache)), traced.values

    spec = paddle.static.InputSpec
    program = paddle.jit.to_static(
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
        for columns in rows.passes:
            watched.begin(names[:, columns])
            given = paddle.to_tensor(rows.ids[:, columns]), paddle.to_tensor(rows.padding)
            (logits, *cache), values = program(*given, cache)
            for name, of_input, of_output in traced.places:
                watched.note(name, None if of_input is None else values[of_input], values[of_output])
            watched.logits(names[:, columns][:, -1:], logits.astype("float32").numpy()[:, None])
    return watched.record()


class _Traced:
    """Inputs and outputs of modules while a program is made."""

    def __init__(self, model: Any):
        self.forget()
        for name, module in model.named_sublayers():
            module.register_forward_post_hook(self._hook(name))

    def forget(self) -> None:
        """The program is made anew."""
        self.values: list[Tensor] = []
        self.places: list[tuple[str, int | None, int]] = []
        self._known: dict[int, int] = {}

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            found = [given[0] if isinstance(given, tuple) and given else given for given in (inputs, output)]
            of_input, of_output = map(self._place, found)
            if of_output is not None:
                self.places.append((name, of_input, of_output))

        return hook

    def _place(self, value: Any) -> int | None:
        """Where a value is among the results; None for one that a branch of the program has, or that has no vector for
        each token."""
        if paddle.in_dynamic_mode() or not hasattr(value, "get_defining_op") or len(value.shape) < 3:
            return None
        if value.get_defining_op().get_parent_block() != paddle.static.default_main_program().global_block():
            return None
        if id(value) not in self._known:
            self._known[id(value)] = len(self.values)
            self.values.append(value)
        return self._known[id(value)]


def side(records: Sequence[Record], precision: str = "fp32") -> Side:
    """What the ranks of a form have seen."""
    return side_of([(record.about, record.arrays) for record in records], {}, precision)


def first_apart(one: Side, other: Side, model: Any, tolerance: float | None = None) -> str | None:
    """The first module that gives something else in another form, with its class; None where all agree.

    Args:
        one: a form of the model.
        other: another one.
        model: that has the modules.
        tolerance: relative difference that is none; None for what the precision explains.
    """
    limit = tolerance if tolerance is not None else TOLERANCE[one.precision]
    first = compare(one, other, ("", ""), limit).first_forward
    if first is None:
        return None
    module = dict(model.named_sublayers()).get(first.name)
    return first.name if module is None else named_kind(first.name, module)
