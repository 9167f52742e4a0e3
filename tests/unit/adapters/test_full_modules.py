"""Modules that are trained in full next to adapters (`lora.modules_to_save`): what is trained, their files, and the
merged model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import paddle
import pytest
import safetensors.numpy

from llmsuite.adapters.add import adapted_modules, add_adapters
from llmsuite.adapters.parameters import is_factor
from llmsuite.base.errors import UserError
from llmsuite.checkpoint.adapter_base import Base
from llmsuite.checkpoint.adapter_dir import Adapters, SavedAdapters
from llmsuite.checkpoint.adapter_writer import write_adapters
from llmsuite.checkpoint.convert.adapter import AdaptedTensors, add_adapter
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.devices.cpu import CpuBackend
from llmsuite.engine.trainer import run
from llmsuite.inference.load import load_model
from llmsuite.models.head import EMBEDDING, OUTPUT
from llmsuite.models.initial_values import initial_values
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.models.targets import full_modules
from llmsuite.recipe.resolve import plan_run
from tests.support.adapter_models import IDS, base_of, section
from tests.support.families import FAMILIES, LINEAR
from tests.support.paths import ROOT

NAMES = ["embed_tokens", "lm_head"]
PEFT_NAMES = {
    "gpt": "base_model.model.transformer.wte.weight",
    "others": "base_model.model.model.embed_tokens.weight",
}
PEFT_HEAD = "base_model.model.lm_head.weight"


@pytest.mark.parametrize(
    ("family", "tied", "method"),
    [
        *((family, tied, "lora") for family in FAMILIES for tied in (False, True)),
        *(("llama", tied, method) for method in ("dora", "lokr") for tied in (False, True)),
    ],
)
def test_they_are_saved_with_the_adapters_and_merged(family: str, tied: bool, method: str, tmp_path: Path) -> None:
    base_of(family, tmp_path / "base", tie_word_embeddings=tied)
    spec = FAMILIES[family]
    plan = spec.shard_plan or UNSHARDED
    base = open_model(tmp_path / "base", FAMILIES)
    model = load_model(base, CpuBackend())
    config = section(method=method).adapter_config
    modules = adapted_modules(model, plan, None)
    in_full = full_modules(NAMES, plan, tied)
    add_adapters(model, modules, config, full_modules=in_full)
    trained = {name: p for name, p in model.named_parameters() if not p.stop_gradient}
    expected = [EMBEDDING] if tied else [EMBEDDING, OUTPUT]
    assert [name for name in trained if not is_factor(name)] == expected
    for name, parameter in trained.items():
        parameter.set_value(initial_values(1, name, parameter.shape, 0.2))
    values = {name: p.numpy() for name, p in model.named_parameters() if name in trained}
    specs = [TensorSpec(name, value.shape, "float32") for name, value in values.items()]
    metadata = Adapters(modules, config, Base(str(tmp_path / "base"), base.digest()), expected)
    (tmp_path / "adapter").mkdir()
    write_adapters(tmp_path / "adapter", metadata, spec, base.config, values.__getitem__, specs)

    stored = safetensors.numpy.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    table = stored[PEFT_NAMES.get(family, PEFT_NAMES["others"])]
    np.testing.assert_array_equal(table, values[EMBEDDING])
    head = values[EMBEDDING] if tied else values[OUTPUT].T
    np.testing.assert_array_equal(stored[PEFT_HEAD], head)
    keys = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    word = "wte" if family == "gpt" else "embed_tokens"
    assert keys["modules_to_save"] == ([word] if tied else [word, "lm_head"])
    assert keys.get("ensure_weight_tying", False) is tied
    assert keys["task_type"] == "CAUSAL_LM"

    saved = SavedAdapters(tmp_path / "adapter", metadata, spec, base.config)
    for name, value in values.items():
        assert saved.read(name).tobytes() == value.tobytes()
    index = slice(3, 7), slice(2, 9)
    for name in expected:
        np.testing.assert_array_equal(saved.read(name, index), values[name][index])

    merged = add_adapter(base, tmp_path / "adapter")
    for name in expected:
        np.testing.assert_array_equal(merged.read(name), values[name])
    model.eval()
    ours = model(paddle.to_tensor(IDS)).numpy()
    theirs = load_model(merged, CpuBackend())(paddle.to_tensor(IDS)).numpy()
    # the norms of linear attention amplify the rounding of outputs near zero
    limit = 5e-5 if family in LINEAR else 1e-5
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=limit * np.abs(ours).max())


def test_they_are_no_pair_of_factors(tmp_path: Path) -> None:
    """So `serve` does not serve such adapters together, and PaddleNLP has no place for them."""
    test_they_are_saved_with_the_adapters_and_merged("llama", False, "lora", tmp_path)
    base = open_model(tmp_path / "base", FAMILIES)
    with pytest.raises(UserError, match=r"its update of (model\.embed_tokens|lm_head)\.weight is no plain pair of"):
        AdaptedTensors(base, tmp_path / "adapter", allow_pickle=False).pairs()
    words = ["convert", str(tmp_path / "adapter"), "-o", str(tmp_path / "nlp"), "--layout", "paddlenlp"]
    assert main(words) != 0
    assert not (tmp_path / "nlp").exists()


def _train(directory: Path, registry: Registry, *words: str, steps: int = 1, resume: bool = False) -> Path:
    words = (
        f"--train.max_steps={steps}", "--data.eval=null", "--parallel={}", "--launch.num_devices=1",
        f"--output_dir={directory}", "--checkpoint.save_steps=1", "--train.warmup_ratio=0",
        "--train.lr_schedule=constant", *words,
    )  # fmt: skip
    plan = plan_run(ROOT / "recipes" / "llama" / "sft.json", words, registry, smoke=True)
    assert run(plan, registry, resume) == 0
    return directory / "checkpoints" / f"step-{steps}"


FULL = ("--lora.rank=4", '--lora.modules_to_save=["embed_tokens", "lm_head"]')
TIED = ("--model.config.tie_word_embeddings=true",)


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_step_is_that_of_the_full_model(tied: bool, tmp_path: Path, registry: Registry) -> None:
    """B starts at zero, so gradients of embedding and head are those of the model without adapters."""
    plain = ("--train.optimizer=sgd", "--train.max_grad_norm=1e9", *(TIED if tied else ()))
    fast = "--train.learning_rate=0.2"
    tying = ("--lora.ensure_weight_tying=true",) if tied else ()
    whole = open_model(_train(tmp_path / "whole", registry, *plain, fast), FAMILIES)
    first = open_model(_train(tmp_path / "frozen", registry, *plain, "--train.learning_rate=1e-30"), FAMILIES)
    step = _train(tmp_path / "own", registry, *plain, fast, *FULL, *tying)
    stored = safetensors.numpy.load_file(step / "adapter_model.safetensors")
    for ours, theirs in ((EMBEDDING, PEFT_NAMES["others"]), (OUTPUT, PEFT_HEAD)):
        name = EMBEDDING if tied else ours
        expected = whole.read(name) if name == EMBEDDING else whole.read(name).T
        before = first.read(name) if name == EMBEDDING else first.read(name).T
        change = np.abs(expected - before).max()
        assert change > 1e-3
        np.testing.assert_allclose(stored[theirs], expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_a_run_is_resumed_bit_by_bit(tmp_path: Path, registry: Registry) -> None:
    whole = _train(tmp_path / "whole", registry, *FULL, steps=2)
    expected = safetensors.numpy.load_file(whole / "adapter_model.safetensors")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-2")
    (tmp_path / "again" / "checkpoints" / "latest").write_text("step-1\n")
    found = safetensors.numpy.load_file(
        _train(tmp_path / "again", registry, *FULL, steps=2, resume=True) / "adapter_model.safetensors"
    )
    before = safetensors.numpy.load_file(whole.parent / "step-1" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
        assert (before[name] != value).any()


@pytest.mark.parametrize("stage", ["rm", "dpo"])
def test_other_stages_train_an_embedding_too(stage: str, tmp_path: Path, registry: Registry) -> None:
    words = (
        "--train.max_steps=1", "--data.eval=null", "--parallel={}", "--launch.num_devices=1", "--lora.rank=4",
        f"--output_dir={tmp_path}", '--lora.modules_to_save=["embed_tokens"]', "--train.warmup_ratio=0",
    )  # fmt: skip
    plan = plan_run(ROOT / "recipes" / "llama" / f"{stage}.json", words, registry, smoke=True)
    assert run(plan, registry, resume=False) == 0
    keys = json.loads((tmp_path / "checkpoints" / "step-1" / "adapter_config.json").read_text())
    expected = {"rm": ["embed_tokens", "score"], "dpo": ["embed_tokens"]}[stage]
    assert sorted(keys["modules_to_save"]) == expected
    assert keys["task_type"] == {"rm": "SEQ_CLS", "dpo": "CAUSAL_LM"}[stage]
