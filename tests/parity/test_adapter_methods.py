"""Kinds of adapters x meshes, each against one process. `make parity` runs it."""

from __future__ import annotations

import pytest

from tests.multi.conftest import Runner
from tests.parity import page
from tests.parity.cases import GRADIENT_LIMIT, Case, Comparison, compare
from tests.parity.condition import change_limits, gradient_limits, nudged
from tests.parity.lora import case, check_continued, compare_updates, run_and_continue
from tests.support.lora_meshes import ADAMW, PP, RECOMPUTE, SP, STATIC, STEM, TP

METHODS: dict[str, tuple[str, ...]] = {
    "lora": (),
    "mixer": ("--lora.method=mixer",),
    "dora": ("--lora.method=dora",),
    "pissa": ("--lora.init=pissa",),
    "lora_ga": ("--lora.init=lora_ga",),
    "mora": ("--lora.method=mora", "--lora.lora_plus_ratio=1"),
    "vera": ("--lora.method=vera", "--lora.lora_plus_ratio=1"),
    "lokr": ("--lora.method=lokr", "--lora.lora_plus_ratio=1"),
    "dropout": ("--lora.dropout=0.25",),
}
"""Kinds of adapters, and what else each of them computes with."""
SENSITIVE = {
    # d is moved by b, which begins as zeros and is a sum of gradients itself
    *(("vera", family) for family in ("llama", "gpt", "deepseek")),
    # softmax is blind to k's bias: what is left of its gradients are differences of nearly equal numbers
    ("mixer", "gpt"),
    # which expert a token goes to is a small difference of what the gate says
    ("dropout", "deepseek"),
    # a nudge of the inputs moves the projection of compressed keys and values by five times the limit of the others
    ("mixer", "deepseek"),
}
"""Kinds and families whose limits are from the condition of each number; those of the others are the same for all."""
STAGE3 = {"sharding": "stage3", "sharding_parallel_degree": 1}
MESHES: dict[str, tuple[int, dict[str, object], tuple[str, ...]]] = {
    "tp2": (2, TP, ()),
    "tp2 sp recompute": (2, {**TP, **SP}, (RECOMPUTE,)),
    "tp2 sp static": (2, {**TP, **SP}, (STATIC,)),
    "pp2": (2, PP, ()),
    "stage3": (2, STAGE3, ()),
    "tp2 pp2 dp2": (8, {**TP, **PP}, ()),
}
FAMILIES = {"gpt tp2": ("gpt", 2, TP), "deepseek tp2 stage3": ("deepseek", 4, {**TP, **STAGE3})}


def _run(method: str, family: str = "llama") -> dict[str, object]:
    # see test_lora; vectors, and a mixer, whose first factor is a product of two, learn less in a step
    slow = {("lora", "deepseek"): 0.05, ("dora", "deepseek"): 0.05, ("vera", "gpt"): 0.05, ("vera", "llama"): 0.05}
    rate = (f"--train.learning_rate={slow[method, family]}",) if (method, family) in slow else ()
    # moments magnify what singular vectors are off by
    optimizer = ADAMW if (family == "llama" and method != "lora_ga") or (method, family) == ("vera", "gpt") else {}
    # q, k and v are one matrix in files
    targets = ('--lora.target_modules=["o_proj", "mlp.*"]',) if family == "gpt" and method in ("mora", "lokr") else ()
    return {**optimizer, "family": family, "run": (*METHODS[method], *rate, *targets)}


def _one(method: str, family: str = "llama") -> Case:
    return case(f"one {method} {family}", words=("--train.micro_batch_size=8",), **_run(method, family))  # type: ignore[arg-type]


TABLE: dict[str, tuple[Case, Case]] = {
    f"{method} {mesh}": (_one(method), case(f"{method} {mesh}", num_ranks, parallel, words, **_run(method)))  # type: ignore[arg-type]
    for method in METHODS
    for mesh, (num_ranks, parallel, words) in MESHES.items()
    if not (method in ("dropout", "mora", "lokr", "lora_ga") and STATIC in words)
} | {
    f"{method} {name}": (_one(method, family), case(f"{method} {name}", num_ranks, parallel, **_run(method, family)))  # type: ignore[arg-type]
    for method in METHODS
    for name, (family, num_ranks, parallel) in FAMILIES.items()
}


results: dict[str, Comparison] = {}


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    ones = {one.name: one for one, _ in TABLE.values()}
    moved = [run for kind in SENSITIVE for run in nudged(_one(*kind))]
    words = ("--train.micro_batch_size=8",)
    again = {
        _one(method).name: case(_again(method), words=words, resume=True, **_run(method))  # type: ignore[arg-type]
        for method in METHODS
    }
    return run_and_continue(runner, [*ones.values(), *moved, *(many for _, many in TABLE.values())], again)


def _again(method: str) -> str:
    return f"again {method}"


@pytest.mark.parametrize("name", TABLE)
def test_a_mesh_equals_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    one, many = TABLE[name]
    assert one.name not in failed, failed[one.name]
    assert many.name not in failed, failed[many.name]
    if name.startswith("lora_ga"):
        found = compare_updates(runner, one.name, many.name)
        print(f"{name}: metrics {found.metrics:.1e}, gradients {found.gradients:.1e}, updates {found.change:.1e}")
        results[name] = found
        assert found.problems == []
        return
    of_change: float | dict[str, float] = GRADIENT_LIMIT
    of_gradients: dict[str, float] = {}
    if one in [_one(*kind) for kind in SENSITIVE]:
        of_change = change_limits(runner, one, STEM, GRADIENT_LIMIT)
        of_gradients = gradient_limits(runner, one)
    # rates at which VeRA learns something of DeepSeek in three steps magnify the last bits; what changes is compared
    falls = name != "vera deepseek tp2 stage3"
    found = compare(runner, one.name, many.name, STEM, of_change, falls, gradient_limits=of_gradients)
    print(
        f"{name}: metrics {found.metrics:.1e}, gradients {found.gradients:.1e} of at most "
        f"{max([GRADIENT_LIMIT, *of_gradients.values()]):.1e}, change {found.change:.1e} of at most "
        f"{max(of_change.values()) if isinstance(of_change, dict) else of_change:.1e}"
    )
    results[name] = found
    assert found.problems == []


def test_write_table(request: pytest.FixtureRequest) -> None:
    """With `--write-parity-table`: put what was measured into docs/notes/parity.md."""
    if not request.config.getoption("--write-parity-table"):
        return
    assert len(results) == len(TABLE), "only a whole run is worth writing down"
    columns = [*MESHES, *FAMILIES]
    rows = [
        [method, *(f"{results[name].metrics:.1e}" if (name := f"{method} {c}") in results else "" for c in columns)]
        for method in METHODS
    ]
    page.write("adapters", ["adapter", *columns], rows)


@pytest.mark.parametrize("method", METHODS)
def test_every_kind_is_continued_bit_by_bit(runner: Runner, failed: dict[str, str], method: str) -> None:
    names = (_one(method).name, _again(method))
    assert not {*names} & failed.keys(), failed
    check_continued(runner, *names, stems=(STEM, "adapter_state", "optimizer"))
