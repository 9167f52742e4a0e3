"""The recipe section `generation`. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from llmsuite.contract.schema.numbers import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from llmsuite.contract.schema.section import Section, keys_except


@dataclasses.dataclass(kw_only=True)
class GenerationSection(Section):
    """Generation at evaluations: the model answers the prompts of `data.eval`, and its answers are compared with those
    of the rows by `eval/bleu4`, `eval/rouge1`, `eval/rouge2`, `eval/rougel` and `eval/exact_match`. For the stages
    `sft` and `lora`, for `dpo` (compared with the chosen answers) and for `pretrain` (compared with the end of each
    sample)."""

    max_new_tokens: PositiveInt | None = None
    """Maximum length of an answer in tokens; prompt and answer together have at most data.max_length. null: no
    generation."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy decoding. Sampling is seeded by `seed`."""
    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens only; 0 for all tokens."""
    top_p: Fraction = 1.0
    """Nucleus sampling: sample from the most likely tokens whose total probability reaches this value; 1 for all."""
    repetition_penalty: PositiveFloat = 1.0
    """Penalty on tokens that already occurred (Keskar et al. 2019, arXiv 1909.05858); 1 for none."""
    max_samples: PositiveInt | None = None
    """Number of rows of data.eval to generate answers for, evenly spaced. Default: all rows."""
    batch_size: PositiveInt = 8
    """Number of answers that a rank generates in one batch."""
    log_samples: NonNegativeInt = 4
    """Number of answers, from the first on, to write with prompt and reference to `generations/step-N.jsonl` in
    output_dir; `llmsuite report` and `llmsuite watch` show them for each step."""
    save: bool = False
    """Write all answers to that file instead of the first log_samples."""

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.max_new_tokens is None:
            for key in keys_except(self, "max_new_tokens"):
                yield key, "has no effect while max_new_tokens is null; set that too, or remove it"
        elif not self.temperature:
            for key in ("top_k", "top_p"):
                yield key, "has no effect while temperature is 0; set that too, or remove it"
