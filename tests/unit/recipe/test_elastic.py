"""Recipes whose run may go on with fewer machines."""

from __future__ import annotations

import pytest

from llmsuite.base.errors import RecipeError
from llmsuite.contract.registry import Registry
from llmsuite.recipe.elastic import check_min_nodes, overrides_for_machines
from llmsuite.recipe.resolve import plan_run

THREE = (
    "--launch.nnodes=3", "--launch.num_devices=1", "--launch.max_restarts=1", "--parallel={}",
    "--train.micro_batch_size=2",
)  # fmt: skip


def _check(registry: Registry, *words: str) -> None:
    overrides = [*THREE, *words]
    path = "recipes/llama/dpo.json"
    check_min_nodes(plan_run(path, overrides, registry, True).loaded, path, overrides, registry, True)


def test_overrides_of_machines_are_replaced() -> None:
    words = ["run", "r.json", "--launch.nnodes=3", "--seed=1", "--launch.node_rank", "2", "--smoke"]
    kept = ["run", "r.json", "--seed=1", "--smoke"]
    assert overrides_for_machines(words, 2) == [*kept, "--launch.nnodes=2", "--launch.spares=0", "--launch.node_rank=0"]


def test_a_recipe_has_to_fit_the_fewest_machines(registry: Registry) -> None:
    _check(registry, "--train.global_batch_size=12", "--launch.min_nnodes=2", "--launch.node_rank=2")
    with pytest.raises(RecipeError, match=r"min_nnodes: .* cannot be run on 2 machines: train.global_batch_size: is 6"):
        _check(registry, "--train.global_batch_size=6", "--launch.min_nnodes=2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--launch.spares=1", "--launch.max_restarts=0"], "spares: .* set max_restarts"),
        (["--launch.spares=1", "--launch.nnodes=1"], "spares: .* set nnodes to at least 2"),
        (["--launch.min_nnodes=4"], "min_nnodes: is 4, more than nnodes, which is 3"),
        (["--launch.min_nnodes=2", "--launch.max_restarts=0"], "min_nnodes: .* set max_restarts"),
        (["--launch.spares=1", "--launch.node_rank=4"], "node_rank: is 4; with nnodes 3 and 1 spares it is at most 3"),
    ],
)
def test_impossible_numbers_of_machines_are_rejected(registry: Registry, words: list[str], message: str) -> None:
    keys = {word.partition("=")[0] for word in words}
    kept = [word for word in THREE if word.partition("=")[0] not in keys]
    with pytest.raises(RecipeError, match=message):
        plan_run("recipes/llama/dpo.json", [*kept, "--train.global_batch_size=12", *words], registry, True)
