"""Training on the simulated accelerator (`tests.device`) equals training on the CPU."""

from __future__ import annotations

import pytest

from tests.device import library_directory
from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, LIMIT, OPTIMIZERS, once

PLUGIN = "tests/device/__init__.py"


def train(runner: Runner, name: str, device: str, recipe: str, *words: str) -> None:
    """A smoke run on one device, in a process of its own: the plug-in of the device is loaded with Paddle."""
    given = once([*COMMON, *OPTIMIZERS["sgd"], "--checkpoint.save_steps=null", "--launch.num_devices=1",
                  "--parallel={}", *words])  # fmt: skip
    process = runner.start(
        "run", recipe, "--smoke", "--plugin", PLUGIN, f"--device={device}", *given,
        f"--output_dir={runner.directory / name}",
        CUSTOM_DEVICE_ROOT=str(library_directory()),  # Paddle sets it in a process of tests that has imported it
    )  # fmt: skip
    printed, _ = process.communicate()
    assert process.returncode == 0, printed


@pytest.mark.parametrize("words", [()], ids=["dynamic"])
def test_sft_equals_the_cpu(runner: Runner, words: tuple[str, ...]) -> None:
    metrics = []
    for device in ("cpu", "sim"):
        name = f"sft-{device}"
        train(runner, name, device, "recipes/llama/sft.json", *words)
        metrics.append(runner.metrics(name))
    for ours, theirs in zip(*metrics, strict=True):
        for key in ("loss", "grad_norm"):
            far = abs(theirs[key] / ours[key] - 1)
            print(f"step {ours['step']}: {key} {far:.1e}")
            # what is different after an update is what it has magnified
            assert far <= (LIMIT if ours["step"] == 1 else 10 * LIMIT), (ours["step"], key, far)
