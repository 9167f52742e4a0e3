"""Every point of the lattice against one process. Long; `make parity` runs it and writes the table of the docs."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.multi.conftest import ROOT, Runner
from tests.parity.points import Point, covering

STEPS = 4
# Adam divides by the root of small second moments, which magnifies the last bit of a gradient from step to step
LIMITS = {"sgd": 1e-6, "adamw": 2e-6}
COMMON = (f"--train.max_steps={STEPS}", "--train.global_batch_size=8", "--checkpoint.save_steps=null")
OPTIMIZERS = {
    "sgd": ("--train.optimizer=sgd", "--train.learning_rate=0.05", "--train.max_grad_norm=0.5"),
    "adamw": ("--train.optimizer=adamw", "--train.learning_rate=1e-3", "--train.weight_decay=0.1"),
}
BEGIN, END = "<!-- generated: parity -->", "<!-- end of generated: parity -->"
results: dict[Point, float] = {}


@functools.cache
def _reference(runner: Runner, tied: bool, optimizer: str) -> str:
    name = f"one-{tied}-{optimizer}"
    one = ("--parallel={}", "--launch.num_devices=1", "--train.micro_batch_size=8", "--engine.recompute=none")
    runner.run(*runner.smoke(name, *COMMON, *OPTIMIZERS[optimizer], *one, _tied(tied)))
    return name


def _tied(tied: bool) -> str:
    return f"--model.config.tie_word_embeddings={'true' if tied else 'false'}"


@pytest.mark.parametrize("point", covering(), ids=lambda p: "-".join(map(str, p.__dict__.values())))
def test_point(runner: Runner, point: Point) -> None:
    name, reference = f"point-{len(results)}", _reference(runner, point.tied, point.optimizer)
    cache = str(runner.directory / f"cache-{name}")  # what is computed before the first step is compared too
    words = runner.smoke(name, *COMMON, *OPTIMIZERS[point.optimizer], *point.overrides(), _tied(point.tied))
    runner.run(*words, LLMSUITE_CACHE=cache)
    one, many = runner.metrics(reference), runner.metrics(name)
    assert len(one) == len(many) == STEPS
    keys = ("loss", "grad_norm", "logps/chosen", "logps/rejected")
    results[point] = max(abs(b[key] / a[key] - 1) for a, b in zip(one, many) for key in keys)
    assert all(a["supervised_tokens"] == b["supervised_tokens"] for a, b in zip(one, many))
    assert one[-1]["loss"] < 0.99 * one[0]["loss"], "nothing was learnt, so nothing was compared"
    assert results[point] <= LIMITS[point.optimizer]


def test_write_table(request: pytest.FixtureRequest) -> None:
    """With `--write-parity-table`: put what was measured into docs/parallelism.md."""
    if not request.config.getoption("--write-parity-table"):
        return
    assert len(results) == len(covering()), "only a whole run is worth writing down"
    page = ROOT / "docs" / "parallelism.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(before + _table() + rest.partition(END)[2], encoding="utf-8")


def _table() -> str:
    lines = [
        BEGIN,
        "",
        "| ranks | tp | pp | schedule | sharding (degree) | data ranks | micro-batch | sequence parallel |",
    ]
    lines[-1] += " recompute | tied | optimizer | largest difference |"
    lines.append("|---" * 12 + "|")
    for p, difference in sorted(results.items(), key=lambda item: (item[0].num_ranks, str(item[0]))):
        sharding = p.sharding if p.sharding == "none" else f"{p.sharding} ({p.sharding_degree})"
        schedule = p.schedule if p.pp > 1 else ""
        cells = [p.num_ranks, p.tp, p.pp, schedule, sharding, p.data_ranks, p.micro_batch_size]
        cells += ["yes" if p.sequence_parallel else "", p.recompute.replace("none", ""), "yes" if p.tied else ""]
        lines.append("| " + " | ".join(map(str, [*cells, p.optimizer, f"{difference:.1e}"])) + " |")
    return "\n".join([*lines, "", END])


def test_points_cover_every_pair() -> None:
    points = covering()
    assert len(points) == len(set(points)) == 60
    assert {p.num_ranks for p in points} == {2, 4, 8}
    assert Path(ROOT / "docs" / "parallelism.md").exists()
