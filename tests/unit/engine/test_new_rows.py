"""New tokens: rows of the embedding and columns of the head, their initial values, and the adapters with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.convert.adapter import add_adapter
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.engine.trainer import run
from llmsuite.engine.weights import read_from, with_more_rows
from llmsuite.models.head import EMBEDDING, OUTPUT
from llmsuite.recipe.resolve import plan_run
from tests.support.adapter_models import base_of
from tests.support.families import FAMILIES
from tests.support.paths import DATA, ROOT

ROWS = 544
FULL = ("--lora.rank=4", '--lora.modules_to_save=["embed_tokens", "lm_head"]')


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    directory = tmp_path_factory.mktemp("new_rows") / "base"
    base_of("llama", directory)
    return open_model(directory, FAMILIES)


def test_added_rows_are_the_mean_of_the_others(base: ModelDirectory) -> None:
    width = base.config.hidden_size
    shapes = {EMBEDDING: (ROWS, width), OUTPUT: (width, ROWS)}
    read = with_more_rows(read_from(base), base, shapes)
    size = base.config.vocab_size
    for name, shape in shapes.items():
        full = read(name, shape, [slice(0, length) for length in shape])
        rows = full if name == EMBEDDING else full.T
        stored = base.read(name) if name == EMBEDDING else base.read(name).T
        np.testing.assert_array_equal(rows[:size], stored)
        expected = np.broadcast_to(stored.astype("float64").mean(axis=0), rows[size:].shape)
        np.testing.assert_allclose(rows[size:], expected, rtol=1e-6)
        for first, last in ((0, 7), (size - 3, size + 5), (size + 1, ROWS)):
            index = [slice(first, last), slice(2, 9)]
            if name == OUTPUT:
                index.reverse()
            np.testing.assert_array_equal(read(name, shape, index), full[tuple(index)])
    norm = "model.norm.weight"
    np.testing.assert_array_equal(read(norm, (width,), [slice(0, width)]), base.read(norm))


def _plan(base: ModelDirectory, directory: Path, registry: Registry, *words: str) -> Any:
    words = (
        f"--model.weights={base.path}", f"--model.tokenizer={DATA / 'tokenizer'}", "--train.max_steps=1",
        "--data.eval=null", "--parallel={}", "--launch.num_devices=1", f"--output_dir={directory}",
        "--checkpoint.save_steps=1", "--train.warmup_ratio=0", "--train.lr_schedule=constant",
        "--train.global_batch_size=4", "--train.micro_batch_size=4", "--data.max_length=64",
        "--device=cpu", "--engine.precision=fp32", "--model.preset=null", *words,
    )  # fmt: skip
    return plan_run(ROOT / "recipes" / "llama" / "sft.json", words, registry)


def test_an_adapter_with_new_tokens_is_trained_merged_and_read(
    base: ModelDirectory, tmp_path: Path, registry: Registry
) -> None:
    new = (
        '--model.new_tokens=["User", "<call>"]',
        '--model.new_special_tokens=["<|tool|>"]',
        f"--model.vocab_size={ROWS}",
    )
    assert run(_plan(base, tmp_path / "run", registry, *FULL, *new), registry, resume=False) == 0
    adapter = tmp_path / "run" / "checkpoints" / "step-1"
    stored = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    table = stored["base_model.model.model.embed_tokens.weight"]
    assert table.shape == (ROWS, base.config.hidden_size)
    assert stored["base_model.model.lm_head.weight"].shape == table.shape
    tokenizer = TextTokenizer(adapter)
    assert [tokenizer.token_id(text) for text in ("User", "<call>", "<|tool|>")] == [512, 513, 514]

    assert main(["merge", str(adapter), "-o", str(tmp_path / "merged")]) == 0
    merged = open_model(tmp_path / "merged", FAMILIES)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["vocab_size"] == ROWS
    np.testing.assert_array_equal(merged.read(EMBEDDING), table)
    np.testing.assert_array_equal(merged.read(OUTPUT).T, stored["base_model.model.lm_head.weight"])
    assert TextTokenizer(tmp_path / "merged").vocab_size == 515
    for name in base.names:
        if name not in (EMBEDDING, OUTPUT):
            assert merged.read(name).shape == base.read(name).shape


def test_a_full_model_is_saved_with_its_new_rows(base: ModelDirectory, tmp_path: Path, registry: Registry) -> None:
    words = ('--model.new_tokens=["<call>"]', f"--model.vocab_size={ROWS}")
    assert run(_plan(base, tmp_path / "run", registry, *words), registry, resume=False) == 0
    saved = open_model(tmp_path / "run" / "checkpoints" / "step-1", FAMILIES)
    assert saved.config.vocab_size == ROWS
    assert saved.read(EMBEDDING).shape[0] == ROWS


def _of_peft(base: ModelDirectory, directory: Path, *saved: str) -> dict[str, np.ndarray]:
    """Write an adapter of a resized model as PEFT 0.21.2 does, with these modules trained in full; returns its
    tensors."""
    random = np.random.default_rng(0)
    module = "base_model.model.model.layers.0.mlp.down_proj"
    size = base.spec("model.layers.0.mlp.down_proj.weight").shape
    tensors = {
        f"{module}.lora_A.weight": np.ones([2, size[0]], "f4"),
        f"{module}.lora_B.weight": np.ones([size[1], 2], "f4"),
    }
    for name in saved:
        of_rows = random.normal(size=[2, ROWS, base.config.hidden_size]).astype("f4")
        tensors[f"base_model.model.{name}.original_module.weight"] = of_rows[0]
        for between in ("", ".modules_to_save"):
            tensors[f"base_model.model.{name}{between}.weight"] = of_rows[1]
    safetensors.numpy.save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "modules_to_save": [*saved]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return tensors


def test_an_adapter_of_peft_with_more_rows_is_merged(base: ModelDirectory, tmp_path: Path) -> None:
    tensors = _of_peft(base, tmp_path, "model.embed_tokens", "lm_head")
    merged = add_adapter(base, tmp_path)
    assert merged.config.vocab_size == ROWS
    np.testing.assert_array_equal(merged.read(EMBEDDING), tensors["base_model.model.model.embed_tokens.weight"])
    np.testing.assert_array_equal(merged.read(OUTPUT).T, tensors["base_model.model.lm_head.weight"])
    part = slice(500, 530), slice(3, 9)
    np.testing.assert_array_equal(merged.read(EMBEDDING, part), merged.read(EMBEDDING)[part])


def test_an_adapter_with_a_larger_embedding_alone_is_refused(base: ModelDirectory, tmp_path: Path) -> None:
    _of_peft(base, tmp_path, "model.embed_tokens")
    with pytest.raises(UserError, match="but it has no head with as many; save both with modules_to_save"):
        add_adapter(base, tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (['--model.new_tokens=["<a>"]', *FULL], "model.new_tokens: the tokenizer has 513 tokens with them, more than"),
        (["--model.vocab_size=500"], "model.vocab_size: is 500, fewer than the 512 rows of the weights"),
        (
            [f"--model.vocab_size={ROWS}", "--lora.rank=4", '--lora.modules_to_save=["lm_head"]'],
            "model.vocab_size: is set, but embed_tokens would stay frozen; name them in lora.modules_to_save",
        ),
        (['--model.new_tokens=["<a>", "<a>"]'], "model.new_tokens: has '<a>' twice; name it once"),
        (['--model.new_special_tokens=[" "]'], "model.new_special_tokens: has ' '; a token has a text"),
    ],
)
def test_rows_that_are_missing_or_not_trained_are_refused(
    base: ModelDirectory, tmp_path: Path, registry: Registry, words: list[str], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        run(_plan(base, tmp_path, registry, *words), registry, resume=False)
    assert message in str(caught.value)
