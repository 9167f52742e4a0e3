"""The edges of a pipeline: which part sends which tensors to which, and over which channel. Plain data, without Paddle.

`pipeline` and `p2p` execute this description, the planner sums it, and tests play schedules through by it.
Parts are numbered along the model: chunk c of stage s is part c * num_stages + s.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from llmsuite.errors import UserError

Content = Literal["header", "document_starts", "activations", "gradients"]

HEADER_LENGTH = 5
"""Elements of a header: the shape of the activations [B, L, D], the length of the document starts, 0 without any, and
the place of the activations' dtype in `DTYPES`. It comes first, because shapes change from micro-batch to
micro-batch."""

DTYPES = ("float32", "bfloat16", "float16")
"""What activations may be."""


def dtype_code(dtype: object) -> int:
    """The place of Paddle's dtype in `DTYPES`."""
    return DTYPES.index(str(dtype).removeprefix("paddle."))


def check_same_batch(sent: Sequence[int], read: Sequence[int]) -> None:
    """Raises UserError when the part before has sent a micro-batch of another shape [B, L] than this one has read."""
    if list(sent) != list(read):
        raise UserError(
            f"the first rank of the pipeline sends a micro-batch of {list(sent)} tokens, the last one has read one of "
            f"{list(read)}; do their machines have the same data files?"
        )


class Message(NamedTuple):
    """A tensor that is sent to a neighbour."""

    content: Content
    shape: tuple[int, ...]

    @property
    def is_int64(self) -> bool:
        """Whether the elements are integers; else they have the dtype of the activations."""
        return self.content in ("header", "document_starts")


def contents(forward: bool, has_documents: bool) -> list[Content]:
    """The contents that one pass sends over one edge, in this order."""
    if not forward:
        return ["gradients"]
    return ["header", "document_starts", "activations"] if has_documents else ["header", "activations"]


def messages(forward: bool, shape: Sequence[int], documents_length: int) -> list[Message]:
    """The tensors that one pass sends over one edge, in this order.

    Args:
        forward: the direction of the pass.
        shape: shape of the activations, and of their gradients, on one rank: [B, L, D]. Under sequence parallel L is
            that of a rank's part of the sequence.
        documents_length: L of the whole sequence where rows hold several documents, else 0.
    """
    shapes: dict[Content, tuple[int, ...]] = {
        "header": (HEADER_LENGTH,),
        "document_starts": (shape[0], documents_length),
        "activations": tuple(shape),
        "gradients": tuple(shape),
    }
    return [Message(content, shapes[content]) for content in contents(forward, documents_length > 0)]


def source(part: int, num_parts: int, forward: bool) -> int | None:
    """The part that a pass gets its input from; None where it begins with ids, or with the loss."""
    before = part - 1 if forward else part + 1
    return before if 0 <= before < num_parts else None


def target(part: int, num_parts: int, forward: bool) -> int | None:
    """The part that a pass sends its result to; None where it ends in the loss, or at the ids."""
    return source(part, num_parts, not forward)


class Channel(NamedTuple):
    """One direction between two ranks. What is sent first is received first.

    Between two ranks that are each other's next, as two ranks with several chunks are, activations and gradients go the
    same way; they have a channel each, for they are not sent in the order in which they are received.
    """

    sender: int
    receiver: int
    forward: bool


def channels(line: Sequence[int], ring: bool) -> list[Channel]:
    """All channels of the ranks of a pipeline; `ring`: whether the last rank sends on to the first one's next chunk."""
    pairs = [*itertools.pairwise(line), *([(line[-1], line[0])] if ring else [])]
    return [channel for a, b in pairs for channel in (Channel(a, b, True), Channel(b, a, False))]


def outgoing(line: Sequence[int], rank: int, forward: bool) -> Channel:
    """The channel that a rank of a pipeline sends in; at the end of a line that is no ring there is none such."""
    return Channel(rank, line[(line.index(rank) + (1 if forward else -1)) % len(line)], forward)


def incoming(line: Sequence[int], rank: int, forward: bool) -> Channel:
    """The channel that a rank of a pipeline receives from."""
    return Channel(outgoing(line, rank, not forward).receiver, rank, forward)
