"""A language model's stage for tests: every answer token weighs 1, so the micro-batches of a step differ in weight.

In DPO every pair weighs 1 and micro-batches are equally heavy: it cannot tell a mean of means from a mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

import llmsuite
from llmsuite.contract.hookspecs import StageSpec
from llmsuite.contract.schema.section import Section
from llmsuite.data.rows import conversations_of
from llmsuite.engine.stage import Batch, DropCounts, LossTerms, Stage

RECIPE = "tests/parity/tokens.json"


@dataclasses.dataclass(kw_only=True)
class TokensSection(Section):
    """Has no keys."""


class TokenStage(Stage[tuple[list[int], list[int]]]):
    """Prompt and chosen answer of preference rows; the answer is learnt."""

    row_kind = "preference"

    def make_samples(self, rows: Sequence[Any], counts: DropCounts) -> list[tuple[list[int], list[int]]]:
        template = self.context.template()
        pairs = self.context.encode_answers([template.split(conversations_of(row)[0]) for row in rows])
        longest = self.context.data.max_length
        return [(p, a) for p, a in pairs if len(p) + len(a) <= longest or counts.drop("too long")]

    def collate(self, samples: Sequence[tuple[list[int], list[int]]]) -> Batch:
        multiple = self.context.length_multiple
        longest = max(len(prompt) + len(answer) for prompt, answer in samples) - 1
        length = -(-longest // multiple) * multiple
        ids = np.full([len(samples), length], self.context.tokenizer.pad_id, dtype="int64")
        positions = []
        for i, (prompt, answer) in enumerate(samples):
            ids[i, : len(prompt) + len(answer) - 1] = (prompt + answer)[:-1]
            positions.append(i * length + len(prompt) - 1 + np.arange(len(answer)))
        targets = np.concatenate([answer for _, answer in samples]).astype("int64")
        tokens = sum(len(prompt) + len(answer) for prompt, answer in samples)
        return {
            "input_ids": ids,
            "positions": np.concatenate(positions),
            "targets": targets,
            "weight": float(len(targets)),
            "lengths": np.array([len(prompt) + len(answer) - 1 for prompt, answer in samples]),
            "num_tokens": tokens,
            "num_supervised": len(targets),
        }

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        hidden, _ = model.hidden_states(paddle.to_tensor(batch["input_ids"]))
        picked = hidden.flatten(0, 1).index_select(paddle.to_tensor(batch["positions"]), 0)
        nll = model.token_nll(picked, paddle.to_tensor(batch["targets"]))
        return LossTerms(nll.sum(), float(batch["num_supervised"]))


@llmsuite.hookimpl
def llmsuite_register_stages() -> list[StageSpec]:
    return [StageSpec(name="tokens", help="for tests", config_cls=TokensSection, factory=lambda: TokenStage)]
