"""Models that place their parameters themselves: the plugin of docs/guide/auto-parallel.md, as the page has it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multi.conftest import Runner
from tests.support.annotated_page import CLIPPED, FILES, LIMIT, OPTIMIZERS, PAGE, Page, assert_equal
from tests.support.paths import ROOT

((*COMMANDS,),) = (
    [shlex.split(line) for line in found.splitlines()] for found in re.findall(r"```\n(python .*?)```", PAGE, re.DOTALL)
)
WHOLE = "2: ([[0]], [[1]])"
"""The line of the page with the meshes of two processes."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> Page:
    return Page(tmp_path_factory.mktemp("page"), runner)


CASES: dict[str, tuple[str, Any]] = {
    "pipeline": ("_2", None),
    "rows": ("_2", ([[0], [1]], [[0], [1]])),
    "matrices": ("_2", ([[0, 1]], [[0, 1]])),
    "matrices, the other way round": ("_2", ([[1, 0]], [[0, 1]])),
    "pipeline and matrices": ("_4", None),
    "pipeline and rows": ("_4", ([[2], [0]], [[1], [3]])),
    "rows and matrices": ("_4", ([[3, 0], [1, 2]], [[3, 0], [1, 2]])),
    "rows and matrices, elsewhere behind the cut": ("_4", ([[0, 1], [2, 3]], [[3, 2], [0, 1]])),
}


@pytest.fixture(scope="module")
def alone(page: Page) -> dict[str, Any]:
    """One process, with each optimizer."""
    found = {}
    for name, words in OPTIMIZERS.items():
        page.run(f"alone-{name}", page.plugin("annotated_mlp"), "--launch.num_devices=1", CLIPPED, *words)
        found[name] = page.runner.metrics(f"alone-{name}")
        assert found[name][-1]["loss"] < 0.9 * found[name][0]["loss"], "it learns"
        assert all(record["grad_norm"] > 0.2 for record in found[name][:2]), "it is clipped"
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_meshes_of_a_model_equal_one_process(page: Page, alone: dict[str, Any], case: str, optimizer: str) -> None:
    count, ranks = CASES[case]
    name = f"{case.replace(' ', '-').replace(',', '')}-{optimizer}"
    plugin = page.plugin(
        "annotated_mlp" if ranks is None else re.sub(r"\W", "_", name), **({} if ranks is None else {count: ranks})
    )
    page.run(name, plugin, f"--launch.num_devices={count[1:]}", CLIPPED, *OPTIMIZERS[optimizer])
    assert_equal(page, name, f"alone-{optimizer}", alone[optimizer])
    evaluations = [
        [line for line in (page.runner.directory / run / "metrics.jsonl").read_text().splitlines() if "eval/" in line]
        for run in (name, f"alone-{optimizer}")
    ]
    for mine, theirs in zip(*(map(json.loads, lines) for lines in evaluations), strict=True):
        assert mine["eval/loss"] == pytest.approx(theirs["eval/loss"], rel=LIMIT)


def test_a_run_goes_on_with_other_meshes(page: Page, alone: dict[str, Any]) -> None:
    plugin = page.plugin("annotated_mlp")
    page.run("resumed", plugin, "--launch.num_devices=4", CLIPPED, "--train.max_steps=8", "--launch.max_restarts=0")
    whole = page.runner.directory / "resumed" / "checkpoints"
    (whole / "latest").write_text("step-4\n")
    for path in (whole / "step-8").iterdir():
        path.unlink()
    (whole / "step-8").rmdir()
    page.run("resumed", plugin, "--launch.num_devices=2", CLIPPED, "--resume")
    assert_equal(page, "resumed", "alone-adamw", alone["adamw"])


def test_it_begins_with_given_weights(page: Page, alone: dict[str, Any]) -> None:
    weights = page.runner.directory / "alone-adamw" / "checkpoints" / "step-8"
    plugin = page.plugin("annotated_mlp")
    found = []
    for count in (1, 4):
        words = f"--launch.num_devices={count}", f"--model.weights={weights}", "--train.max_steps=1"
        page.run(f"from-weights-{count}", plugin, *words)
        found.append(page.runner.metrics(f"from-weights-{count}")[0]["loss"])
    assert found[0] == pytest.approx(found[1], rel=LIMIT)
    assert found[0] < 1.05 * alone["adamw"][-1]["loss"] < alone["adamw"][0]["loss"]


def test_rows_need_not_be_a_multiple_of_the_ranks(page: Page) -> None:
    """Micro-batches of 3 on two ranks, and an evaluation of 16 rows in 4 of 3 and one more; 2 rows on 4 are refused."""
    plugin = page.plugin("uneven", _2=([[0], [1]], [[0], [1]]), _4=([[0], [1], [2], [3]], [[0], [1], [2], [3]]))
    found = []
    for count in (1, 2):
        sizes = "--train.micro_batch_size=3", "--train.global_batch_size=9", "--train.max_steps=2"
        page.run(f"uneven-{count}", plugin, f"--launch.num_devices={count}", *sizes)
        lines = (page.runner.directory / f"uneven-{count}" / "metrics.jsonl").read_text().splitlines()
        found.append([record.get("loss", record.get("eval/loss")) for record in map(json.loads, lines)])
    assert found[0] == pytest.approx(found[1], rel=LIMIT)
    said = page.run("too-few", plugin, "--launch.num_devices=4", "--train.micro_batch_size=2", expect=2)
    assert "4 ranks cut a tensor of [2, 4, 16] along dim 0, and some of them would have none of 2" in said


def test_commands_of_the_page_run(page: Page) -> None:
    assert COMMANDS[0] == ["python", "make_vectors.py"]
    assert len(COMMANDS) == 3
    for words in COMMANDS[1:]:
        assert words[:2] == ["llmsuite", "run"]
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=page.directory, capture_output=True, text=True, check=False,
            env={**page.runner.environment, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    records = [
        [record["loss"] for line in file.read_text().splitlines() if "loss" in (record := json.loads(line))]
        for file in (page.directory / "runs" / name / "metrics.jsonl" for name in ("mlp", "mlp-on"))
    ]
    assert records[1][0] < records[0][0], "the second run goes on with the weights of the first"


def test_a_parameter_on_no_mesh_is_named(page: Page) -> None:
    """Two ranks compute with it, of four that have it."""
    path = page.directory / "unplaced.py"
    line = "            self.w1 = dist.shard_tensor(w1, self.second, [dist.Replicate(), dist.Shard(0)])\n"
    assert line in FILES["annotated_mlp.py"]
    path.write_text(FILES["annotated_mlp.py"].replace(line, "            self.w1 = w1\n"))
    said = page.run("unplaced", path, "--launch.num_devices=4", expect=2)
    assert "parameter 'w1' is not placed, and only ranks [2, 3] compute with it" in said


def test_a_rank_that_would_send_to_itself_is_named(page: Page) -> None:
    plugin = page.plugin("staying", _4=([[0, 1], [2, 3]], [[3, 1], [0, 2]]))
    said = page.run("staying", plugin, "--launch.num_devices=4", expect=2)
    assert (
        "dist.reshard: from the mesh of ranks [0, 1, 2, 3] to that of [3, 1, 0, 2], rank 1 stays in its place" in said
    )


LANGUAGE_MODEL = '''
import dataclasses
import llmsuite
from llmsuite.models.plain import PlainNames, PlainShape
from llmsuite.models.shard_plan import AUTO_PARALLEL
from llmsuite.contract.hookspecs import ModelFamily

MESHES = {1: ([[0]], [[0]]), 2: ([[0, 1]], [[0, 1]]), 4: ([[0, 1]], [[2, 3]])}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape(PlainShape):
    model_type = "annotated_lm"

    vocab_size: int = 512
    """Tokens."""
    hidden_size: int = 16
    """Width."""


def network():
    import paddle
    import paddle.distributed as dist
    import paddle.nn.functional as F

    class Model(paddle.nn.Layer):
        def __init__(self, config, ops):
            super().__init__()
            meshes = MESHES[dist.get_world_size()]
            self.first, self.second = (dist.ProcessMesh(ranks, dim_names=["dp", "mp"]) for ranks in meshes)
            whole, columns = [dist.Replicate()] * 2, [dist.Replicate(), dist.Shard(1)]
            rows, width, vocabulary = [dist.Replicate(), dist.Shard(0)], config.hidden_size, config.vocab_size

            def placed(shape, mesh, placements):
                return dist.shard_tensor(self.create_parameter(shape), mesh, placements)

            self.embedding = placed([vocabulary, width], self.first, whole)
            self.inner = placed([width, 32], self.first, columns)
            self.outer = placed([32, width], self.second, rows)
            self.gain = placed([width], self.second, whole)
            self.head = placed([width, vocabulary], self.second, whole)

        def hidden_states(self, input_ids, document_starts=None):
            ids = dist.shard_tensor(input_ids, self.first, [dist.Shard(0), dist.Replicate()])
            y = F.gelu(paddle.matmul(F.embedding(ids, self.embedding), self.inner))
            y = dist.reshard(y, self.second, [dist.Shard(0), dist.Shard(2)])
            y = paddle.matmul(y, self.outer)
            return dist.reshard(y, self.second, [dist.Shard(0), dist.Replicate()]) * (1 + self.gain), []

        def token_nll(self, hidden, targets):
            logits = paddle.matmul(hidden, self.head)
            return F.cross_entropy(logits, targets.unsqueeze(-1), reduction="none").squeeze(-1)

        def token_nll_and_greedy_match(self, hidden, targets):
            is_first = paddle.matmul(hidden, self.head).argmax(-1) == targets
            return self.token_nll(hidden, targets), is_first.astype("float32")

    return Model


@llmsuite.hookimpl
def llmsuite_register_models():
    names = PlainNames(lambda config: ["embedding", "inner", "outer", "gain", "head"])
    return [
        ModelFamily(
            name="annotated_lm", help="for tests", config_cls=Shape, presets={}, smoke={"vocab_size": 512},
            factory=network, names=lambda: names, shard_plan=AUTO_PARALLEL, hf_model_types=("annotated_lm",),
        )
    ]
'''


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_built_in_stages_train_a_language_model_with_meshes_of_its_own(
    runner: Runner, tmp_path: Path, stage: str
) -> None:
    plugin = tmp_path / "annotated_lm.py"
    found = []
    plugin.write_text(LANGUAGE_MODEL)
    program = "--engine.mode=to_static", "--engine.program=step"
    for number, (count, mode) in enumerate([(1, ()), (2, ()), (4, ()), (2, program), (4, program)]):
        name = f"lm-{stage}-{number}"
        runner.run(
            "run", f"recipes/llama/{stage}.json", "--smoke", "--plugin", str(plugin), "--model.family=annotated_lm",
            '--model.config={"vocab_size": 512}', "--parallel={}", "--engine.recompute=none", "--train.max_steps=3",
            f"--launch.num_devices={count}", f"--output_dir={runner.directory / name}", "--train.log_steps=1",
            # with the usual epsilon the rounding of a gradient near zero decides where a step goes
            "--train.adam_epsilon=1e-4", *mode,
        )  # fmt: skip
        found.append((runner.metrics(name), runner.weights(name, 3)))
    (alone, expected), *others = found
    assert alone[-1]["loss"] != alone[0]["loss"]
    for records, weights in others:
        for record, wanted in zip(records, alone, strict=True):
            assert record["loss"] == pytest.approx(wanted["loss"], rel=LIMIT)
            assert record["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=LIMIT)
        for key, value in weights.items():
            np.testing.assert_allclose(value, expected[key], rtol=0, atol=LIMIT, err_msg=key)
