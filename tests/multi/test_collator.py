"""A collator of the user's makes the batches of a run, on a pipeline as in one process."""

from __future__ import annotations

import pytest

from tests.multi.conftest import Runner

SOURCE = """
def none_twice(samples, collate):
    batch = collate(samples)
    first = {}
    for number, target in enumerate(batch["targets"].tolist()):
        first.setdefault(target, number)
    once = [number in first.values() for number in range(len(batch["targets"]))]
    return {**batch, "weights": batch["weights"] * once}
"""
WORDS = (
    "--smoke", "--train.max_steps=2", "--train.global_batch_size=4", "--train.micro_batch_size=1",
    "--data.max_length=64", "--train.eval_steps=null", "--model.config.num_hidden_layers=3",
)  # fmt: skip


def test_a_pipeline_has_the_losses_of_one_process(runner: Runner) -> None:
    file = runner.directory / "seldom.py"
    file.write_text(SOURCE)
    found = {}
    for name, ranks, words in (
        ("plain", 1, ["--parallel={}"]),
        ("one", 1, ["--parallel={}", f"--data.collator={file}:none_twice"]),
        # the rank in the middle makes no batches
        ("pp3", 3, ['--parallel={"pipeline_parallel_degree":3}', f"--data.collator={file}:none_twice"]),
    ):
        directory = runner.directory / name
        more = [f"--launch.num_devices={ranks}", f"--output_dir={directory}"]
        runner.run("run", "recipes/llama/sft.json", *WORDS, *words, *more)
        found[name] = [record["loss"] for record in runner.metrics(name)]
    assert found["pp3"] == pytest.approx(found["one"], rel=1e-6)
    assert found["one"][0] < 0.95 * found["plain"][0], "fewer tokens weigh something, as many divide"
