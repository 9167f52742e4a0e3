"""The CPU without the plugin: plain operations with the same numbers, and what needs the kernels is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.cli.model import stored_precision
from llmsuite.contract.registry import NO_PLUGINS, load_plugins
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.cpu.rounding import round_to_bf16, rounded_matmul
from llmsuite.devices.matmul_ops import MatmulOps
from llmsuite.devices.ops import Ops
from llmsuite.devices.optimizer_ops import OptimizerOps
from llmsuite.plugins.cpu_kernels.cpu import CpuKernels
from tests.support.devices import cpu_backend
from tests.support.paths import ROOT

PLAIN = CpuBackend().with_kernels()


def test_the_plain_forms_are_there() -> None:
    assert PLAIN.ops("fp32") == Ops()
    assert PLAIN.ops("bf16") == Ops(matmuls=MatmulOps(matmul=rounded_matmul, round_activation=round_to_bf16))
    assert PLAIN.optimizer_ops("fp32") == OptimizerOps()
    assert PLAIN.weight_only_precisions == ()
    assert PLAIN.program_kernels() is None
    assert not PLAIN.padding_free("fp32")
    assert not PLAIN.has_bf16_rollout_weights("bf16")
    assert "slower than engine.precision fp32" in str(PLAIN.precision_warning("bf16"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_have_the_same_numbers(precision: str) -> None:
    x, y = (paddle.to_tensor(np.random.default_rng(seed).normal(size=[48, 48]).astype("float32")) for seed in (0, 1))
    plain, fused = (backend.ops(precision).matmuls.matmul(x, y, False, False) for backend in (PLAIN, cpu_backend()))
    assert np.abs(plain.numpy() - fused.numpy()).max() <= 1e-5 * np.abs(plain.numpy()).max()


def test_a_run_without_plugins_has_the_same_numbers(tmp_path: Path) -> None:
    losses = []
    for name, words in {"with": [], "without": ["--no-plugins"]}.items():
        command = [sys.executable, "-m", "llmsuite", *words, "run", "recipes/llama/sft.json", "--smoke"]
        command += ["--parallel={}", "--launch.num_devices=1", "--train.max_steps=3", f"--output_dir={tmp_path / name}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([record["loss"] for record in map(json.loads, lines) if "loss" in record])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0]


def test_a_stored_precision_names_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NO_PLUGINS, "1")
    assert load_plugins().devices["cpu"].factory().added_kernels == []
    given = SimpleNamespace(engine="dynamic", precision="int8", num_devices=1)
    message = "--precision int8: cpu has fp32; int8 is in the plugin cpu_kernels, which --no-plugins leaves out"
    with pytest.raises(UserError, match=message):
        stored_precision(given, PLAIN)


def test_its_size_is_planned_as_it_is_packed() -> None:
    from llmsuite.plugins.cpu_kernels.packing import pack

    values = np.ones([96, 40], "float32")
    for precision in CpuKernels.weight_only_precisions:
        assert CpuKernels().packed_bytes(precision, 96, 40) == pack(values, precision).nbytes, precision
