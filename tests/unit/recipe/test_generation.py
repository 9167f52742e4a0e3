"""Rules about recipes that generate answers at evaluations."""

from __future__ import annotations

import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.recipe.resolve import plan_run
from tests.support.paths import ROOT

ASKS = "--generation.max_new_tokens=8"


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("llama/rm", [ASKS], "generation.max_new_tokens: is 8; stage rm has no answers to compare with"),
        (
            "llama/pretrain",
            [ASKS, "--data.eval=null", "--pretrain.split=null"],
            "is 8, but there is no evaluation data",
        ),
        ("llama/sft", [ASKS, "--data.eval=null"], "generation.max_new_tokens: is 8, but there is no evaluation data"),
        ("llama/sft", ["--generation.max_new_tokens=256"], "generation.max_new_tokens: is 256, which leaves no room"),
        ("llama/sft", [ASKS, "--prefix.tokens=4"], "generation at evaluations does not support prefix.tokens"),
        ("llama/sft", [ASKS, "--reft.rank=4"], "generation at evaluations does not support reft.rank"),
        ("llama/sft", [ASKS, "--qat.weight_bits=8"], "generation at evaluations does not support qat.weight_bits"),
        ("llama/qlora", [ASKS], "generation at evaluations does not support lora.base_dtype"),
        ("llama/sft", ["--generation.log_samples=8"], "log_samples: has no effect while max_new_tokens is null"),
        ("llama/sft", ["--generation.save=true"], "generation.save: has no effect while max_new_tokens is null"),
        ("llama/sft", [ASKS, "--generation.top_p=0.5"], "generation.top_p: has no effect while temperature is 0"),
    ],
)
def test_unsupported_combinations_are_rejected(registry: Registry, recipe: str, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_run(ROOT / f"recipes/{recipe}.json", words, registry, smoke=True)


def test_adapters_go_with_it_and_a_small_run_has_few_answers(registry: Registry) -> None:
    plan = plan_run(ROOT / "recipes/llama/lora.json", [ASKS, "--generation.temperature=1"], registry, smoke=True)
    assert plan.train.generation.max_new_tokens == 8
    assert plan.model.lora.rank is not None


def test_text_that_is_held_back_is_asked_for(registry: Registry) -> None:
    words = [ASKS, "--data.eval=null", "--pretrain.split=90,10,0"]
    assert plan_run(ROOT / "recipes/llama/pretrain.json", words, registry, smoke=True).recipe.data.eval is None
