"""The Gemma of docs/guide/tutorial-family.md: its commands as they stand, and that it is one network on every path."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llmsuite.testing import assert_family_contract
from llmsuite.testing.family_contract import PATHS
from tests.multi.conftest import Runner
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "gemma" / "gemma.py"
PAGE = (ROOT / "docs" / "guide" / "tutorial-family.md").read_text(encoding="utf-8")


def test_it_has_sixty_lines_of_code() -> None:
    lines = [line for line in EXAMPLE.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(lines) <= 60
    assert EXAMPLE.read_text(encoding="utf-8").strip() in PAGE


def test_it_is_one_network(tmp_path: Path) -> None:
    outcomes = assert_family_contract("gemma1", tmp_path, plugins=[EXAMPLE])
    assert {outcome.path for outcome in outcomes if outcome.refused is None} == set(PATHS)


def test_it_computes_what_a_gemma_does() -> None:
    """The formulas of the paper, by NumPy, for one layer's norm and MLP and for the embedding."""
    code = f"""
import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r})
import math, numpy as np, paddle
from gemma import FAMILY
from llmsuite.devices.ops import Ops
model = FAMILY.factory()(FAMILY.config_cls(**FAMILY.smoke), Ops())
random = np.random.default_rng(0)
for parameter in model.parameters():
    parameter.set_value(random.normal(size=parameter.shape).astype("float32") * 0.3)
layer, x = model.model.layers[0], random.normal(size=[1, 3, 64]).astype("float32")
norm = layer.input_layernorm
wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps) * (1 + norm.weight.numpy())
assert np.allclose(norm(paddle.to_tensor(x)).numpy(), wanted, atol=1e-4)
gate, up, down = (getattr(layer.mlp, f"{{name}}_proj").weight.numpy() for name in ("gate", "up", "down"))
g = x @ gate
gelu = 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
assert np.allclose(layer.mlp(paddle.to_tensor(x)).numpy(), (gelu * (x @ up)) @ down, rtol=1e-3, atol=1e-3)
ids = paddle.to_tensor([[5, 7]])
assert np.allclose(model.embed(ids).numpy(), 8 * model.model.embed_tokens.weight.numpy()[[5, 7]], rtol=1e-6)
assert model.lm_head is None
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_commands_of_the_page(runner: Runner, tmp_path: Path) -> None:
    blocks = re.findall(r"```\n(.*?)```", re.sub(r"```\w+\n.*?```\n", "", PAGE, flags=re.DOTALL), re.DOTALL)
    (block,) = (block for block in blocks if "gemma.py" in block)
    for name in ("recipes", "data", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**runner.environment, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    said = ""
    for line in block.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line)
        assert program == "llmsuite"
        command = [sys.executable, "-m", "llmsuite", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.fail(f"{line}\n{done.stdout}{done.stderr}")
        said = done.stdout
    assert "greedy tokens are the same" in said
