"""`llmsuite plan` for steps that are programs."""

from __future__ import annotations

import pytest

from llmsuite.cli.main import main
from llmsuite.contract.registry import load_plugins
from llmsuite.models.shape_spec import MoE
from llmsuite.parallel.program.lengths import longest_row
from llmsuite.planning.activations import _expert_rows
from llmsuite.planning.estimate import shape_spec_of
from llmsuite.planning.layout import Layout
from llmsuite.planning.memory import StageMemory, activation_settings, full_micro_batch
from llmsuite.planning.programs import lengths, notes
from llmsuite.recipe.resolve import RunPlan, plan_run
from tests.support.planned_runs import estimated

STEP = "--engine.mode=to_static", "--engine.program=step", "--engine.recompute=none", "--train.on_nonfinite=stop"


def _plan(stage: str, sharding: str, *words: str, micro_batches: int = 2) -> RunPlan:
    two = [
        "--launch.num_devices=2",
        f'--parallel={{"sharding": "{sharding}"}}' if sharding != "none" else "--parallel={}",
        "--train.micro_batch_size=2",
        f"--train.global_batch_size={4 * micro_batches}",
    ]
    return plan_run(f"recipes/llama/{stage}.json", [*two, *words], load_plugins(), True)


def _memory(sharding: str, *words: str, micro_batches: int = 2) -> StageMemory:
    (found,) = estimated(_plan("pretrain", sharding, *words, micro_batches=micro_batches)).stages
    return found


def test_sums_of_gradients_live_from_step_to_step() -> None:
    several = _memory("none", *STEP)
    one = _memory("none", *STEP, micro_batches=1)
    assert several.sums == several.gradients == several.parameters > 0
    assert several.between_steps == several.parameters + several.moments + several.sums
    assert one.sums == 0
    assert several.peak - one.peak == several.sums


def test_stage_2_keeps_whole_gradients_and_no_pieces() -> None:
    layers = _memory("stage2")
    steps = _memory("stage2", *STEP)
    assert steps.gradients == steps.parameters > layers.gradients
    assert steps.moments == layers.moments < 2 * steps.parameters
    assert layers.masters > steps.masters == 0


def test_stage_3_has_whole_parameters_within_a_step_and_slices_between_them() -> None:
    whole = _memory("none", *STEP)
    steps = _memory("stage3", *STEP)
    assert steps.parameters == pytest.approx(whole.parameters / 2, rel=0.01)
    assert steps.gradients == pytest.approx(whole.gradients / 2, rel=0.01)
    assert steps.activations - whole.activations == whole.parameters


def test_masters_of_16_bits_are_whole_and_copied_within_a_step() -> None:
    on_gpu = "--device=gpu", "--engine.precision=bf16"
    layers = _memory("stage2", *on_gpu)
    steps = _memory("stage2", *STEP, *on_gpu)
    assert steps.parameters == layers.parameters
    assert steps.masters == steps.gradients == 2 * steps.parameters > layers.masters
    # the rotary tables, which stay between steps in eager mode, are made in each program
    copied = steps.activations - layers.activations - layers.rotary_tables
    assert copied == steps.parameters


def test_recomputed_attention_keeps_no_scores() -> None:
    """Step programs keep what eager mode keeps; on a GPU in float32, which has no kernel for attention."""
    on_gpu = ("--device=gpu", "--engine.precision=fp32")
    kinds = ("none", "selective")
    in_steps = [word for word in STEP if "recompute" not in word]
    layers, steps = (
        [_memory("none", *on_gpu, *mode, f"--engine.recompute={kind}") for kind in kinds] for mode in ((), in_steps)
    )
    kept = [found.activations for found in steps]
    # a program makes the rotary tables within a step
    again = [found.activations + found.rotary_tables for found in layers]
    assert kept == again
    assert kept[1] < kept[0]


def test_there_is_a_program_for_each_length() -> None:
    assert _lengths("sft", 500) == [64, 128, 192, 256, 384, 512]
    assert _lengths("sft", 100) == [64, 128]
    assert _lengths("pretrain", 500) == [512]


def _lengths(stage: str, max_length: int) -> list[int]:
    plan = _plan(stage, "none", *STEP, f"--data.max_length={max_length}")
    multiple = plan.parallel.length_multiple
    return lengths(longest_row(max_length, multiple), multiple, plan.train)


def test_inputs_of_experts_are_made_again() -> None:
    """Rows of tokens, and what the last product takes; not on pipelines, nor where experts are not trained."""

    def keeps(recipe: str, *words: str) -> bool:
        given = ["--launch.num_devices=2", "--train.micro_batch_size=2", "--train.global_batch_size=8", *words]
        plan = plan_run(f"recipes/qwen_moe/{recipe}.json", given, load_plugins(), True)
        return activation_settings(Layout(plan.model, plan.parallel), plan.train.profile).keeps_expert_rows

    data = "--parallel={}"
    pipeline = '--parallel={"pipeline_parallel_degree": 2}'
    assert keeps("pretrain", data, "--engine.recompute=none")
    assert not keeps("pretrain", data, *STEP)
    assert keeps("pretrain", pipeline, *STEP)
    assert keeps("lora", data, *STEP)


def test_a_rank_has_a_row_for_each_choice_of_its_tokens() -> None:
    """Op by op it has those of its own experts: with tensor parallel a part. And with expert parallel one for each
    choice of the tokens of all data ranks."""
    kept = {}
    for tp, ep in ((1, 1), (2, 1), (1, 2)):
        for mode in (("--engine.recompute=none",), STEP):
            parallel = f'--parallel={{"tensor_parallel_degree":{tp},"expert_parallel_degree":{ep}}}'
            words = ["--launch.num_devices=2", parallel, "--train.micro_batch_size=2", *mode]
            plan = plan_run("recipes/qwen_moe/pretrain.json", words, load_plugins(), True)
            assert any("all data ranks" in note for note in notes(plan.model, plan.parallel)) == (ep > 1)
            settings = activation_settings(Layout(plan.model, plan.parallel), plan.train.profile)
            batch = full_micro_batch(plan.model, plan.data, plan.parallel, plan.train)
            mixture = next(layer.mlp for layer in shape_spec_of(plan.model).layers if isinstance(layer.mlp, MoE))
            kept[tp, ep, mode is STEP] = _expert_rows(mixture, batch, settings) / (batch.tokens * mixture.chosen)
    eager = {(1, 1, False): 1, (2, 1, False): 1 / 2, (1, 2, False): 1}
    assert kept == {**eager, (1, 1, True): 1, (2, 1, True): 1, (1, 2, True): 2}


@pytest.mark.parametrize(("sharding", "has_note"), [("stage2", False), ("stage3", True)])
def test_a_tied_embedding_of_a_pipeline_is_counted_in_slices(sharding: str, has_note: bool) -> None:
    parallel = f'--parallel={{"pipeline_parallel_degree":2,"sharding":"{sharding}"}}'
    words = [*STEP, "--launch.num_devices=4", parallel, "--train.micro_batch_size=2", "--train.global_batch_size=8"]
    words.append("--model.config.tie_word_embeddings=true")
    plan = plan_run("recipes/llama/sft.json", words, load_plugins(), True)
    assert any("a tied embedding" in note for note in notes(plan.model, plan.parallel)) == has_note


def test_a_plan_lists_its_step_programs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "recipes/llama/sft.json", "--smoke", "--parallel={}", "--launch.num_devices=1", *STEP]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "a step program for each length of rows, at most 4: 64, 128, 192, 256\n" in output
    assert "step programs: they are assumed to keep" in output
    assert main(words[:-4]) == 0
    assert "step program" not in capsys.readouterr().out
