"""The recipe section `prefix`. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from llmsuite.contract.schema.numbers import PositiveInt
from llmsuite.contract.schema.section import Section


@dataclasses.dataclass(kw_only=True)
class PrefixSection(Section):
    """Prefix tuning (Li and Liang 2021, arXiv 2101.00190): train keys and values that precede every row, and freeze the
    model. For the stages `sft` and `lora`."""

    tokens: PositiveInt | None = None
    """Length of the prefix in tokens; it uses as many of the model's positions. null: no prefix."""
    projection: bool = False
    """true: train an embedding of the prefix and a two-layer network, shared by all layers of the model, that computes
    the keys and values from it; generation uses the computed keys and values. false: train keys and values directly."""
    projection_hidden_size: PositiveInt | None = None
    """With projection: hidden size of the network. null: hidden_size of the model."""

    def network_size(self, hidden_size: int) -> int | None:
        """Return the hidden size of the network for a model of this hidden size; None without a network."""
        if not self.projection:
            return None
        return self.projection_hidden_size or hidden_size

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.tokens is None:
            yield "projection", "is true, but tokens is null: there is no prefix to compute"
        if not self.projection:
            yield (
                "projection_hidden_size",
                f"is {self.projection_hidden_size}, which needs projection; set that to true",
            )
