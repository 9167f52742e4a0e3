"""Which recipes may generate answers at evaluations."""

from __future__ import annotations

import pytest

from llmsuite.errors import UserError
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import plan_run
from tests.paths import ROOT

ASKS = "--generation.max_new_tokens=8"


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("llama/rm", [ASKS], "generation.max_new_tokens: is 8; stage rm has no answers to compare with"),
        (
            "llama/pretrain",
            [ASKS, "--data.eval=null", "--pretrain.split=null"],
            "is 8, and there are no rows to answer",
        ),
        ("llama/sft", [ASKS, "--data.eval=null"], "generation.max_new_tokens: is 8, and there are no rows to answer"),
        ("llama/sft", ["--generation.max_new_tokens=256"], "generation.max_new_tokens: is 256, which leaves no room"),
        ("llama/sft", [ASKS, "--prefix.tokens=4"], "matrices of the model, .* which prefix.tokens is no part of"),
        ("llama/sft", [ASKS, "--reft.rank=4"], "matrices of the model, .* which reft.rank is no part of"),
        ("llama/sft", [ASKS, "--qat.weight_bits=8"], "matrices of the model, .* which qat.weight_bits is no part of"),
        ("llama/qlora", [ASKS], "matrices of the model, .* which lora.base_dtype is no part of"),
        ("llama/sft", ["--generation.log_samples=8"], "log_samples: has no effect while max_new_tokens is null"),
        ("llama/sft", ["--generation.save=true"], "generation.save: has no effect while max_new_tokens is null"),
        ("llama/sft", [ASKS, "--generation.top_p=0.5"], "generation.top_p: has no effect while temperature is 0"),
    ],
)
def test_what_does_not_go_together(registry: Registry, recipe: str, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_run(ROOT / f"recipes/{recipe}.json", words, registry, smoke=True)


def test_adapters_go_with_it_and_a_small_run_has_few_answers(registry: Registry) -> None:
    plan = plan_run(ROOT / "recipes/llama/lora.json", [ASKS, "--generation.temperature=1"], registry, smoke=True)
    assert plan.recipe.generation.max_new_tokens == 8
    assert plan.recipe.lora.rank is not None


def test_text_that_is_held_back_is_asked_for(registry: Registry) -> None:
    words = [ASKS, "--data.eval=null", "--pretrain.split=90,10,0"]
    assert plan_run(ROOT / "recipes/llama/pretrain.json", words, registry, smoke=True).recipe.data.eval is None
