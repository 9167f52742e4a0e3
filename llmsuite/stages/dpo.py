"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290), and its ipo and hinge variants.

rows -> token ids of prompt, chosen and rejected answer -> one forward pass over both answers -> log-probabilities
of the answers -> loss against those of the reference model, which were computed before the first step.

Shapes: P pairs, B = 2 P sequences (chosen first), L length, D hidden, N supervised tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from llmsuite.data.rows import Preference
from llmsuite.observe.progress import track
from llmsuite.stages.base import Batch, DropCounts, LossTerms, Stage, StageContext
from llmsuite.stages.reference_cache import ReferenceCache, answer_key, complete
from llmsuite.stages.sections import DpoSection

Tensor = Any


@dataclasses.dataclass(frozen=True)
class Pair:
    """One prompt with two answers, as token ids. Both answers end with the end-of-sequence token."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def keys(self) -> tuple[str, str]:
        """Names of the two answers in the reference cache."""
        return answer_key(self.prompt, self.chosen), answer_key(self.prompt, self.rejected)


class DpoStage(Stage[Pair]):
    """Makes the chosen answer of each pair likelier against the rejected one."""

    row_kind = "preference"

    def __init__(self, section: DpoSection, context: StageContext):
        super().__init__(section, context)
        self._kind, self._beta, self._smoothing = section.loss, section.beta, section.label_smoothing
        self._max_length = context.recipe.data.max_length
        self._batch_size = context.recipe.train.micro_batch_size
        self._length_multiple = context.length_multiple
        self._template = context.template()
        self._reference: dict[str, float] = {}

    # data

    def make_samples(self, rows: Sequence[Preference], counts: DropCounts) -> list[Pair]:
        """Pairs whose answers differ and fit. Nothing is ever cut: a cut answer would not learn to end."""
        texts: list[str] = []
        kept: list[Preference] = []
        for row in rows:
            if row.chosen.strip() == row.rejected.strip():
                counts.drop("with chosen equal to rejected")
            elif not row.chosen.strip() or not row.rejected.strip():
                counts.drop("with an empty answer")
            else:
                prompt, chosen = self._template.split(row.prompt, row.chosen)
                _, rejected = self._template.split(row.prompt, row.rejected)
                texts += [prompt, chosen, rejected]
                kept.append(row)
        ids, eos = self.context.tokenizer.encode_batch(texts), self.context.tokenizer.eos_id
        pairs = []
        for i in range(len(kept)):
            pair = Pair(ids[3 * i], self._end(ids[3 * i + 1]), self._end(ids[3 * i + 2]))
            if pair.chosen == pair.rejected:  # different texts, to a tokenizer that tells them not apart
                counts.drop("with chosen equal to rejected")
            elif not pair.prompt:
                counts.drop("with a prompt of no tokens (nothing would predict the answer)")
            elif pair.chosen.count(eos) > 1 or pair.rejected.count(eos) > 1:
                counts.drop("with the end-of-sequence token inside an answer")
            elif len(pair.prompt) >= self._max_length:
                counts.drop(f"with a prompt of {self._max_length} tokens or more (all masked)")
            elif len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) > self._max_length:
                counts.drop(f"longer than data.max_length {self._max_length} (the end of an answer would be cut off)")
            else:
                pairs.append(pair)
        return pairs

    def _end(self, answer: list[int]) -> list[int]:
        """The answer up to the end-of-sequence token, which is learnt; what a template puts behind it is not."""
        eos = self.context.tokenizer.eos_id
        if eos not in answer:
            return [*answer, eos]
        return answer[: len(answer) - answer[::-1].index(eos)]

    def row_lengths(self, samples: Sequence[Pair]) -> np.ndarray:
        """[pairs, 2]."""
        rows = [[len(p.prompt) + len(answer) - 1 for answer in (p.chosen, p.rejected)] for p in samples]
        return np.array(rows, dtype="int64")

    def collate(self, samples: Sequence[Pair]) -> Batch:
        """Chosen answers in the first half of the batch, rejected ones in the second; padding on the right."""
        prompts = [pair.prompt for pair in samples] * 2
        answers = [pair.chosen for pair in samples] + [pair.rejected for pair in samples]
        longest = max(len(p) + len(a) for p, a in zip(prompts, answers)) - 1  # the last token is only a target
        length = -(-longest // self._length_multiple) * self._length_multiple
        input_ids = np.full([len(answers), length], self.context.tokenizer.pad_id, dtype="int64")
        positions, targets, owners = [], [], []
        for i, (prompt, answer) in enumerate(zip(prompts, answers)):
            ids = prompt + answer
            input_ids[i, : len(ids) - 1] = ids[:-1]
            first = i * length + len(prompt) - 1  # the position that predicts the first token of the answer
            positions.append(np.arange(first, first + len(answer)))
            targets.append(answer)
            owners.append(np.full(len(answer), i))
        batch: Batch = {
            "input_ids": input_ids,
            "positions": np.concatenate(positions),
            "targets": np.concatenate(targets).astype("int64"),
            "owners": np.concatenate(owners),
            "num_tokens": sum(map(len, prompts)) + sum(map(len, answers)),
            "num_supervised": sum(map(len, answers)),
        }
        if self._reference:
            keys = [pair.keys for pair in samples]
            batch["reference"] = np.array(
                [[self._reference[k[side]] for k in keys] for side in (0, 1)], dtype="float32"
            )
        return batch

    # reference

    def before_training(self, model: Any, samples: Iterable[Pair]) -> None:
        """Log-probabilities under the initial model, from the cache where they are known."""
        owners = {key: (pair, side) for pair in samples for side, key in enumerate(pair.keys)}
        keys = list(owners)

        def pairs_of(missing: list[int]) -> list[Pair]:
            # pairs are computed whole: their other answer is nearly always missing too
            pairs = {id(pair): pair for pair, _ in (owners[keys[i]] for i in missing)}
            return sorted(pairs.values(), key=lambda p: len(p.prompt) + len(p.chosen))

        def compute(parts: list[list[int]], rank: int) -> Mapping[str, float]:
            pairs = [pairs_of(part) for part in parts]
            most = max(pairs, key=len)
            return self._score(model, pairs[rank], -(-len(most) // self._batch_size), most)

        self._reference, computed = complete(ReferenceCache(self.context.model_digest), keys, compute)
        self.context.report(f"reference log-probabilities: {len(keys) - computed} cached, {computed} computed")

    @paddle.no_grad()
    def _score(self, model: Any, pairs: Sequence[Pair], num_passes: int, others: Sequence[Pair]) -> dict[str, float]:
        model.eval()
        scores: dict[str, float] = {}
        for i in track(range(num_passes), "reference log-probabilities"):
            start, stop = i * self._batch_size, (i + 1) * self._batch_size
            part = pairs[start:stop] or others[start:stop]  # another rank's, when the own ones are done first
            with self.context.autocast():
                logps = self._answer_logps(model, self.collate(part)).numpy()
            for i, pair in enumerate(part):
                scores.update(zip(pair.keys, (float(logps[i]), float(logps[len(part) + i]))))
        model.train()
        return scores

    # loss

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the pairs; every pair weighs 1."""
        logps = self._answer_logps(model, batch)
        chosen, rejected = logps.split(2)
        ref_chosen, ref_rejected = paddle.to_tensor(batch["reference"]).unbind(0)
        rewards_chosen = self._beta * (chosen - ref_chosen)
        rewards_rejected = self._beta * (rejected - ref_rejected)
        margin = rewards_chosen - rewards_rejected
        losses = preference_loss(self._kind, margin, self._beta, self._smoothing)
        num_pairs = float(len(losses))
        observed = {
            "rewards/chosen": rewards_chosen,
            "rewards/rejected": rewards_rejected,
            "rewards/margin": margin,
            "rewards/accuracy": (margin > 0).astype("float32"),
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }
        sums = {name: (values.detach().sum(), num_pairs) for name, values in observed.items()}
        return LossTerms(losses.sum(), num_pairs, sums)

    def _answer_logps(self, model: Any, batch: Batch) -> Tensor:
        """[B]: log-probability of each answer given its prompt. Logits are made for supervised positions only."""
        hidden, _ = model.hidden_states(paddle.to_tensor(batch["input_ids"]))  # [B, L, D]
        picked = hidden.flatten(0, 1).index_select(paddle.to_tensor(batch["positions"]), 0)  # [N, D]
        nll = model.token_nll(picked, paddle.to_tensor(batch["targets"]))  # [N]
        answers = np.arange(len(batch["input_ids"]))
        belongs = paddle.to_tensor((batch["owners"] == answers[:, None]).astype("float32"))  # [B, N]
        return -paddle.mv(belongs, nll)


def preference_loss(kind: str, margin: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Loss of each pair.

    Args:
        kind: sigmoid: -log s(m) (1 - e) - log s(-m) e, with smoothing e (arXiv 2305.18290, eq. 7);
            hinge: max(0, 1 - m) (arXiv 2305.10425); ipo: (m / beta - 1 / (2 beta))^2 (arXiv 2310.12036, eq. 17).
        margin: [P], beta times (log-ratio of the chosen answer - log-ratio of the rejected one).
        beta: the factor in it.
        label_smoothing: e; sigmoid only.
    """
    if kind == "sigmoid":
        return -F.log_sigmoid(margin) * (1 - label_smoothing) - F.log_sigmoid(-margin) * label_smoothing
    if kind == "hinge":
        return F.relu(1 - margin)
    assert kind == "ipo", kind
    return (margin / beta - 1 / (2 * beta)).square()
