"""The teacher of a recipe: its shape, from files or a preset, and the rules between it and the model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import RecipeError
from llmsuite.base.resources import bundled
from llmsuite.contract.registry import Registry
from llmsuite.recipe.pins import hub_names
from llmsuite.recipe.resolve import RunPlan, plan_run
from tests.support import tiny_llama

SMALL = dataclasses.replace(tiny_llama.CONFIG, vocab_size=32000)


def planned(registry: Registry, *words: str, smoke: bool = False) -> RunPlan:
    return plan_run(bundled("recipes") / "llama" / "gkd.json", words, registry, smoke=smoke)


def problem(registry: Registry, *words: str) -> str:
    with pytest.raises(RecipeError) as raised:
        planned(registry, *words)
    return str(raised.value)


def directory(path: Path, **changes: Any) -> Path:
    """A model directory as far as its config goes."""
    path.mkdir(parents=True)
    data = {**dataclasses.replace(SMALL, **changes).to_hf()}
    (path / "config.json").write_text(json.dumps(data))
    return path


def test_a_teacher_on_a_hub_has_the_shape_of_its_preset(registry: Registry) -> None:
    plan = planned(registry)
    teacher = plan.train.teacher
    assert teacher is not None
    assert (teacher.family.name, teacher.config.hidden_size, teacher.precision) == ("llama", 5120, "bf16")
    assert teacher.seed == plan.train.seed + 1
    named = {named.key: named.name for named in hub_names(plan.recipe)}
    assert named["gkd.teacher"] == "meta-llama/Llama-2-13b-chat-hf"


def test_the_preset_may_be_of_another_family(registry: Registry) -> None:
    words = ("--gkd.teacher_preset=qwen2-7b", "--model.config.vocab_size=152064", "--gkd.teacher_precision=fp32")
    plan = planned(registry, *words)
    assert plan.train.teacher is not None
    assert (plan.train.teacher.family.name, plan.train.teacher.precision) == ("qwen", "fp32")


def test_a_directory_has_a_shape_of_its_own(registry: Registry, tmp_path: Path) -> None:
    path = directory(tmp_path / "teacher")
    plan = planned(registry, f"--gkd.teacher={path}", "--gkd.teacher_preset=null")
    assert plan.train.teacher is not None
    assert (plan.train.teacher.config.hidden_size, plan.train.teacher.weights) == (SMALL.hidden_size, path)
    message = problem(registry, f"--gkd.teacher={path}")
    assert "gkd.teacher" in message
    assert "is another model than gkd.teacher_preset and gkd.teacher_config say (hidden_size" in message


def test_a_smoke_run_has_a_random_teacher_of_the_tiny_shape(registry: Registry) -> None:
    plan = planned(registry, smoke=True)
    assert plan.train.teacher is not None
    assert plan.train.teacher.weights is None
    assert plan.train.teacher.config == plan.model.config
    assert plan.train.teacher.precision == "fp32"


def test_teachers_that_do_not_fit_are_refused(registry: Registry, tmp_path: Path) -> None:
    no = "--gkd.teacher_preset=null"
    assert "gkd.teacher: is required: a directory" in problem(registry, "--gkd.teacher=null", no)
    missing = problem(registry, "--gkd.teacher=./nowhere", no)
    assert "gkd.teacher: ./nowhere is not a directory with a model" in missing
    assert "or set gkd.teacher_preset" in missing
    assert "gkd.teacher_preset: no family has a preset 'llama-9b'" in problem(registry, "--gkd.teacher_preset=llama-9b")
    vocabulary = problem(registry, "--gkd.teacher_preset=llama-3-8b")
    assert "gkd.teacher: has a vocabulary of 128256 tokens, and the model one of 32000" in vocabulary
    odd = directory(tmp_path / "odd", num_key_value_heads=1)
    heads = problem(registry, f"--gkd.teacher={odd}", no)
    assert "tensor_parallel_degree: is 2, which does not divide the 1 num_key_value_heads of the teacher" in heads
    scores = directory(tmp_path / "scores", head="score")
    assert "gkd.teacher: is a reward model" in problem(registry, f"--gkd.teacher={scores}", no)
    unknown = problem(registry, "--gkd.teacher_config.hiden_size=8")
    assert "gkd.teacher_config: hiden_size is no field of a llama shape" in unknown
    precision = problem(registry, "--device=cpu", "--engine.precision=fp32", "--gkd.teacher_precision=fp16")
    assert "gkd.teacher_precision: is fp16, which cpu does not support" in precision


def test_what_a_teacher_does_not_go_with_is_refused(registry: Registry) -> None:
    message = problem(registry, "--engine.mode=to_static", "--engine.program=step", "--engine.recompute=none")
    assert "engine.program: is step, which stage gkd does not support" in message
    assert "prefix" in problem(registry, "--prefix.tokens=4")
    assert "qat.weight_bits" in problem(registry, "--qat.weight_bits=8")


def test_a_directory_without_a_model_is_reported_before_a_run(registry: Registry) -> None:
    plan = planned(registry, "--gkd.teacher=./nowhere", "--model.weights=null", "--model.tokenizer=data/tokenizer")
    with pytest.raises(RecipeError, match=r"gkd\.teacher: nowhere is not a directory with a model"):
        plan.check_files(loads_data=False)
