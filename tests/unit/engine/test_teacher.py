"""Loading a teacher: its values, its tokens, and what identifies it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.base.errors import UserError
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.cpu import CpuBackend
from llmsuite.engine.teacher import load_teacher, teacher_digest
from llmsuite.recipe.teacher import TeacherPlan
from tests.support import tiny_llama
from tests.support.paths import DATA

CONFIG = dataclasses.replace(tiny_llama.CONFIG, vocab_size=512)
TOKENIZER = DATA / "tokenizer"


def plan_of(weights: Path | None, precision: Any = "fp32", seed: int = 7) -> TeacherPlan:
    return TeacherPlan("gkd.teacher", tiny_llama.FAMILY, CONFIG, weights, precision, seed)


def loaded(plan: TeacherPlan) -> dict[str, np.ndarray]:
    teacher = load_teacher(plan, tiny_llama.FAMILIES, CpuBackend(), TextTokenizer(TOKENIZER))
    assert not teacher.training
    assert all(parameter.stop_gradient for parameter in teacher.parameters())
    return {name: parameter.astype("float32").numpy() for name, parameter in teacher.named_parameters()}


def test_has_the_values_of_its_files(tmp_path: Path) -> None:
    values = tiny_llama.write(tmp_path, CONFIG, tokenizer=TOKENIZER)
    assert tiny_llama.same(loaded(plan_of(tmp_path)), values)


def test_random_values_are_those_of_its_seed() -> None:
    one, again, other = (loaded(plan_of(None, seed=seed)) for seed in (7, 7, 8))
    assert tiny_llama.same(one, again)
    name = "model.embed_tokens.weight"
    assert np.abs(one[name] - other[name]).max() > 1e-3
    assert (one["model.norm.weight"] == 1).all()


def test_has_memory_only_where_nothing_is_computed(tmp_path: Path) -> None:
    """Its files need not be there."""

    class Virtual(CpuBackend):
        has_values = False

    teacher = load_teacher(plan_of(tmp_path / "missing"), {}, Virtual(), TextTokenizer(TOKENIZER))
    shapes = {name: tuple(parameter.shape) for name, parameter in teacher.named_parameters()}
    assert shapes == {name: value.shape for name, value in loaded(plan_of(None)).items()}
    assert all(parameter.stop_gradient for parameter in teacher.parameters())


def test_has_to_have_the_tokens_of_the_model(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path, CONFIG, tokenizer=TOKENIZER)
    path = tmp_path / "tokenizer.json"
    words = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(words), encoding="utf-8")
    with pytest.raises(UserError, match=r"^gkd.teacher: .* has other tokens than"):
        loaded(plan_of(tmp_path))


def test_identity_is_that_of_its_values(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 1)):
        tiny_llama.write(tmp_path / name, CONFIG, seed=seed)
    plans = [
        plan_of(tmp_path / "one"), plan_of(tmp_path / "two"), plan_of(tmp_path / "one", precision="bf16"),
        plan_of(None), plan_of(None, seed=8),
    ]  # fmt: skip
    digests = [teacher_digest(plan, tiny_llama.FAMILIES) for plan in plans]
    assert len({*digests}) == len(digests)
    # the seed of a run is no part of a teacher from files
    assert teacher_digest(plan_of(tmp_path / "one", seed=9), tiny_llama.FAMILIES) == digests[0]
    assert teacher_digest(None, {}) == ""
