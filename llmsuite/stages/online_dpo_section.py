"""The recipe section of the stage `online_dpo`. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from llmsuite.contract.schema.numbers import PositiveInt
from llmsuite.contract.specs import PrePass, StageProfile
from llmsuite.stages.eval_metrics import rollout_metrics
from llmsuite.stages.rl_sections import directory_of
from llmsuite.stages.sections import DpoSection


@dataclasses.dataclass(kw_only=True)
class OnlineDpoSection(DpoSection):
    """Online direct preference optimisation: trains on pairs of completions sampled from the model, of each prompt the
    one with the highest reward as chosen and the one with the lowest as rejected (Guo et al. 2024, arXiv
    2402.04792)."""

    reference: str | None = None  # type: ignore[assignment]
    """The reference model: the initial one, as copy (a second copy of the weights, sharded in the same way) or as
    adapter_off (the model without its adapters, which needs `lora.rank`); or the directory of another model of the same
    shape or of a run; or none. Default: none for simpo and orpo, else copy."""
    patience: PositiveInt | None = 50
    """Stop the run after this many consecutive rollouts in which no prompt has completions of different rewards, so
    that there is nothing to learn. null: never."""

    def profile(self) -> StageProfile:
        """Pre-passes as for `dpo`, except that the reference is computed in each step."""
        offline = super().profile()
        prepasses = [prepass for prepass in offline.prepasses if prepass.kind != "adapters_off"]
        if self.reference_from != "none":
            kind: Literal["adapters_off", "reference"] = "reference"
            if self.reference_from == "adapter_off":
                kind = "adapters_off"
            # after the number of tokens, and before the KL divergence from the reference
            place = sum(prepass.kind == "batch" for prepass in prepasses)
            prepasses.insert(place, PrePass(kind=kind))
        sums = (*offline.sums, "logprob_gap")
        return StageProfile(
            sums=sums,
            prepasses=tuple(prepasses),
            updates=1,
            completions=2,
            reference=directory_of(self.reference),
            evaluates=rollout_metrics,
        )

    @property
    def reference_from(self) -> str:
        """`reference` with its default applied."""
        found = super().reference_from
        return "copy" if found == "cache" else found

    def problems(self) -> Iterator[tuple[str, str]]:
        for key, message in super().problems():
            yield key, message.replace("set it to cache", "set it to copy")
        given = self.reference == "copy" or directory_of(self.reference) is not None
        if given and self.loss in ("simpo", "cpo", "orpo"):
            yield "reference", f"is {self.reference}, but loss {self.loss} uses no reference; remove it"
        if self.reference == "cache":
            yield "reference", "is cache, but the answers are not known before they are sampled; set it to copy"
