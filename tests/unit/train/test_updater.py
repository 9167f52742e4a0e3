"""What becomes of bad steps where a step is one program: the same as op by op."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from llmsuite.errors import UserError
from llmsuite.observe.events import read_events
from llmsuite.observe.runs import read_run
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import plan_run
from llmsuite.stages.sft import SftStage
from llmsuite.train import updater
from llmsuite.train.guard import NonFiniteLoss
from llmsuite.train.trainer import run
from llmsuite.train.updater import EagerUpdater, ProgramUpdater
from tests.paths import ROOT

STEPS, BAD, SAVED, BATCH = 4, 3, 2, 2
DYNAMIC, PROGRAM = (), ("--engine.mode=to_static", "--engine.program=step")

Train = Callable[..., Path]


@pytest.fixture
def train(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Runs on one rank; the weights of the batch of step BAD are no numbers."""
    collate = SftStage.collate

    def go(name: str, *words: str) -> Path:
        taken = []

        def spoilt(self: Any, samples: Any) -> Any:
            batch = collate(self, samples)
            taken.append(len(samples))
            is_bad = len(taken) == 1 + BAD  # the first one is made to see whether anything is supervised
            return {**batch, "weights": batch["weights"] * math.nan} if is_bad else batch

        monkeypatch.setattr(SftStage, "collate", spoilt)
        common = (
            f"--train.max_steps={STEPS}", "--data.eval=null", "--parallel={}", "--launch.num_devices=1",
            f"--train.global_batch_size={BATCH}", f"--train.micro_batch_size={BATCH}", "--data.num_workers=0",
            f"--checkpoint.save_steps={SAVED}", "--checkpoint.keep_last=9", f"--output_dir={tmp_path / name}",
            "--engine.recompute=none", "--model.config.num_hidden_layers=2", "--train.adam_epsilon=1e-2",
        )  # fmt: skip
        assert (
            run(plan_run(ROOT / "recipes/llama/sft.json", [*common, *words], registry, smoke=True), registry, False)
            == 0
        )
        return tmp_path / name

    return go


def _learnt(directory: Path) -> dict[str, np.ndarray]:
    files = sorted((directory / "checkpoints" / f"step-{STEPS}").glob("*.safetensors"))
    return {name: value for file in files for name, value in safetensors.numpy.load_file(file).items()}


@pytest.mark.parametrize("mode", [DYNAMIC, PROGRAM])
def test_a_run_that_stops_has_updated_nothing(
    train: Train, tmp_path: Path, mode: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    for kind in (EagerUpdater, ProgramUpdater):

        def watched(self: Any, step: int, *args: Any, take: Any = kind.take) -> Any:
            try:
                return take(self, step, *args)
            finally:
                seen.append(b"".join(shard.parameter.numpy().tobytes() for shard in self.optimizer.shards))

        monkeypatch.setattr(kind, "take", watched)
    with pytest.raises(NonFiniteLoss, match=rf"^step {BAD}: loss is nan, gradient norm nan; nothing was updated\. L"):
        train("stop", *mode)
    assert len(seen) == BAD
    assert seen[BAD - 1] == seen[BAD - 2] != seen[BAD - 3]
    assert [path.name for path in (tmp_path / "stop" / "checkpoints").glob("step-*")] == [f"step-{SAVED}"]


@pytest.mark.parametrize("answer", ["roll_back", "skip"])
def test_answers_as_op_by_op(train: Train, answer: str) -> None:
    word = f"--train.on_nonfinite={answer}"
    expected, found = train("dynamic", word, *DYNAMIC), train("program", word, *PROGRAM)
    for directory in (expected, found):
        events = [(e["event"], e.get("step"), e.get("to")) for e in read_events(directory)]
        assert (("rolled back", BAD, SAVED) in events) == (answer == "roll_back")
        assert ("skipped", BAD, None) in events
        assert [record["step"] for record in read_run(directory).steps] == list(range(1, STEPS + 1))
    theirs, ours = _learnt(expected), _learnt(found)
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        assert np.linalg.norm(ours[name] - value) <= 1e-5 * np.linalg.norm(value), name
    records = list(zip(read_run(expected).steps, read_run(found).steps, strict=True))
    assert all(
        a[key] == pytest.approx(b[key], rel=1e-6) for a, b in records for key in ("loss", "grad_norm") if key in a
    )
    assert [sorted({"loss", "skipped"} & a.keys()) for a, _ in records] == [
        sorted({"loss", "skipped"} & b.keys()) for _, b in records
    ]


def test_rows_longer_than_programs_are_made_for_are_refused(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updater, "longest_row", lambda plan: 1)
    with pytest.raises(
        UserError, match=r"^engine\.program: is step, and a row of this stage has \d+ tokens, more than"
    ):
        train("long", *PROGRAM)
