"""The section `reft`. Imports no Paddle."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from llmsuite.schema.numbers import NonNegativeInt, Rank
from llmsuite.schema.section import Section

_POSITIONS = re.compile(r"f([1-9]\d*)(?:\+l([1-9]\d*))?|l([1-9]\d*)")


@dataclasses.dataclass(kw_only=True)
class ReftSection(Section):
    """Low-rank interventions on hidden states (LoReFT, Wu et al. 2024, arXiv 2404.03592), trained instead of the model,
    in the stages `sft` and `lora`."""

    rank: Rank | None = None
    """Dimensions of the subspace that an intervention edits; null: no interventions."""
    layers: list[NonNegativeInt] | None = None
    """Numbers of the decoder layers whose outputs are edited, counted from 0. Default: all."""
    positions: str = "f7+l7"
    """Which tokens of a prompt: the first 7 and the last 7; or some of one end only, such as "f3" or "l1". Of a short
    prompt at most half at each end, as in pyreft."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if _POSITIONS.fullmatch(self.positions) is None:
            yield "positions", f'is {self.positions!r}; it has to be such as "f7+l7", "f3" or "l1"'
        if self.layers is not None and (not self.layers or len(set(self.layers)) < len(self.layers)):
            yield "layers", f"is {self.layers}; name at least one layer, each once, or leave it out for all"
        for field in dataclasses.fields(self) if self.rank is None else ():
            if getattr(self, field.name) != field.default:
                yield field.name, "has no effect while rank is null; set that too, or remove it"

    @property
    def ends(self) -> tuple[int, int]:
        """How many of the first and of the last tokens of a prompt are edited."""
        return parse_positions(self.positions)


def parse_positions(positions: str) -> tuple[int, int]:
    """How many of the first and of the last tokens "f7+l7" names, as `parse_positions` of pyreft.

    Raises:
        ValueError: it names none.
    """
    match = _POSITIONS.fullmatch(positions)
    if match is None:
        raise ValueError(f"{positions!r} names no tokens")
    return int(match[1] or 0), int(match[2] or match[3] or 0)
