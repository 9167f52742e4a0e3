"""Reward models: a score head in every family and on disk, the score of the right token, and where a run begins."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import safetensors.numpy

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.checkpoint.convert.adapter import add_adapter
from llmsuite.checkpoint.model_dir import open_model, read_config
from llmsuite.contract.registry import Registry
from llmsuite.devices.cpu import CpuBackend
from llmsuite.engine.trainer import run
from llmsuite.inference.load import load_model
from llmsuite.recipe.resolve import plan_run
from llmsuite.stages.rm import RmStage
from llmsuite.stages.sections import RmSection
from tests.support import dpo_case, tiny_llama
from tests.support.families import FAMILIES, tiny
from tests.support.paths import ROOT

SCORING = dataclasses.replace(tiny_llama.CONFIG, head="score")

# the head


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_have_a_score_head(family: str, tied: bool) -> None:
    model = tiny(family, head="score", tie_word_embeddings=tied)
    names = [name for name, _ in model.named_parameters()]
    assert names[-1] == "score.weight"
    assert "lm_head.weight" not in names
    assert dict(model.named_parameters())["score.weight"].shape == [model.config.hidden_size, 1]
    spec = FAMILIES[family]
    assert list(spec.names().parameter_names(model.config)) == names
    assert spec.names().is_linear("score.weight")
    assert spec.names().from_hf("score.weight", model.config) == "score.weight"
    assert "score" in spec.shard_plan.last  # type: ignore[union-attr]
    data = model.config.to_hf()
    assert data["architectures"][0].endswith("ForSequenceClassification")
    assert len(data["id2label"]) == 1
    assert "head" not in data
    again = spec.config_cls.from_hf(data)
    assert again.head == "score"
    assert again.to_hf() == data
    speaking = dataclasses.replace(model.config, head="language_model").to_hf()
    assert spec.config_cls.from_hf(speaking).head == "language_model"
    assert "id2label" not in speaking


def test_on_disk_it_is_as_hf_has_it(tmp_path: Path) -> None:
    parameters = tiny_llama.write(tmp_path, SCORING)
    stored = {k: v for f in tmp_path.glob("*.safetensors") for k, v in safetensors.numpy.load_file(f).items()}
    assert stored["score.weight"].shape == (1, SCORING.hidden_size)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    opened = open_model(tmp_path, tiny_llama.FAMILIES)
    assert opened.config == SCORING
    np.testing.assert_array_equal(opened.read("score.weight"), parameters["score.weight"])


def test_several_labels_are_not_a_score(tmp_path: Path) -> None:
    for change in ({"id2label": {"0": "bad", "1": "good"}}, {"id2label": None}):
        data = {**SCORING.to_hf(), **change}
        (tmp_path / "config.json").write_text(json.dumps(data))
        with pytest.raises(UserError, match="2 labels; a score head with one"):
            read_config(tmp_path, tiny_llama.FAMILIES)


def test_a_model_does_what_its_head_can() -> None:
    scoring = tiny_llama.model(SCORING)
    speaking = tiny_llama.model()
    hidden = paddle.randn([3, SCORING.hidden_size])
    expected = (hidden.numpy() @ scoring.score.weight.numpy())[:, 0]
    np.testing.assert_allclose(scoring.scores(hidden).numpy(), expected, rtol=1e-5)
    with pytest.raises(AssertionError, match="has no logits"):
        scoring.logits(hidden)
    with pytest.raises(AssertionError, match="no score head"):
        speaking.scores(hidden)


# the stage


@pytest.mark.parametrize("multiple", [1, 16])
def test_the_last_token_of_each_answer_is_scored(multiple: int) -> None:
    stage = RmStage(RmSection(margin=0.5, center_rewards=0.1), dpo_case.stage(length_multiple=multiple).context)
    pairs, _ = dpo_case.pairs(dpo_case.stage(), dpo_case.rows(3))
    pairs = [pairs[0], *(dataclasses.replace(pair, margin=own) for pair, own in zip(pairs[1:], (2.0, -1.0)))]
    model = dpo_case.model(head="score")
    batch = stage.collate(pairs)
    assert batch["input_ids"].shape[1] % multiple == 0
    assert batch["num_supervised"] == 6
    answers = [pair.answers[side] for side in (0, 1) for pair in pairs]
    assert batch["lengths"].tolist() == [len(answer) for answer in answers]
    for ids, position, answer in zip(batch["input_ids"], batch["positions"], answers):
        at = position % batch["input_ids"].shape[1]
        assert ids[: at + 1].tolist() == answer.prompt + answer.ids
        assert ids[at] == stage.context.tokenizer.eos_id

    def score(ids: list[int]) -> float:
        hidden, _ = model.hidden_states(paddle.to_tensor([ids]))
        return model.scores(hidden[:, -1]).item()

    with paddle.no_grad():
        chosen, rejected = np.split(np.array([score(answer.prompt + answer.ids) for answer in answers]), 2)
        terms = stage.loss(model, batch)
    margins = np.array([0.5, 2.0, -1.0])  # the first pair has none of its own
    expected = np.log1p(np.exp(-(chosen - rejected - margins))) + 0.1 * (chosen + rejected) ** 2
    assert terms.weight == 3
    assert float(terms.total) == pytest.approx(expected.sum(), rel=1e-5)
    assert float(terms.sums["rewards/accuracy"][0]) == (chosen > rejected).sum()
    assert float(terms.sums["rewards/margin"][0]) == pytest.approx((chosen - rejected).sum(), rel=1e-4)


# where a run begins


def test_a_language_model_gets_a_new_head(
    tmp_path: Path, registry: Registry, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(name: str, recipe: str, *words: str) -> str:
        common = ("--train.max_steps=1", "--data.eval=null", "--parallel={}", "--launch.num_devices=1")
        output = f"--output_dir={tmp_path / name}"
        plan = plan_run(ROOT / "recipes" / "llama" / recipe, [*common, *words, output], registry, smoke=True)
        assert run(plan, registry, resume=False) == 0
        return capfd.readouterr().out

    def weights(name: str) -> Path:
        return tmp_path / name / "checkpoints" / "step-1"

    new = "score.weight is new, initialized from seed 42"
    train("speaking", "orpo.json", "--train.learning_rate=1e-30")
    words = (f"--model.weights={weights('speaking')}", "--train.learning_rate=1e-30")
    assert new in train("scoring", "rm.json", *words)
    before, after = (open_model(weights(name), registry.models) for name in ("speaking", "scoring"))
    assert set(after.names) - set(before.names) == {"score.weight"}
    assert set(before.names) - set(after.names) == {"lm_head.weight"}
    for name in set(before.names) & set(after.names):
        np.testing.assert_array_equal(before.read(name), after.read(name))
    assert np.linalg.norm(after.read("score.weight")) > 0

    words = (f"--model.weights={weights('scoring')}", "--train.learning_rate=1e-30")
    assert new not in train("on", "rm.json", *words)
    np.testing.assert_array_equal(
        open_model(weights("on"), registry.models).read("score.weight"), after.read("score.weight")
    )

    with pytest.raises(RecipeError, match=r"is a reward model, but dpo trains a language model"):
        plan_run(ROOT / "recipes" / "llama" / "dpo.json", words[:1], registry, smoke=True)
    with pytest.raises(UserError, match="is a reward model: it scores answers and cannot generate"):
        load_model(after, CpuBackend())


def test_the_head_is_not_a_recipe_key(problems: Callable[..., list[Any]]) -> None:
    (problem,) = problems({"stage": "rm", "model.config.head": "score"})
    assert "unknown key" in problem.message


def test_adapters_are_saved_with_the_head_and_resumed(
    tmp_path: Path, registry: Registry, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(name: str, steps: int, resume: bool = False) -> Path:
        words = (
            f"--train.max_steps={steps}", "--data.eval=null", "--parallel={}", "--launch.num_devices=1",
            "--lora.rank=4", f"--output_dir={tmp_path / name}", "--checkpoint.save_steps=1", "--train.warmup_ratio=0",
            "--train.lr_schedule=constant",
        )  # fmt: skip
        plan = plan_run(ROOT / "recipes" / "llama" / "rm.json", words, registry, smoke=True)
        assert run(plan, registry, resume) == 0
        return tmp_path / name / "checkpoints" / f"step-{steps}"

    whole = train("whole", 2)
    stored = [safetensors.numpy.load_file(whole.parent / f"step-{i}" / "adapter_model.safetensors") for i in (1, 2)]
    first, second = (found["base_model.model.score.weight"] for found in stored)
    assert first.shape == (1, 64)
    assert not np.array_equal(first, second), "it is trained"
    data = json.loads((whole / "adapter_config.json").read_text())
    assert (data["task_type"], data["modules_to_save"]) == ("SEQ_CLS", ["score"])

    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-2")
    (tmp_path / "again" / "checkpoints" / "latest").write_text("step-1\n")
    resumed = safetensors.numpy.load_file(train("again", 2, resume=True) / "adapter_model.safetensors")
    assert resumed.keys() == stored[1].keys()
    for name, value in stored[1].items():
        np.testing.assert_array_equal(resumed[name], value)


def test_a_language_model_and_an_adapter_with_a_head_are_a_reward_model(tmp_path: Path) -> None:
    base = tiny_llama.write(tmp_path / "base")
    module = "model.layers.0.mlp.down_proj"
    size = base["model.layers.0.mlp.down_proj.weight"].shape
    random = np.random.default_rng(1)
    a, b = (random.normal(size=shape).astype("float32") for shape in ((2, size[0]), (size[1], 2)))
    score = random.normal(size=(1, tiny_llama.CONFIG.hidden_size)).astype("float32")
    tensors = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b, "score.weight": score}
    (tmp_path / "adapter").mkdir()
    safetensors.numpy.save_file(
        {f"base_model.model.{name}": value for name, value in tensors.items()},
        tmp_path / "adapter" / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "modules_to_save": ["score"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    merged = add_adapter(open_model(tmp_path / "base", tiny_llama.FAMILIES), tmp_path / "adapter")
    assert merged.config == dataclasses.replace(open_model(tmp_path / "base", tiny_llama.FAMILIES).config, head="score")
    assert set(merged.names) == set(base) - {"lm_head.weight"} | {"score.weight"}
    np.testing.assert_array_equal(merged.read("score.weight"), score.T)
    expected = base[f"{module}.weight"] + a.T @ b.T
    np.testing.assert_allclose(merged.read(f"{module}.weight"), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(merged.read("model.norm.weight"), base["model.norm.weight"])
