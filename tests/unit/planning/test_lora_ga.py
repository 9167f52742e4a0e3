"""Plans for adapters that are initialised from gradients (LoRA-GA)."""

from __future__ import annotations

from llmsuite.contract.registry import Registry
from llmsuite.planning.cost import HARDWARE, SLOW
from llmsuite.planning.report import show_plan, size
from llmsuite.recipe.resolve import plan_run
from tests.support.paths import ROOT
from tests.support.planned_runs import estimated

RECIPE = ROOT / "recipes" / "llama" / "lora.json"
GA = "--lora.init=lora_ga"
LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
"""Elements of the matrices of a layer of Llama 3.1 8B."""
MLP = 4096 * 14336
ONE_DEVICE = ("--parallel={}", "--launch.num_devices=1", "--engine.precision=fp32")


def beginnings(registry: Registry, *words: str) -> list[float]:
    return [stage.lora_ga_init for stage in estimated(plan_run(RECIPE, [GA, *words], registry)).stages]


def test_gradients_are_as_large_as_the_adapted_matrices(registry: Registry) -> None:
    assert beginnings(registry, *ONE_DEVICE) == [4 * (32 * LAYER + 2 * MLP)]
    only = '--lora.target_modules=["up_proj", "down_proj"]'
    assert beginnings(registry, *ONE_DEVICE, only) == [4 * (32 * 2 * MLP + 2 * MLP)]


def test_passes_divide_them(registry: Registry) -> None:
    """32 layers of 7 matrices each, in groups of whole layers."""
    for passes, layers in ((2, 16), (8, 4), (32, 1)):
        assert beginnings(registry, *ONE_DEVICE, f"--lora.init_passes={passes}") == [4 * (layers * LAYER + 2 * MLP)]


def test_a_rank_has_those_of_its_part(registry: Registry) -> None:
    """Tensor parallel cuts them and a pipeline deals them out; sharding does not, which cuts no activations. In 16 bit
    activations are cast."""
    words = '--parallel={"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "sharding": "stage3"}'
    found = beginnings(registry, words, "--launch.num_devices=8", "--engine.precision=fp32")
    assert found == [4 * (16 * LAYER // 2 + 2 * MLP)] * 2
    cast = beginnings(registry, words, "--launch.num_devices=8", "--train.micro_batch_size=16")
    tokens = 16 * 2048
    assert cast == [4 * (16 * LAYER // 2 + MLP // 2 + tokens * (4096 + 14336 // 2))] * 2


def test_the_gradients_are_part_of_the_peak_and_shown(registry: Registry) -> None:
    (plain,) = estimated(plan_run(RECIPE, ["--lora.init=pissa", *ONE_DEVICE], registry)).stages
    found = estimated(plan_run(RECIPE, [GA, *ONE_DEVICE], registry))
    (stage,) = found.stages
    assert plain.lora_ga_init == 0
    assert stage.peak == plain.between_steps + plain.held + plain.buffers + stage.lora_ga_init
    assert any(
        f"before the first step only: {size(stage.lora_ga_init)} of gradients" in line
        for line in show_plan(found, None, None)
    )


def test_its_passes_are_those_of_steps_and_products_for_gradients(registry: Registry) -> None:
    """Each matrix has a product for its gradient in each batch, in whichever pass: 2 for each element and token."""
    plain = estimated(plan_run(RECIPE, ["--lora.init=pissa", *ONE_DEVICE], registry))
    assert plain.lora_ga_flops == 0
    assert not any("before the first one" in line for line in show_plan(plain, None, None))
    for batches, passes in ((1, 1), (3, 1), (2, 4)):
        words = (f"--lora.init_batches={batches}", f"--lora.init_passes={passes}")
        found = estimated(plan_run(RECIPE, [GA, *ONE_DEVICE, *words], registry))
        products = 2.0 * 32 * LAYER * found.tokens * batches
        assert found.flops == plain.flops
        assert found.lora_ga_flops == batches * passes * plain.flops + products
        device = HARDWARE["h100"]
        _, slow = found.lora_ga_seconds(device)
        expected = batches * passes * found.step_seconds(device)[1] + products / (device.flops * SLOW.flops)
        assert abs(slow / expected - 1) < 1e-12
        text = f"the passes of {batches * passes} steps, with gradients of matrices: {found.lora_ga_flops:.3g} FLOPs"
        assert any(text in line for line in show_plan(found, None, device))
