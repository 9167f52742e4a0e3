"""The recipe section of each built-in stage. Imports no Paddle, so that recipes are checked without it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from llmsuite.recipe.schema import PositiveFloat, PositiveInt
from llmsuite.recipe.section import Section


@dataclasses.dataclass(kw_only=True)
class DpoSection(Section):
    """Direct preference optimisation: chosen answers become likelier than rejected ones."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """sigmoid: Rafailov et al. 2023 (arXiv 2305.18290); hinge: Zhao et al. 2023 (SLiC-HF, arXiv 2305.10425);
    ipo: Azar et al. 2023 (arXiv 2310.12036)."""
    beta: PositiveFloat = 0.1
    """How strongly the model is held to the reference; the tau of ipo."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Assumed share of pairs whose labels are swapped (conservative DPO); for loss sigmoid only."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.label_smoothing > 0 and self.loss != "sigmoid":
            yield "label_smoothing", f"works with loss sigmoid only, and loss is {self.loss}; set it to 0"


@dataclasses.dataclass(kw_only=True)
class SftSection(Section):
    """Supervised fine-tuning: the assistant's turns of conversations are learnt, and where they end."""

    truncate: bool = False
    """Cut conversations behind data.max_length tokens and learn what is left; false to drop them. Both are counted
    and reported."""


@dataclasses.dataclass(kw_only=True)
class PretrainSection(Section):
    """Next-token prediction over text: samples of data.max_length tokens, cut from the documents joined together."""

    mix: dict[str, PositiveFloat] = dataclasses.field(default_factory=dict)
    """More files to train on, named as in data.train, and how many samples of each come on one of data.train."""
    split: str | None = None
    """Without data.eval: the parts of the documents to train on, to evaluate on and to leave out, such as
    "969,30,1"."""
    max_eval_samples: PositiveInt | None = None
    """Evaluate on so many samples, spread evenly. Default: all."""
    documents: Literal["blank_lines", "lines", "files"] = "blank_lines"
    """What parts the documents of a .txt; an indexed corpus knows its own."""
    key: str = "text"
    """Where the rows of .jsonl and .parquet have their text."""
    document_mask: bool = False
    """Where a sample holds several documents, let no token see another one than its own, begin the positions of each
    at 0, and do not learn its first token, which nothing of it predicts."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.split is None:
            return
        parts = self.split.split(",")
        numbers = [float(part) for part in parts if re.fullmatch(r"[0-9]+(\.[0-9]+)?", part)]
        if len(parts) not in (2, 3) or len(numbers) != len(parts) or not (numbers[0] and numbers[1]):
            yield "split", f'is {self.split!r}; it has to be such as "969,30,1": the first two numbers above 0'
