"""The recipe section `reft`. Imports no Paddle."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from llmsuite.contract.schema.numbers import NonNegativeInt, Rank
from llmsuite.contract.schema.section import Section, keys_except

_POSITIONS = re.compile(r"f([1-9]\d*)(?:\+l([1-9]\d*))?|l([1-9]\d*)")


@dataclasses.dataclass(kw_only=True)
class ReftSection(Section):
    """Representation fine-tuning (LoReFT, Wu et al. 2024, arXiv 2404.03592): train low-rank interventions on hidden
    states and freeze the model. For the stages `sft` and `lora`."""

    rank: Rank | None = None
    """Dimension of the subspace that an intervention edits. null: no interventions."""
    layers: list[NonNegativeInt] | None = None
    """Decoder layers whose outputs are edited, counted from 0. Default: all layers."""
    positions: str = "f7+l7"
    """Prompt tokens that are edited: "f7+l7" is the first 7 and the last 7, "f3" the first 3, "l1" the last one. In a
    short prompt at most half of the tokens at each end, as in pyreft."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if _POSITIONS.fullmatch(self.positions) is None:
            yield "positions", f'is {self.positions!r}; expected a value such as "f7+l7", "f3" or "l1"'
        if self.layers is not None and (not self.layers or len(set(self.layers)) < len(self.layers)):
            yield "layers", f"is {self.layers}; name at least one layer, each once, or leave it out for all"

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.rank is None:
            for key in keys_except(self, "rank"):
                yield key, "has no effect while rank is null; set that too, or remove it"

    @property
    def ends(self) -> tuple[int, int]:
        """Number of first and of last prompt tokens that are edited."""
        return parse_positions(self.positions)


def parse_positions(positions: str) -> tuple[int, int]:
    """Return the number of first and of last tokens in a text such as "f7+l7", like `parse_positions` of pyreft.

    Raises:
        ValueError: the text is malformed.
    """
    match = _POSITIONS.fullmatch(positions)
    if match is None:
        raise ValueError(f"{positions!r} names no tokens")
    return int(match[1] or 0), int(match[2] or match[3] or 0)
