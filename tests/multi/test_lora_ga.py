"""LoRA-GA in runs: what adapters begin with is of the gradient that a run has which trains the model itself."""

from __future__ import annotations

import numpy as np
import pytest

from llmsuite.engine.lora_ga import GradientInit, gradient_factors
from tests.multi.conftest import Runner
from tests.parity.cases import STEPS, first_gradients, run_cases
from tests.parity.lora import case, compare_updates

WORDS = ("--train.micro_batch_size=8",)
INIT = "--lora.init=lora_ga"
TWO = "--lora.init_batches=2"
MESH = {"tensor_parallel_degree": 2, "sequence_parallel": True}
ONES = {
    "begins": case("begins", words=WORDS, run=(INIT,)),
    "two": case("two", words=WORDS, run=(INIT, TWO)),
    "in parts": case("in parts", words=WORDS, run=(INIT, TWO, "--lora.init_passes=3")),
    "whole": case("whole", words=WORDS, run=("--stage=sft", "--lora.rank=null", "--lora.lora_plus_ratio=1")),
}
MANY = case("tp", 2, MESH, ("--engine.recompute=full",), run=(INIT,))
STATE = "adapter_state"


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    return run_cases(runner, [*ONES.values(), MANY])


def test_factors_are_of_the_gradient_of_the_whole_model(runner: Runner, failed: dict[str, str]) -> None:
    """Which the engine makes for its optimizer, on another way."""
    assert not {"begins", "whole"} & failed.keys(), failed
    (gradients,), state = first_gradients(runner, "whole"), runner.weights("begins", 1, STATE)
    modules = [name.removesuffix(".lora_A0") for name in state if name.endswith(".lora_A0")]
    assert len(modules) == 4 * 7
    for module in modules:
        factors = gradient_factors(module, gradients[f"{module}.weight"], GradientInit(4, 1, 1, 64.0))
        for kind, expected in zip(("lora_A0", "lora_B0"), factors):
            # off by the rounding of the gradient over the distance of its singular values
            np.testing.assert_allclose(
                state[f"{module}.{kind}"], expected, atol=1e-4 * np.abs(expected).max(), err_msg=f"{module}.{kind}"
            )


def test_the_first_step_has_the_loss_of_the_base(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"begins", "two", "whole"} & failed.keys(), failed
    losses = {name: [step["loss"] for step in runner.metrics(name)] for name in ("begins", "two", "whole")}
    assert losses["begins"][0] == losses["two"][0] == losses["whole"][0]
    assert losses["begins"][-1] != losses["two"][-1]
    assert losses["begins"][-1] < 0.98 * losses["begins"][0]


def test_passes_of_parts_give_the_same_bits(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"two", "in parts", "begins"} & failed.keys(), failed
    two, parts, one = (runner.weights(name, STEPS, STATE) for name in ("two", "in parts", "begins"))
    assert two.keys() == parts.keys()
    for name, value in two.items():
        assert value.tobytes() == parts[name].tobytes(), name
        assert value.tobytes() != one[name].tobytes(), "the second batch counts"


def test_what_is_taken_off_stays(runner: Runner, failed: dict[str, str]) -> None:
    assert "begins" not in failed, failed
    before, after = (runner.weights("begins", step, STATE) for step in (1, STEPS))
    for name, value in after.items():
        assert (value.tobytes() == before[name].tobytes()) == name.endswith("0"), name


def test_a_mesh_equals_one_process(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"begins", MANY.name} & failed.keys(), failed
    assert compare_updates(runner, "begins", MANY.name).problems == []
