"""What Paddle's own save_state_dict writes on four ranks is one model after `llmsuite merge`, and what `llmsuite
convert --layout distcp` writes is cut by its load_state_dict.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmsuite.base.files import broken_file
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.devices.cpu import CpuBackend
from llmsuite.launch.machines import free_ports
from llmsuite.models.dense_plan import PLAN
from tests.multi.conftest import Runner
from tests.support import tiny_llama
from tests.support.paths import ROOT
from tests.support.tiny_llama import FAMILIES

NUM_RANKS = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> Path:
    """The directories tests.multi.paddle_saves makes."""
    directory = tmp_path_factory.mktemp("saved")
    tiny_llama.write(directory / "model")
    ours = "--layout", "distcp", "--split-num", "3"
    runner.run("convert", str(directory / "model"), "-o", str(directory / "ours"), *ours)
    CpuBackend().prepare_ranks()
    master, *endpoints = [f"127.0.0.1:{port}" for port in free_ports("127.0.0.1", NUM_RANKS + 1)]
    ranks = []
    for rank in range(NUM_RANKS):
        variables = {
            **os.environ,
            **CpuBackend().environment(NUM_RANKS),
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(NUM_RANKS),
            "PADDLE_MASTER": master,
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        }
        command = [sys.executable, "-m", "tests.multi.paddle_saves", str(directory)]
        with open(directory / f"log.{rank}", "wb") as log:
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log))
    try:
        codes = [rank.wait(300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * NUM_RANKS, (directory / f"log.{np.argmax(np.abs(codes))}").read_text()[-3000:]
    return directory


@pytest.mark.parametrize("name", ["plain", "nested", "flat"])
@pytest.mark.parametrize("layout", ["hf", "paddlenlp"])
def test_the_merged_model_is_the_one_that_was_cut(
    runner: Runner, saved: Path, tmp_path: Path, name: str, layout: str
) -> None:
    files = sorted(path.name for path in (saved / name).rglob("*.distcp"))
    assert len(files) == NUM_RANKS
    runner.run("merge", str(saved / name), "-o", str(tmp_path / "out"), "--layout", layout)
    assert broken_file(tmp_path / "out") is None
    model = open_model(tmp_path / "out", FAMILIES)
    expected = np.load(saved / name / "expected.npz")
    assert (model.layout, model.names) == (layout, list(expected))
    for parameter in model.names:
        value = model.read(parameter)
        assert value.dtype.name == ("bfloat16" if name == "flat" else "float32")
        assert value.tobytes() == expected[parameter].astype(value.dtype).tobytes(), parameter


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_ranks_load_their_parts_of_what_is_written(saved: Path, rank: int) -> None:
    loaded = np.load(saved / f"loaded.{rank}.npz")
    for name, value in tiny_llama.values().items():
        dim = PLAN.dim(name)
        part = value
        if dim is not None:
            half = -(-value.shape[dim] // 2)
            part = value[(slice(None),) * dim + (slice(0, half) if rank % 2 == 0 else slice(half, None),)]
        np.testing.assert_array_equal(loaded[f"model.{tiny_llama.to_paddlenlp(name)}"], part, err_msg=name)
