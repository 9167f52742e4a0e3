"""The section `prefix`. Imports no Paddle."""

from __future__ import annotations

import dataclasses

from llmsuite.schema.numbers import PositiveInt
from llmsuite.schema.section import Section


@dataclasses.dataclass(kw_only=True)
class PrefixSection(Section):
    """Keys and values in front of every row (prefix tuning, Li and Liang 2021, arXiv 2101.00190), trained instead of
    the model, in the stages `sft` and `lora`."""

    tokens: PositiveInt | None = None
    """Length of the prefix, which takes as many of the model's positions; null: no prefix."""
