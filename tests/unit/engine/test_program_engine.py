"""Bad steps of compiled train steps are handled as in eager mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.engine import program_engine
from llmsuite.engine.eager_engine import EagerEngine
from llmsuite.engine.guard import NonFiniteLoss
from llmsuite.engine.program_engine import ProgramEngine
from llmsuite.engine.trainer import run
from llmsuite.observe.events import read_events
from llmsuite.observe.runs import read_run
from llmsuite.recipe.resolve import plan_run
from llmsuite.stages.sft import SftStage
from tests.support.paths import ROOT

STEPS = 4
BAD = 3
SAVED = 2
BATCH = 2
DYNAMIC = ()
PROGRAM = ("--engine.mode=to_static", "--engine.program=step")

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


def _final_tensors(directory: Path) -> dict[str, np.ndarray]:
    files = sorted((directory / "checkpoints" / f"step-{STEPS}").glob("*.safetensors"))
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        tensors |= safetensors.numpy.load_file(file)
    return tensors


@pytest.mark.parametrize("mode", [DYNAMIC, PROGRAM])
def test_a_run_that_stops_has_updated_nothing(
    train: Train, tmp_path: Path, mode: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    for kind in (EagerEngine, ProgramEngine):

        def watched(self: Any, step: int, *args: Any, run_step: Any = kind.step) -> Any:
            try:
                return run_step(self, step, *args)
            finally:
                seen.append(b"".join(shard.parameter.numpy().tobytes() for shard in self.optimizer.shards))

        monkeypatch.setattr(kind, "step", watched)
    with pytest.raises(NonFiniteLoss, match=rf"^step {BAD}: loss is nan, gradient norm nan; nothing was updated\. L"):
        train("stop", *mode)
    assert len(seen) == BAD
    assert seen[BAD - 1] == seen[BAD - 2] != seen[BAD - 3]
    assert [path.name for path in (tmp_path / "stop" / "checkpoints").glob("step-*")] == [f"step-{SAVED}"]


@pytest.mark.parametrize("answer", [pytest.param("roll_back", marks=pytest.mark.further), "skip"])
def test_bad_steps_are_handled_as_in_eager_mode(train: Train, answer: str) -> None:
    word = f"--train.on_nonfinite={answer}"
    expected = train("dynamic", word, *DYNAMIC)
    found = train("program", word, *PROGRAM)
    for directory in (expected, found):
        events = [(e["event"], e.get("step"), e.get("to")) for e in read_events(directory)]
        assert (("rolled back", BAD, SAVED) in events) == (answer == "roll_back")
        assert ("skipped", BAD, None) in events
        assert [record["step"] for record in read_run(directory).steps] == list(range(1, STEPS + 1))
    theirs = _final_tensors(expected)
    ours = _final_tensors(found)
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


def test_rows_longer_than_a_program_are_refused(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_engine, "longest_row", lambda max_length, multiple: 1)
    with pytest.raises(
        UserError, match=r"^engine\.program: is step, and a row of this stage has \d+ tokens, more than"
    ):
        train("long", *PROGRAM)
