"""The edges of a pipeline: which part sends which tensors to which, and over which channel. Plain data, without Paddle.

`pipeline` and `p2p` execute this description, the planner sums its messages, and tests simulate schedules with it.
Parts are numbered along the model: chunk c of stage s is part c * num_stages + s.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from llmsuite.base.errors import UserError

Content = Literal["header", "document_starts", "activations", "gradients"]

HEADER_LENGTH = 5
"""Elements of a header: the shape of the activations [B, L, D], the length of the document starts (0 without any), and
the index of the activations' dtype in `DTYPES`. It is sent first, because shapes change from micro-batch to
micro-batch; see `has_header`."""

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of activations."""


def dtype_code(dtype: object) -> int:
    """Index of a Paddle dtype in `DTYPES`."""
    return DTYPES.index(str(dtype).removeprefix("paddle."))


def check_same_batch(sent: Sequence[int], read: Sequence[int]) -> None:
    """Raise UserError when the previous part has sent a micro-batch of another shape [B, L] than this one has read."""
    if list(sent) != list(read):
        raise UserError(
            f"the first rank of the pipeline sends a micro-batch of {list(sent)} tokens, the last one has read one of "
            f"{list(read)}; do their machines have the same data files?"
        )


class Message(NamedTuple):
    """A tensor that is sent to a neighbour in the pipeline."""

    content: Content
    shape: tuple[int, ...]

    @property
    def is_int64(self) -> bool:
        """True where the elements are integers; otherwise they have the dtype of the activations."""
        return self.content in ("header", "document_starts")


def has_header(to: int, num_parts: int, micro_batch: int | None) -> bool:
    """True where a header comes before activations. The rank of the last part has read the micro-batch itself, and
    knows the shapes: it waits for the device once in the passes over a global batch, to compare with what it has read.

    Args:
        to: the part that gets the activations.
        num_parts: parts of the model.
        micro_batch: its number in the schedule; None outside of a schedule.
    """
    return to < num_parts - 1 or not micro_batch


def contents(forward: bool, has_documents: bool, with_header: bool = True) -> list[Content]:
    """The contents that one pass sends over one edge, in this order."""
    if not forward:
        return ["gradients"]
    found: list[Content] = ["header"] if with_header else []
    if has_documents:
        found.append("document_starts")
    return [*found, "activations"]


def messages(forward: bool, shape: Sequence[int], documents_length: int, with_header: bool = True) -> list[Message]:
    """The tensors that one pass sends over one edge, in this order.

    Args:
        forward: the direction of the pass.
        shape: shape of the activations, and of their gradients, on one rank: [B, L, D]. Under sequence parallel L is
            the length of a rank's part of the sequence.
        documents_length: L of the full sequence where rows hold several documents, else 0.
        with_header: `has_header`.
    """
    shapes: dict[Content, tuple[int, ...]] = {
        "header": (HEADER_LENGTH,),
        "document_starts": (shape[0], documents_length),
        "activations": tuple(shape),
        "gradients": tuple(shape),
    }
    return [Message(content, shapes[content]) for content in contents(forward, documents_length > 0, with_header)]


def source(part: int, num_parts: int, forward: bool) -> int | None:
    """The part that a pass receives its input from; None where it starts with ids, or with the loss."""
    before = part - 1 if forward else part + 1
    return before if 0 <= before < num_parts else None


def target(part: int, num_parts: int, forward: bool) -> int | None:
    """The part that a pass sends its result to; None where it ends with the loss, or with the ids."""
    return source(part, num_parts, not forward)


class Channel(NamedTuple):
    """One direction between two ranks. Messages arrive in the order in which they are sent.

    With two ranks of several chunks each, either rank is the next of the other, so activations and gradients go in the
    same direction. They have a channel each, because they are not received in the order in which they are sent.
    """

    sender: int
    receiver: int
    forward: bool


def channels(ranks: Sequence[int], ring: bool) -> list[Channel]:
    """All channels between the ranks of a pipeline; with `ring` the last rank sends to the next chunk of the first."""
    pairs = list(itertools.pairwise(ranks))
    if ring:
        pairs.append((ranks[-1], ranks[0]))
    return [channel for a, b in pairs for channel in (Channel(a, b, True), Channel(b, a, False))]


def outgoing(ranks: Sequence[int], rank: int, forward: bool) -> Channel:
    """The channel that a rank of a pipeline sends to. At the end of a pipeline that is no ring, nothing uses it."""
    step = 1 if forward else -1
    return Channel(rank, ranks[(ranks.index(rank) + step) % len(ranks)], forward)


def incoming(ranks: Sequence[int], rank: int, forward: bool) -> Channel:
    """The channel that a rank of a pipeline receives from."""
    return Channel(outgoing(ranks, rank, not forward).receiver, rank, forward)
