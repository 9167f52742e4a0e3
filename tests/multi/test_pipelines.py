"""Pipelines change no number, whatever the schedule, the cut, and what else is cut inside their stages."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import PluginSite
from tests.multi.conftest import Runner, learnt
from tests.parity.cases import Case as Run
from tests.parity.cases import few, run_cases
from tests.support.paths import ROOT

STEPS = 3
SGD = ("--train.optimizer=sgd", "--train.learning_rate=0.05", "--train.max_grad_norm=0.5")
# an epsilon of the size of the gradients: the usual one magnifies their last bit from step to step
ADAMW = ("--train.learning_rate=1e-2", "--train.weight_decay=0.1", "--train.adam_epsilon=1e-2")
TIED = ("--model.config.tie_word_embeddings=true",)
BATCH = "--train.global_batch_size"
RECOMPUTE = ("--engine.recompute=full",)


@dataclasses.dataclass(frozen=True)
class Case:
    """A strategy, and what the run in one process shares with it."""

    ranks: int
    parallel: dict[str, Any]
    optimizer: tuple[str, ...] = SGD
    more: tuple[str, ...] = ()
    micro: int = 2

    def words(self) -> list[str]:
        return [*_common(self.optimizer), *self.more, *_cut(self.ranks, self.parallel, self.micro)]


def _common(optimizer: tuple[str, ...]) -> list[str]:
    words = [
        f"--train.max_steps={STEPS}",
        "--checkpoint.save_steps=2",
        "--model.config.num_hidden_layers=8",
        *optimizer,
    ]
    return words if BATCH in " ".join(optimizer) else [*words, f"{BATCH}=8"]


def _cut(ranks: int, parallel: dict[str, Any], micro: int) -> list[str]:
    spread = {
        f"{key}_degree": value for key, value in parallel.items() if key in ("tensor_parallel", "pipeline_parallel")
    }
    spread |= {key: value for key, value in parallel.items() if f"{key}_degree" not in spread}
    return [f"--launch.num_devices={ranks}", f"--parallel={json.dumps(spread)}", f"--train.micro_batch_size={micro}"]


def _pipeline(stages: int, schedule: str = "1F1B", **more: Any) -> dict[str, Any]:
    return {"pipeline_parallel": stages, "pipeline_schedule": schedule, **more}


CASES = {
    # of two ranks; activations and gradients both go both ways when they are interleaved
    "two": Case(2, _pipeline(2)),
    "two, interleaved": Case(2, _pipeline(2, "interleaved")),
    "two of four chunks, tied": Case(2, _pipeline(2, "interleaved", virtual_pipeline_degree=4), SGD + TIED, micro=1),
    # 7 micro-batches: no multiple of the stages, and rounds of 3, 2 and 2
    "two, seven micro-batches": Case(2, _pipeline(2, "interleaved"), (*ADAMW, f"{BATCH}=7"), RECOMPUTE, micro=1),
    "two, interleaved, adamw": Case(2, _pipeline(2, "interleaved", pipeline_cut="parameters"), ADAMW + TIED),
    # of four ranks; two are in the middle
    "four, FThenB": Case(4, _pipeline(4, "FThenB")),
    "four, interleaved, tied": Case(4, _pipeline(4, "interleaved", pipeline_cut="parameters"), SGD + TIED, RECOMPUTE),
    "four, fewer micro-batches": Case(4, _pipeline(4, "interleaved"), (*SGD, f"{BATCH}=6")),
    "three named layers": Case(4, _pipeline(4, pipeline_cut=[1, 5, 6]), ADAMW + TIED),
    "two and two, stage 1": Case(4, _pipeline(2, "interleaved", sharding="stage1"), ADAMW, micro=1),
    "two and two, sequence": Case(
        4, _pipeline(2, "interleaved", tensor_parallel=2, sequence_parallel=True), SGD + TIED, RECOMPUTE
    ),
    # of eight: every axis at once
    "eight, stage 2": Case(
        8,
        _pipeline(
            2,
            "interleaved",
            virtual_pipeline_degree=3,
            pipeline_cut=[1, 2, 3, 5, 6],
            tensor_parallel=2,
            sequence_parallel=True,
            sharding="stage2",
        ),
        SGD + TIED,
        micro=1,
    ),
    "eight, four stages": Case(8, _pipeline(4, "interleaved", tensor_parallel=2), ADAMW, RECOMPUTE),
}
CASES = few(
    CASES,
    "two, interleaved, adamw",
    "four, FThenB",
    "four, fewer micro-batches",
    "two and two, stage 1",
    "eight, four stages",
)


def _one(optimizer: tuple[str, ...]) -> str:
    return f"one {' '.join(optimizer)}".replace("/", "_")


@pytest.fixture(scope="module")
def runs(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """All cases, and the same without a pipeline in one process."""
    directory: Path = tmp_path_factory.mktemp("launches")
    rows = (ROOT / "data" / "preference" / "eval.jsonl").read_text().splitlines(keepends=True)
    (directory / "eval.jsonl").write_text("".join(rows[:6]))
    evaluate = f"--data.eval={directory / 'eval.jsonl'}"
    ones = {case.optimizer: 1 if f"{BATCH}=7" in case.optimizer else 2 for case in CASES.values()}
    cut = [Run(name, case.ranks, [*case.words(), evaluate], note_opened=True) for name, case in CASES.items()]
    whole = [
        Run(_one(optimizer), 1, [*_common(optimizer), *_cut(1, {}, micro), evaluate])
        for optimizer, micro in ones.items()
    ]
    assert not run_cases(runner, [*cut, *whole])
    return runner


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_equals_one_process(runs: Runner, name: str) -> None:
    case = CASES[name]
    one = runs.metrics(_one(case.optimizer))
    many = runs.metrics(name)
    assert len(one) == len(many) == STEPS
    for a, b in zip(one, many):
        assert (a["tokens"], a["supervised_tokens"]) == (b["tokens"], b["supervised_tokens"])
        for key in ("loss", "grad_norm", "logps/chosen", "logps/rejected"):
            assert b[key] == pytest.approx(a[key], rel=1e-6), (a["step"], key)
    assert one[-1]["loss"] < 0.99 * one[0]["loss"], "nothing was learnt, so nothing was compared"
    evaluated, expected = (_evaluation(runs, run) for run in (name, _one(case.optimizer)))
    assert evaluated == pytest.approx(expected, rel=1e-6, abs=1e-7)
    # Adam divides by the root of tiny second moments, which magnifies the last bit of a gradient
    tolerance = 1e-6 if SGD[0] in case.optimizer else 1e-5
    for stem in ("model", "optimizer"):
        ours = runs.weights(_one(case.optimizer), STEPS, stem)
        theirs = runs.weights(name, STEPS, stem)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert np.linalg.norm(theirs[key] - value) <= tolerance * np.linalg.norm(value), key


def _evaluation(runner: Runner, name: str) -> dict[str, float]:
    lines = (runner.directory / name / "metrics.jsonl").read_text().splitlines()
    (record,) = [record for line in lines if "eval/loss" in (record := json.loads(line))]
    return {key: record[key] for key in ("eval/loss", "eval/logps/chosen", "eval/logps/rejected")}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.parallel["pipeline_parallel"] == 4])
def test_the_middle_of_a_pipeline_reads_no_data(runs: Runner, name: str) -> None:
    tensor = CASES[name].parallel.get("tensor_parallel", 1)
    for rank in range(CASES[name].ranks):
        paths = json.loads((runs.directory / name / f"opened-{rank}.json").read_text())
        opened = {Path(path).name for path in paths}
        data = {"train.jsonl", "eval.jsonl", "tokenizer_config.json"}
        assert opened & data == (set() if tensor <= rank < 3 * tensor else data), rank


def test_a_checkpoint_of_an_interleaved_pipeline_goes_on_in_one_process(runs: Runner) -> None:
    name = "two, interleaved"
    case = CASES[name]
    once = [*_common(case.optimizer), *_cut(1, {}, 2)]
    once.append(f"--data.eval={_resolved(runs, name)['data']['eval']}")
    # longer than the run it continues: another schedule of the learning rate, so it is refused as another recipe
    longer = [word.replace(f"max_steps={STEPS}", "max_steps=6") for word in once]
    assert "the schedule it had" in runs.run(*runs.smoke(name, *longer, "--resume"), expect=2)
    assert f"resuming from {runs.directory / name}" in runs.run(*runs.smoke(name, *once, "--resume"))


def test_a_run_with_ranks_in_the_middle_goes_on_bit_for_bit(runs: Runner) -> None:
    name = "four, interleaved, tied"
    again = "four, resumed"
    shutil.copytree(runs.directory / name, runs.directory / again)
    shutil.rmtree(runs.directory / again / "checkpoints" / f"step-{STEPS}")
    evaluate = f"--data.eval={_resolved(runs, name)['data']['eval']}"
    output = runs.run(*runs.smoke(again, *CASES[name].words(), evaluate, "--resume"))
    assert "resuming from" in output
    assert f"step {STEPS}/{STEPS}" in output
    assert learnt(runs.metrics(again)) == learnt(runs.metrics(name))
    first, second = (runs.directory / n / "checkpoints" / f"step-{STEPS}" / "manifest.json" for n in (name, again))
    assert json.loads(first.read_text())["files"] == json.loads(second.read_text())["files"]


LOST = """
import os
import llmsuite

def install():  # in each rank, which is a fork
    from llmsuite.parallel.p2p import P2PChannels

    send, sent = P2PChannels.send, []

    def failing(self, value, forward):
        sent.append(forward)
        if len(sent) == 20 and os.environ["PADDLE_TRAINER_ID"] == "1":  # after a few messages it can send no more
            self._senders[forward].put(lambda: (_ for _ in ()).throw(RuntimeError("the cable is out")))
        send(self, value, forward)

    P2PChannels.send = failing

os.register_at_fork(after_in_child=install)

@llmsuite.hookimpl
def llmsuite_run_end(run, step):
    pass
"""


def test_a_message_that_cannot_be_sent_ends_the_run(runner: Runner, tmp_path: Path) -> None:
    """The ranks that wait for it would wait for ever."""
    PluginSite(tmp_path).install("lost", LOST)
    logs = runner.directory / "logs of lost"
    strategy = ("--launch.num_devices=2", '--parallel={"pipeline_parallel_degree":2}')
    words = runner.smoke("lost", *strategy, f"--launch.log_dir={logs}")
    output = runner.run(*words, expect=1, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", LLMSUITE_PLUGINS="lost")
    log = (logs / "workerlog.1").read_text()
    assert "RuntimeError: the cable is out" in log
    assert "could not be sent; the run ends" in output
    assert "ended with exit code 1" in output  # of rank 1, or of its neighbour, which cannot send to it any more


def _resolved(runner: Runner, name: str) -> Any:
    return json.loads((runner.directory / name / "recipe.json").read_text())
