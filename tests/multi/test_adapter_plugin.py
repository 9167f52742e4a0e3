"""The method of adapters in docs/guide/plugin-models.md: its commands as they stand; the same numbers on two ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmsuite.checkpoint.tensors import TensorFiles
from tests.multi.conftest import Runner
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "guide" / "plugin-models.md").read_text(encoding="utf-8")


def test_a_method_of_a_plugin_trains_and_merges_and_ranks_agree(tmp_path: Path, runner: Runner) -> None:
    (code,) = re.findall(r"```python\n# ia3.py\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "ia3.py").write_text(code, encoding="utf-8")
    for name in ("recipes", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    plain = re.sub(r"```\w+\n.*?```\n", "", PAGE, flags=re.DOTALL)  # without the blocks of a language
    (block,) = (text for text in re.findall(r"```\n(.*?)```", plain, re.DOTALL) if "ia3.py" in text)
    base, train, merge = (shlex.split(line) for line in block.replace("\\\n", " ").splitlines())
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

    def run(words: list[str]) -> None:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=tmp_path,
            env={**runner.environment, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def losses(name: str) -> list[float]:
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [record["loss"] for line in lines if "loss" in (record := json.loads(line))]

    run(base)
    run(train)
    run(merge)
    two = ["--launch.num_devices=2", '--parallel={"tensor_parallel_degree": 2, "sequence_parallel": true}']
    run([*train[:-1], *two, "--output_dir=runs/of-two"])
    checkpoint = max((tmp_path / "runs" / "ia3" / "checkpoints").glob("step-*"))
    files = TensorFiles(checkpoint, "adapter_model")
    assert all(name.endswith(".ia3_scale") and np.abs(files.read(name) - 1).max() > 1e-5 for name in files.names)
    assert losses("of-two") == pytest.approx(losses("ia3"), rel=1e-5)
    assert list((tmp_path / "models" / "ia3").glob("model*.safetensors"))
