"""Prefixes on meshes against one process. `make parity` runs it."""

from __future__ import annotations

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import Case, compare, run_cases
from tests.parity.lora import case
from tests.support.lora_meshes import INTERLEAVED, PP, RECOMPUTE, SP, STATIC, STEM, TP
from tests.support.prefix_runs import CHANGE_LIMIT, NETWORK, NETWORK_STEM, ONE_PASS, PREFIX, RUN

STAGE3 = {"sharding": "stage3"}
SELECTIVE = "--engine.recompute=selective"
PADDED = {**RUN, "run": (*RUN["run"], "--data.packing=none")}
ADAM = {"stage": "sft", "optimizer": "adamw", "run": (*PREFIX, "--train.learning_rate=0.3")}
NETWORK_ADAM = {**ADAM, "run": (*PREFIX, "--train.learning_rate=0.03", "--prefix.projection=true")}
OTHER = {name: {**ADAM, "family": name} for name in ("gpt", "qwen_moe")}
OTHER["ernie"] = {**ADAM, "family": "ernie", "run": (*PREFIX, "--train.learning_rate=1")}
ONES: dict[str, Case] = {
    "packed": case("packed", words=ONE_PASS, **RUN),  # type: ignore[arg-type]
    "padded": case("padded", words=ONE_PASS, **PADDED),  # type: ignore[arg-type]
    "network": case("network", words=ONE_PASS, **NETWORK),  # type: ignore[arg-type]
    "network adam": case("network adam", words=ONE_PASS, **NETWORK_ADAM),  # type: ignore[arg-type]
    "adam": case("adam", words=ONE_PASS, **ADAM),  # type: ignore[arg-type]
    **{name: case(name, words=ONE_PASS, **run) for name, run in OTHER.items()},  # type: ignore[arg-type]
}
MANY: dict[str, tuple[str, Case]] = {
    "dp2": ("packed", case("dp", 2, {}, **RUN)),  # type: ignore[arg-type]
    "tp2": ("padded", case("tp", 2, TP, **PADDED)),  # type: ignore[arg-type]
    "tp2, selective": ("packed", case("tp-selective", 2, TP, (SELECTIVE,), **RUN)),  # type: ignore[arg-type]
    "pp2": ("padded", case("pp", 2, PP, (RECOMPUTE,), **PADDED)),  # type: ignore[arg-type]
    "pp2 interleaved": ("packed", case("pp-interleaved", 2, INTERLEAVED, **RUN)),  # type: ignore[arg-type]
    "stage3": ("packed", case("stage3", 2, STAGE3, **RUN)),  # type: ignore[arg-type]
    "stage3, selective": ("adam", case("stage3-selective", 2, STAGE3, (SELECTIVE,), **ADAM)),  # type: ignore[arg-type]
    "stage3, recompute": ("adam", case("stage3-again", 2, STAGE3, (RECOMPUTE,), **ADAM)),  # type: ignore[arg-type]
    "tp2 pp2 dp2": ("packed", case("tp-pp-dp", 8, {**TP, **PP}, **RUN)),  # type: ignore[arg-type]
    "tp2 static": ("padded", case("tp-static", 2, TP, (STATIC,), **PADDED)),  # type: ignore[arg-type]
    "network tp2 static": ("network", case("network-static", 2, {**TP, **SP}, (STATIC,), **NETWORK)),  # type: ignore[arg-type]
    "network tp2": ("network", case("network-tp", 2, {**TP, **SP}, (RECOMPUTE,), **NETWORK)),  # type: ignore[arg-type]
    "network pp2": ("network", case("network-pp", 2, PP, **NETWORK)),  # type: ignore[arg-type]
    "network stage3": ("network", case("network-stage3", 2, STAGE3, (RECOMPUTE,), **NETWORK)),  # type: ignore[arg-type]
    "network adam stage3": ("network adam", case("network-adam", 2, STAGE3, **NETWORK_ADAM)),  # type: ignore[arg-type]
    "network tp2 pp2 dp2": (
        "network adam",
        case("network-tp-pp-dp", 8, {**TP, **INTERLEAVED, "sharding": "stage2"}, (RECOMPUTE,), **NETWORK_ADAM),  # type: ignore[arg-type]
    ),
    "gpt tp2, sequence parallel": ("gpt", case("gpt-tp", 2, {**TP, **SP}, **OTHER["gpt"])),  # type: ignore[arg-type]
    "ernie tp2": ("ernie", case("ernie-tp", 2, TP, **OTHER["ernie"])),  # type: ignore[arg-type]
    "qwen_moe tp2": ("qwen_moe", case("qwen_moe-tp", 2, TP, **OTHER["qwen_moe"])),  # type: ignore[arg-type]
}


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    return run_cases(runner, [*ONES.values(), *(many for _, many in MANY.values())])


@pytest.mark.parametrize("name", MANY)
def test_a_strategy_equals_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    one, many = MANY[name]
    assert not {one, many.name} & failed.keys(), failed.get(one, failed.get(many.name))
    stem = NETWORK_STEM if name.startswith("network") else STEM
    found = compare(runner, one, many.name, stem, CHANGE_LIMIT)
    print(f"{name}: metrics {found.metrics:.1e}, gradients {found.gradients:.1e}, change {found.change:.1e}")
    assert found.problems == []
