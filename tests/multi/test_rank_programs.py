"""Models that are cut over ranks answer as whole ones, live and as programs of Paddle Inference."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmsuite.checkpoint.model_dir import open_model
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.generate import generate
from llmsuite.inference.load import load_model
from llmsuite.inference.sampling import Sampling
from tests.multi.conftest import Runner
from tests.multi.rank_programs import VARIATIONS
from tests.parity.cases import few
from tests.support.families import FAMILIES
from tests.support.written_family import write_family

ON_TWO = [*few(dict.fromkeys([*FAMILIES, *VARIATIONS]), *({*FAMILIES} - {"llama", "gpt", "deepseek", "qwen"}))]


@pytest.mark.parametrize(
    ("tp", "pp", "names"),
    [
        (2, 1, ON_TWO),
        (1, 2, ["llama", "llama-tied", "gpt", "deepseek"]),
        (2, 2, ["llama"]),
    ],
)
def test_ranks_answer_as_one_process(runner: Runner, tp: int, pp: int, names: list[str]) -> None:
    words = [str(runner.directory), str(tp), str(pp), *names]
    code, said = runner.launch(tp * pp, "tests.multi.rank_programs", *words)
    assert code == 0, said
    assert [line.split(":")[0] for line in said.splitlines() if re.search(r": \d+ logits", line)] == names


@pytest.fixture(scope="module")
def model(runner: Runner) -> Path:
    return write_family(runner.directory / "model", "llama")


@pytest.fixture(scope="module")
def static(runner: Runner, model: Path) -> Path:
    target = runner.directory / "static"
    runner.run("export", str(model), "-o", str(target), "--tensor_parallel_degree", "2", "--decoding_loop")
    return target


def answers(runner: Runner, name: str, *words: str) -> list[Any]:
    """What `generate` writes."""
    prompts = runner.directory / "prompts.jsonl"
    target = runner.directory / f"{name}.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hello", "What is a cat?", "1 2 3 4")))
    runner.run("generate", *words, "--input", str(prompts), "--output", str(target), "--max_new_tokens", "10")
    return [json.loads(line)["answers"][0]["ids"] for line in target.read_text().splitlines()]


def test_the_commands_write_run_and_verify_programs_of_ranks(runner: Runner, model: Path, static: Path) -> None:
    assert sorted(path.name for path in static.glob("rank_*/*")) == sorted(
        2 * ["loop.json", "model.json", "model.pdiparams"]
    )
    sampled = ["--temperature", "1", "--seed", "3", "--batch_size", "2"]
    expected = answers(runner, "one", str(model), *sampled)
    two = [str(static), "--engine", "static", "--num_devices", "2"]
    assert answers(runner, "two", *two, *sampled) == expected
    greedy = answers(runner, "greedy", str(model))
    assert greedy != expected
    assert answers(runner, "loop", *two, "--decoding_loop") == greedy
    said = runner.run("verify", str(static))
    assert "greedy tokens are the same" in said
    assert said.count("digests match") == 1
    for words, message in (
        ([], "was exported for 2 devices; add --num_devices 2"),
        (["--num_devices", "2", "--pipeline_parallel_degree", "2"], "was exported for 2 devices; add --num_devices 2"),
    ):
        output = runner.run("generate", str(static), "--engine", "static", "--prompt", "Hi", *words, expect=2)
        assert message in output


def test_a_changed_file_of_a_rank_is_noticed(runner: Runner, model: Path) -> None:
    target = runner.directory / "changed"
    runner.run("export", str(model), "-o", str(target), "--tensor_parallel_degree", "2")
    parameters = target / "rank_1" / "model.pdiparams"
    content = bytearray(parameters.read_bytes())
    content[len(content) // 2] ^= 1
    parameters.write_bytes(content)
    said = runner.run("verify", str(target), expect=2)
    assert "rank_1/model.pdiparams does not have the sha256 it was written with" in said


_PLAIN = """
import sys
import numpy as np
import paddle
import paddle.distributed as dist
from paddle.inference import Config, create_predictor

directory, ids = sys.argv[1], [int(word) for word in sys.argv[2:]]
dist.init_parallel_env()
place = f"{directory}/rank_{dist.get_rank()}/model"
config = Config(place + ".json", place + ".pdiparams")
config.disable_mkldnn()
predictor = create_predictor(config)
cache = [np.zeros([1, *shape], "float32") for shape in SHAPES]
new, padding, said = [ids], np.zeros([1], "int64"), []
for _ in range(12):
    inputs = [np.asarray(new, "int64"), padding, *cache]
    logits, *cache = [t.numpy().copy() for t in predictor.run([paddle.to_tensor(value) for value in inputs])]
    new = logits.argmax(-1)[:, None]
    said.append(int(new[0, 0]))
assert "llmsuite" not in sys.modules
print(said)
"""


def test_programs_of_ranks_need_paddle_only(runner: Runner, model: Path, static: Path) -> None:
    """With Paddle's own launcher, and without what llmsuite adds to its CPU wheel."""
    shapes = json.loads((static / "manifest.json").read_text())["cache_shapes"]
    script = runner.directory / "plain.py"
    logs = runner.directory / "plain logs"
    script.write_text(_PLAIN.replace("SHAPES", repr(shapes)))
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", str(logs)]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PADDLE_TRAINER_ID")}
    subprocess.run(
        [*launcher, str(script), str(static), "5", "9", "300"],
        cwd=runner.directory,
        env=environment,
        check=True,
        timeout=240,
    )
    decoder = ModelDecoder(load_model(open_model(model, FAMILIES), CpuBackend()))
    expected = list(generate(decoder, [5, 9, 300], set(), Sampling(max_new_tokens=12)))
    for rank in range(2):
        assert (logs / f"workerlog.{rank}").read_text().rstrip().endswith(str(expected))
