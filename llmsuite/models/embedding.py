"""The embedding of a decoder, whose lookup is a part that the engine chooses.

Shapes: B rows, L length, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn
from typing_extensions import Self

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.models.exact import describe_module

Lookup = Callable[[Tensor, Tensor], Tensor]
"""Maps ids [B, L] and a table [V, D] to the rows of the ids, [B, L, D]."""


class WithLookup:
    """A layer that looks up rows of its tables by a function of its own choice."""

    lookup: Lookup = staticmethod(F.embedding)
    """Lookup of ids in a table: other ones than Paddle's are for ranks that have some of the rows of all tables, and
    for sparse gradients."""


class Embedding(nn.Embedding, WithLookup):
    """Paddle's embedding with a choice of its lookup."""

    def __init__(self, num_rows: int, width: int, weight_attr: Any = None):
        super().__init__(num_rows, width, weight_attr=weight_attr)

    @classmethod
    def adopt(cls, embedding: nn.Embedding) -> Self:
        """An embedding with the parameter and the hooks of one of Paddle's."""
        adopted = cls(1, 1, paddle.ParamAttr(initializer=nn.initializer.Constant(0.0)))
        adopted.weight = embedding.weight
        adopted._forward_pre_hooks.update(embedding._forward_pre_hooks)
        adopted._forward_post_hooks.update(embedding._forward_post_hooks)
        adopted.training = embedding.training
        return adopted

    def forward(self, input_ids: Tensor) -> Tensor:
        """Ids [B, L] to rows [B, L, D]."""
        return self.lookup(input_ids, self.weight)


def is_plain_embedding(layer: Any) -> bool:
    """True for an embedding that does nothing but look up rows: Paddle's or `Embedding`, of no subclass and with no
    replaced `forward`."""
    return type(layer) in (nn.Embedding, Embedding) and "forward" not in vars(layer)


def check_embedding(name: str, embedding: Any, key: str) -> None:
    """Raise UserError for an embedding whose lookup is not Paddle's: ranks look up their parts of the vocabulary in
    another way. `key` is the recipe key that needs several ranks."""
    if not is_plain_embedding(embedding):
        raise UserError(
            f"{key}: {describe_module(name, embedding)} has a forward pass of its own, and ranks that split the "
            "vocabulary use their own lookup. Move what it adds to the model's `embed` and `embed_at`, or use 1"
        )


def set_lookup(model: nn.Layer, name: str, lookup: Lookup, key: str) -> None:
    """Choose the lookup of an embedding of a model, or of the adapter on it. An embedding of Paddle's becomes an
    `Embedding`.

    Args:
        model: its owner.
        name: of the embedding in the model.
        lookup: looks up ids in its table, and in the tables of its adapter.
        key: recipe key that needs the lookup, for messages.

    Raises:
        UserError: as `check_embedding`.
    """
    modules = dict(model.named_sublayers(include_self=True))
    embedding: Any = modules[name]
    is_adapter = isinstance(embedding, WithLookup) and not isinstance(embedding, nn.Embedding)
    if not is_adapter:
        check_embedding(name, embedding, key)
    if type(embedding) is nn.Embedding:
        embedding = Embedding.adopt(embedding)
        owner, _, attribute = name.rpartition(".")
        setattr(modules[owner], attribute, embedding)
    embedding.lookup = lookup
