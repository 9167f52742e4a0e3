"""The loss curve of a longer run in 16 bits, beside that of float32."""

from __future__ import annotations

import numpy as np

from tests.multi.conftest import Runner
from tests.parity.cases import Case

_STEPS = 60
CURVE = Case(
    "curve",
    1,
    (
        "--launch.num_devices=1", f"--train.max_steps={_STEPS}", "--train.global_batch_size=8", "--data.eval=null",
        "--train.micro_batch_size=8", "--checkpoint.save_steps=null", "--train.log_steps=1",
    ),
    recipe="recipes/llama/digits-pretrain.json",
)  # fmt: skip
"""In float32, on one process."""


def check_curve(runner: Runner, name: str) -> None:
    """That a run of `CURVE` in 16 bits lies closer to the one in float32 than the losses of neighbouring batches do."""
    exact, found = (np.array([row["loss"] for row in runner.metrics(case)]) for case in (CURVE.name, name))
    noise = float(np.std(np.diff(exact[20:]))) / 2**0.5
    far = float(np.sqrt(np.mean((found - exact) ** 2)))
    print(f"from {exact[0]:.2f} to {exact[-10:].mean():.2f}; apart by {far:.1e}, batches by {noise:.1e}")
    assert len(found) == _STEPS
    assert found[-10:].mean() < 0.9 * found[0]
    assert 0 < far < noise / 2
