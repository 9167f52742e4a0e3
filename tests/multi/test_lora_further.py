"""Kinds of adapters on routed experts and on the embedding, on meshes: each against one process, and continued."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import GRADIENT_LIMIT, Case, compare, few
from tests.parity.condition import change_limits, nudged
from tests.parity.lora import case, check_continued, run_and_continue
from tests.support.lora_meshes import ADAMW, EP, INTERLEAVED, PP, RECOMPUTE, SP, STATIC, STEM, TP

EXPERTS = '--lora.target_modules=["experts.*", "o_proj", "down_proj"]'
ENDS = '--lora.target_modules=["embed_tokens", "lm_head", "layers.2.*"]'
UNSCALED = "--lora.lora_plus_ratio=1"
KINDS: dict[str, tuple[str, ...]] = {
    "rslora": ("--lora.rslora=true",),
    "mixer": ("--lora.method=mixer",),
    "dora": ("--lora.method=dora",),
    "pissa": ("--lora.init=pissa",),
    "mora": ("--lora.method=mora", UNSCALED),
    "lokr": ("--lora.method=lokr", UNSCALED),
    "dropout": ("--lora.dropout=0.25",),
}
SLOW = "mixer", "mora", "lokr", "experts dropout"
"""Kinds of which three steps teach the experts less than the samples of these steps differ by: what changes is
compared."""
FULL = ('--lora.modules_to_save=["embed_tokens", "lm_head"]',)
NF4 = "--lora.base_dtype=nf4", "--lora.base_block=8"
RUNS: dict[str, dict[str, Any]] = {
    **{f"experts {kind}": {**ADAMW, "family": "deepseek", "run": (EXPERTS, *words)} for kind, words in KINDS.items()},
    # Adam hides errors of scale: of an expert that another rank has, or of its share of the tokens
    "experts sgd": {"family": "deepseek", "run": (EXPERTS,)},
    **{f"ends {kind}": {**ADAMW, "run": (ENDS, *KINDS[kind])} for kind in ("rslora", "mixer", "dora", "pissa")},
    # GPT's vocabulary of 97 is padded, and only the embedding has one: of heads nothing is dropped
    "embedding dropout": {
        **ADAMW,
        "run": ('--lora.target_modules=["embed_tokens", "q_proj", "o_proj"]', *KINDS["dropout"]),
    },
    "experts nf4 dora": {**ADAMW, "family": "deepseek", "run": (EXPERTS, *KINDS["dora"], *NF4)},
    "experts nf4 pissa": {**ADAMW, "family": "deepseek", "run": (EXPERTS, *KINDS["pissa"], *NF4)},
    "experts nf4 lokr": {**ADAMW, "family": "deepseek", "run": (EXPERTS, *KINDS["lokr"], *NF4)},
    # next to adapters, embedding and head themselves are trained
    "full": {**ADAMW, "run": FULL},
    "full tied": {"run": (*FULL, "--lora.ensure_weight_tying=true", "--model.config.tie_word_embeddings=true", *NF4)},
    "full padded dora": {**ADAMW, "run": (*FULL, *KINDS["dora"], "--model.config.vocab_size=515")},
    "padded dora": {**ADAMW, "run": (ENDS, *KINDS["dora"], "--model.config.vocab_size=515")},
    "padded pissa": {**ADAMW, "run": (ENDS, *KINDS["pissa"], "--model.config.vocab_size=515")},
}
STAGE3 = {"sharding": "stage3"}


def _meshes(run: str) -> dict[str, tuple[int, Mapping[str, Any], tuple[str, ...]]]:
    """The meshes that a run is tried on."""
    if run.startswith("experts"):
        return ON_EXPERTS
    return ON_FULL if run.startswith("full") else ON_ENDS


ON_EXPERTS: dict[str, tuple[int, Mapping[str, Any], tuple[str, ...]]] = {
    "ep2 stage3": (2, {**EP, **STAGE3}, (RECOMPUTE,)),
    "tp2 sp": (2, {**TP, **SP}, ()),
    "pp2": (2, PP, (RECOMPUTE,)),
    "tp2 ep2": (4, {**TP, **EP, "sharding": "stage3", "sharding_parallel_degree": 2}, ()),
    "tp2 static": (2, TP, (STATIC,)),
}
ON_ENDS: dict[str, tuple[int, Mapping[str, Any], tuple[str, ...]]] = {
    "tp2 sp": (2, {**TP, **SP}, (RECOMPUTE,)),
    "pp2": (2, INTERLEAVED, ()),
    "stage3": (2, STAGE3, (RECOMPUTE,)),
}
ON_FULL = {
    **ON_ENDS,
    "dp2": (2, {"sharding": "stage2"}, ()),
    "tp2 static": (2, TP, (STATIC,)),
    "pp2 tp2": (4, {**PP, **TP}, ()),
}
TABLE = {
    f"{run} {mesh}": (run, num_ranks, parallel, words)
    for run in RUNS
    for mesh, (num_ranks, parallel, words) in _meshes(run).items()
    if not (STATIC in words and "dropout" in run)
    and not (STATIC in words and ("mora" in run or "lokr" in run or "nf4" in run or "tied" in run))
}
FEW = (
    "full dp2",
    "full tp2 sp",
    "full tied pp2",
    "experts sgd ep2 stage3",
    "experts dora ep2 stage3",
    "experts dropout ep2 stage3",
    "experts pissa tp2 sp",
    "ends dora tp2 sp",
)
MANY = few(TABLE, *(name for name in TABLE if name not in FEW))
ONES = sorted({run for run, *_ in MANY.values()})
_MAGNIFIED = [run for run in RUNS if run.startswith("experts") and run.endswith(("mixer", "dora", "lokr"))]
SENSITIVE = few({run: run for run in _MAGNIFIED}, *_MAGNIFIED)
"""Runs whose limits are from the condition of each number: lengths of columns, mixers and Kronecker products magnify
what three steps leave of rounding."""
AGAIN = few({run: run for run in RUNS}, *(run for run in RUNS if run not in ("experts dropout", "full")))


def _one(run: str) -> Case:
    return case(f"one {run}", words=("--train.micro_batch_size=8",), **RUNS[run])


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    cases = [case(name, *how, **RUNS[run]) for name, (run, *how) in MANY.items()]
    moved = [case for run in SENSITIVE for case in nudged(_one(run))]
    again = {
        f"one {run}": case(f"again {run}", words=("--train.micro_batch_size=8",), resume=True, **RUNS[run])
        for run in AGAIN
    }
    return run_and_continue(runner, [*map(_one, ONES), *moved, *cases], again)


@pytest.mark.parametrize("name", MANY)
def test_a_mesh_equals_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    one = f"one {MANY[name][0]}"
    assert one not in failed, failed[one]
    assert name not in failed, failed[name]
    run = MANY[name][0]
    limit = GRADIENT_LIMIT
    limits = change_limits(runner, _one(run), STEM, limit) if run in SENSITIVE else limit
    found = compare(runner, one, name, STEM, limits, falls=not run.endswith(SLOW))
    print(f"{name}: metrics {found.metrics:.1e}, gradients {found.gradients:.1e}, change {found.change:.1e}")
    assert found.problems == []


@pytest.mark.parametrize("run", AGAIN)
def test_every_kind_is_continued_bit_by_bit(runner: Runner, failed: dict[str, str], run: str) -> None:
    names = f"one {run}", f"again {run}"
    assert not {*names} & failed.keys(), failed
    check_continued(runner, *names, stems=(STEM, "optimizer"))
