"""The section `prefix`. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from llmsuite.schema.numbers import PositiveInt
from llmsuite.schema.section import Section


@dataclasses.dataclass(kw_only=True)
class PrefixSection(Section):
    """Keys and values in front of every row (prefix tuning, Li and Liang 2021, arXiv 2101.00190), trained instead of
    the model, in the stages `sft` and `lora`."""

    tokens: PositiveInt | None = None
    """Length of the prefix, which takes as many of the model's positions; null: no prefix."""
    projection: bool = False
    """Whether keys and values are what a network of two layers makes of an embedding of the prefix, and this network is
    trained. It is shared by all layers of the model; what is generated with is what it has made."""
    projection_hidden_size: PositiveInt | None = None
    """With projection: width between its two layers; null: hidden_size of the model."""

    def network_size(self, hidden_size: int) -> int | None:
        """Width between the two layers of the network, for a model of this hidden size; None without a network."""
        chosen, width = self.projection, self.projection_hidden_size or hidden_size
        return width if chosen else None

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.projection and self.tokens is None:
            yield "projection", "is true, and tokens is null: there is no prefix to be made"
        if self.projection_hidden_size is not None and not self.projection:
            yield "projection_hidden_size", f"is {self.projection_hidden_size}; it needs projection: set it to true"
