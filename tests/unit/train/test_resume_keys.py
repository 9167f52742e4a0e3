"""Which keys a run may change when it goes on."""

from __future__ import annotations

from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import plan_run
from llmsuite.schema.section import as_plain
from llmsuite.train.resume import _training_keys
from tests.paths import ROOT


def test_how_many_are_drawn_together_is_no_part_of_a_run(registry: Registry) -> None:
    def keys(*words: str) -> dict[str, object]:
        plan = plan_run(ROOT / "recipes/llama/grpo.json", words, registry, smoke=True)
        return _training_keys(as_plain(plan.recipe))

    free = ("--rollout.batch_size=3", "--reward.workers=1", "--environment.workers=1", "--train.micro_batch_size=1")
    assert keys(*free) == keys()
    assert keys("--rollout.temperature=0.5") != keys()
