"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290) and its relatives: docs/guide/preference.md.

rows -> token ids of prompt, chosen and rejected answer -> one forward pass over both answers -> log-probabilities
of the answers -> loss, against those of the reference model where it has one.

Shapes: P pairs, A = 2 P answers (chosen first).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.stages import preference_losses
from llmsuite.stages.answers import answer_logps, log_ratios, num_tokens, pack_rows
from llmsuite.stages.pairs import Pair, Pairs, PairStage, chosen_then_rejected
from llmsuite.stages.reference import Reference
from llmsuite.stages.sections import DpoSection
from llmsuite.train.stage import Batch, LossTerms, PrePassKind, StageContext, Sums
from llmsuite.typing import Tensor


class DpoStage(PairStage):
    """Makes the chosen answer of each pair likelier against the rejected one."""

    def __init__(self, section: DpoSection, context: StageContext):
        super().__init__(section, context)
        self._kind, self._beta, self._smoothing = section.loss, section.beta, section.label_smoothing
        self._gamma, self._sft_weight = section.gamma, section.effective_sft_weight
        self._takes_reference = section.reference_from
        self._profile = section.profile()
        self._reference = Reference(context, 2 * context.recipe.train.micro_batch_size)

    # data

    def collate(self, samples: Sequence[Pair | Pairs]) -> Batch:
        """Chosen answers in the first half of the batch, rejected ones in the second; padding on the right, or all in
        one row, where answers to the same prompt share it."""
        answers, one_row = chosen_then_rejected(samples), self.context.padding_free
        rows = [list(itertools.chain(*answers))] if one_row else answers
        batch = pack_rows(rows, self.context.tokenizer.pad_id, self.context.length_multiple, shares_prompts=one_row)
        batch["weight"] = float(sum(map(len, answers)) // 2)
        if self._takes_reference == "cache" and self._reference.known:
            batch["reference"] = self._reference.of([answer for row in answers for answer in row])
        return batch

    # before training, and before each step

    def before_training(self, model: Any, samples: Iterable[Pair | Pairs]) -> None:
        """Compute the log-probabilities under the reference model, which is the initial one."""
        if self._takes_reference == "cache":
            pairs = itertools.chain.from_iterable(sample.pairs for sample in samples)
            self._reference.compute(model, (answer for pair in pairs for answer in pair.answers))

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """Pairs per token, the reference of these answers, or the mean log-ratios of both kinds of answers."""
        if kind == "batch":
            chosen, _ = np.split(num_tokens(batch), 2)
            return {"pairs_per_token": (len(chosen), float(chosen.sum()))}
        logps = answer_logps(model, batch)
        if kind == "adapters_off":
            batch["reference"] = logps.numpy()
            return {}
        chosen, rejected = log_ratios(logps, batch).split(2)
        return {"kl/chosen": (chosen.sum(), len(chosen)), "kl/rejected": (rejected.sum(), len(rejected))}

    # loss

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the pairs; every pair weighs 1. The term of `sft_weight` is a mean over tokens."""
        logps = answer_logps(model, batch)
        chosen, rejected = logps.astype("float32").split(2)
        num_pairs = batch["weight"]
        losses, reward_chosen, reward_rejected = self._compare(logps, batch)
        total = losses.sum()
        margin = reward_chosen - reward_rejected
        observed = {
            "rewards/chosen": reward_chosen,
            "rewards/rejected": reward_rejected,
            "rewards/margin": margin,
            "rewards/accuracy": (margin > 0).astype("float32"),
            "logps/chosen": chosen,
            "logps/rejected": rejected,
        }
        sums: dict[str, tuple[Tensor, float]] = {name: (v.detach().sum(), num_pairs) for name, v in observed.items()}
        if self._sft_weight:
            nll = -chosen.sum()
            sums["nll/chosen"] = nll.detach(), float(num_tokens(batch)[: len(chosen)].sum())
            # everything is divided by the number of pairs; this term by that of tokens
            total = total + nll * (self._sft_weight * batch["prepass_stats"]["pairs_per_token"])
        return LossTerms(total, num_pairs, self._profile.checked(sums))

    def _compare(self, logps: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """[P] each: losses, rewards of the chosen answers, rewards of the rejected ones."""
        if self._takes_reference == "none":
            logps = logps.astype("float32")
            chosen, rejected = (logps / paddle.to_tensor(num_tokens(batch))).split(2)  # mean over the tokens
            rewards = self._beta * chosen, self._beta * rejected
            if self._kind == "simpo":
                losses = preference_losses.simpo(chosen, rejected, self._beta, self._gamma, self._smoothing)
            else:
                assert self._kind == "orpo", self._kind
                losses = self._beta * preference_losses.odds_ratio(chosen, rejected)
            return losses, *rewards
        chosen, rejected = log_ratios(logps, batch).split(2)
        rewards = self._beta * chosen, self._beta * rejected
        margin = rewards[0] - rewards[1]
        if self._kind == "sigmoid":
            losses = preference_losses.sigmoid(margin, self._smoothing)
        elif self._kind == "hinge":
            losses = preference_losses.hinge(margin)
        elif self._kind == "ipo":
            losses = preference_losses.ipo(margin, self._beta)
        elif self._kind == "ipo_mean":
            of_chosen, of_rejected = paddle.to_tensor(num_tokens(batch)).split(2)
            losses = preference_losses.ipo(rewards[0] / of_chosen - rewards[1] / of_rejected, self._beta)
        else:
            assert self._kind == "kto_pair", self._kind
            kl_chosen, kl_rejected = (max(0.0, batch["prepass_stats"][f"kl/{side}"]) for side in ("chosen", "rejected"))
            losses = preference_losses.kto_pair(chosen, rejected, kl_chosen, kl_rejected, self._beta)
        return losses, *rewards
