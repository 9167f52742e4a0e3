"""The token accuracy of an evaluation, on ranks that each have a part of the vocabulary or of the layers."""

from __future__ import annotations

import json

import numpy as np

from tests.multi.conftest import Runner

NUM_RANKS = 2
VOCABULARY = 7
"""The vocabulary is padded to 8."""
WORDS = (
    "--smoke", "--train.max_steps=6", "--train.eval_steps=2", "--train.learning_rate=0.01", "--train.warmup_ratio=0",
    "--train.lr_schedule=constant", "--train.global_batch_size=8", "--data.max_length=64",
    "--model.config.num_hidden_layers=2", "--model.config.vocab_size=515", "--checkpoint.best_is=highest",
    "--checkpoint.best_metric=eval/tokens/accuracy",
)  # fmt: skip


def main() -> int:
    """What each rank does: numbers with many equal ones, so that the first of the largest is on either rank."""
    import paddle
    import paddle.distributed as dist

    from llmsuite.contract.schema.degrees import Degrees
    from llmsuite.devices.ops import Ops
    from llmsuite.parallel import collective
    from llmsuite.parallel.tensor import VocabularyParallelLogitOps

    mesh = collective.start(Degrees(pp=1, dp=1, sharding=1, tp=NUM_RANKS))
    logit_ops = VocabularyParallelLogitOps(Ops(), mesh, VOCABULARY)
    random = np.random.default_rng(0)  # the same on all
    logits = random.integers(-3, 0, [64, VOCABULARY]).astype("float32")
    targets = random.integers(0, VOCABULARY, [64])
    targets[:32] = logits.argmax(-1)[:32]
    padded = np.pad(logits, [(0, 0), (0, 1)])  # the padding has the largest numbers
    cut = dist.shard_tensor(paddle.to_tensor(padded), mesh.tensor, [dist.Shard(1)])
    found = logit_ops.is_greedy_match(cut, paddle.to_tensor(targets)).numpy()
    np.testing.assert_array_equal(found, logits.argmax(-1) == targets)
    assert 32 < found.sum() < 64
    return 0


def test_equal_logits_and_padding(runner: Runner) -> None:
    code, output = runner.launch(NUM_RANKS, "tests.multi.test_token_accuracy")
    assert code == 0, output


def test_a_mesh_has_that_of_one_process(runner: Runner) -> None:
    found = {}
    for num_ranks, parallel in ((1, {}), (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})):
        directory = runner.directory / f"accuracy-{num_ranks}"
        given = [f"--parallel={json.dumps(parallel)}", f"--launch.num_devices={num_ranks}", f"--output_dir={directory}"]
        runner.run("run", "recipes/llama/sft.json", *WORDS, *given)
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        assert not any("tokens/accuracy" in line for line in lines), "only evaluations have it"
        of_steps = {line["step"]: line["eval/tokens/accuracy"] for line in lines if "eval/loss" in line}
        best = json.loads((directory / "checkpoints/best").read_text())
        assert best["value"] == max(of_steps.values())
        found[num_ranks] = of_steps
        for line in lines:
            if "eval/loss" in line:
                assert line["eval/tokens/accuracy"] >= line["eval/tokens/likely"]
    assert found[1].keys() == {2, 4, 6}
    assert max(found[1].values()) > 0.02
    assert found[4] == found[1]
