"""Files that people train on: what is read and dropped is what docs/notes/data.md says, and each of them trains."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.engine.stage import DropCounts
from llmsuite.recipe.resolve import plan_run
from llmsuite.stages.explain import open_stage
from llmsuite.stages.stats import file_stats
from tests.multi.conftest import Runner
from tests.support.paths import REAL, ROOT
from tests.support.real_rows import real

_ROW = r"\| `(\w+\.(?:jsonl?|txt))` \| (\w+) \|" + r" ([^|]*)\|" * 5
TABLE = [
    tuple(map(str.strip, row)) for row in re.findall(_ROW, (ROOT / "docs" / "notes" / "data.md").read_text("utf-8"))
]
STAGES = {
    "sft": ["--data.chat_template=chatml"],
    "dpo": ["--data.chat_template=chatml"],
    "rm": ["--data.chat_template=chatml"],
    "pretrain": ["--pretrain.documents=lines", "--pretrain.split=null"],
}
REASONS = {
    "too long": r"longer than data\.max_length",
    "with too long a prompt": r"with a prompt of \d+ tokens or more",
}
"""What the table says, and what stages say."""
STEPS = 8


def words(stage: str, path: Path) -> list[str]:
    common = [f"--data.train={path}", "--data.eval=null", "--data.max_length=512"]
    return [*common, *STAGES[stage]]


def test_the_table_has_every_file() -> None:
    if not REAL.is_dir():
        pytest.skip(f"{REAL} is not there; set LLMSUITE_TEST_DATA")
    files = {path.name for path in REAL.iterdir() if path.suffix in (".json", ".jsonl", ".txt")}
    assert {name for name, *_ in TABLE} == files


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_what_is_read_and_dropped(row: tuple[str, ...], registry: Registry) -> None:
    name, stage, read, used, dropped, tokens, learnt = row
    plan = plan_run(f"recipes/llama/{stage}.json", words(stage, real(name)), registry, smoke=True)
    opened = open_stage(plan.model, plan.data, plan.parallel, plan.train, registry)
    stats = file_stats(opened, plan.data.train_file)
    expected = Counter({reason: int(count) for count, reason in re.findall(r"(\d+) ([^,]+)", dropped)})
    if stage == "pretrain":
        assert (f"{len(stats.lengths):,}", read, expected) == (read, used, {})
    else:
        counts = stats.counts
        assert isinstance(counts, DropCounts)
        assert counts.faults.total == 0
        assert (f"{counts.read:,}", f"{counts.read - counts.lost:,}") == (read, used)
        found = {
            short: sum(n for text, n in counts.dropped.items() if re.match(REASONS[short], text)) for short in expected
        }
        assert found == expected
        assert sum(counts.dropped.values()) == expected.total()
    assert (f"{stats.num_tokens:,}", f"{stats.num_supervised:,}") == (tokens, learnt)


RUNS = [(name, stage) for name, stage, *_ in TABLE] + [(name, "rm") for name, stage, *_ in TABLE if stage == "dpo"]


@pytest.mark.parametrize(("name", "stage"), RUNS)
def test_it_trains(runner: Runner, name: str, stage: str) -> None:
    run = f"{stage}-{name}"
    runner.run(
        "run", f"recipes/llama/{stage}.json", "--smoke", *words(stage, real(name)), "--launch.num_devices=1",
        "--parallel={}", f"--train.max_steps={STEPS}", "--train.global_batch_size=8", "--train.micro_batch_size=4",
        "--train.learning_rate=3e-3", "--train.lr_schedule=constant", "--train.warmup_ratio=0",
        "--train.min_lr_ratio=0", f"--output_dir={runner.directory / run}",
    )  # fmt: skip
    records = runner.metrics(run)
    losses = [record["loss"] for record in records]
    assert len(losses) == STEPS
    assert all(math.isfinite(record["grad_norm"]) and record["grad_norm"] > 0 for record in records)
    # a model that knows nothing gives each of the 512 tokens about the same chance; it is the reference of dpo, and the
    # scores of rm are small numbers drawn at random
    chance, tolerance = {"dpo": (math.log(2), 1e-4), "rm": (math.log(2), 0.3)}.get(stage, (math.log(512), 0.1))
    assert losses[0] == pytest.approx(chance, rel=tolerance)
    assert sum(losses[STEPS // 2 :]) / (STEPS // 2) < 0.95 * losses[0], losses
