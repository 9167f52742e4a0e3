"""The section `generation`. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from llmsuite.schema.numbers import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from llmsuite.schema.section import Section


@dataclasses.dataclass(kw_only=True)
class GenerationSection(Section):
    """Answers to the prompts of `data.eval`, which the model generates at each evaluation, compared with the answers of
    the rows: `eval/bleu4`, `eval/rouge1`, `eval/rouge2`, `eval/rougel` and `eval/exact_match`. In the stages `sft` and
    `lora`, in `dpo` with the chosen answers, and in `pretrain` with the end of each sample."""

    max_new_tokens: PositiveInt | None = None
    """Longest answer in tokens; prompt and answer together have at most data.max_length. null: none are generated."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the most likely token; above, tokens are drawn from `seed`."""
    top_k: NonNegativeInt = 0
    """Draw from the k most likely tokens; 0 for all."""
    top_p: Fraction = 1.0
    """Draw from the most likely tokens that together reach this probability."""
    repetition_penalty: PositiveFloat = 1.0
    """Makes tokens that occurred less likely (Keskar et al. 2019, arXiv 1909.05858); 1 is off."""
    max_samples: PositiveInt | None = None
    """How many rows of data.eval get an answer, taken evenly from all. Default: every row."""
    batch_size: PositiveInt = 8
    """Answers that a rank generates together."""
    log_samples: NonNegativeInt = 4
    """How many of the answers, the first ones, are kept in `generations/step-N.jsonl` in output_dir, with prompt and
    reference: `report` and `watch` show them, step by step."""
    save: bool = False
    """Keep all of the answers there."""

    def problems(self) -> Iterator[tuple[str, str]]:
        for field in dataclasses.fields(self) if self.max_new_tokens is None else ():
            if getattr(self, field.name) != field.default:
                yield field.name, "has no effect while max_new_tokens is null; set that too, or remove it"
        for key, off in (("top_k", 0), ("top_p", 1.0)) if self.max_new_tokens is not None else ():
            if getattr(self, key) != off and not self.temperature:
                yield key, "has no effect while temperature is 0; set that too, or remove it"
