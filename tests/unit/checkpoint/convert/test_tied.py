"""A tied model has one matrix for the embedding and the head: what changes one of the two is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.convert.adapter import add_adapter
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.model_writer import write_model
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.cli.main import main
from llmsuite.models.head import EMBEDDING
from tests.support import tiny_llama
from tests.support.tiny_llama import FAMILIES
from tests.support.written_family import write_family

TIED = tiny_llama.tied(tiny_llama.CONFIG)
ROWS = TIED.vocab_size
WIDTH = TIED.hidden_size
PLAIN = "base_model.model.model.layers.0.self_attn.q_proj"
TABLE = "base_model.model.model.embed_tokens"
HEAD = "base_model.model.lm_head"


def base(directory: Path, config: Any = TIED) -> Path:
    tiny_llama.write(directory, config)
    return directory


def adapter(directory: Path, tensors: Any, **keys: Any) -> Path:
    """A LoRA of one matrix of a layer, and what else there is."""
    directory.mkdir()
    own = {f"{PLAIN}.lora_A.weight": np.ones([2, WIDTH], "f4"), f"{PLAIN}.lora_B.weight": np.ones([16, 2], "f4")}
    safetensors.numpy.save_file({**own, **tensors}, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], **keys}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def table(add: float = 0.0) -> np.ndarray:
    return tiny_llama.values(TIED)[EMBEDDING] + np.float32(add)


ONES = np.ones([2, ROWS], "f4"), np.ones([WIDTH, 2], "f4")
LORA_TABLE = {f"{TABLE}.lora_embedding_A": ONES[0], f"{TABLE}.lora_embedding_B": ONES[1]}
LORA_HEAD = {f"{HEAD}.lora_A.weight": ONES[1].T.copy(), f"{HEAD}.lora_B.weight": ONES[0].T.copy()}
LOKR_TABLE = {f"{TABLE}.lokr_w1": np.ones([1, 1], "f4"), f"{TABLE}.lokr_w2": np.ones([ROWS, WIDTH], "f4")}
SAVES_TABLE = {"modules_to_save": ["embed_tokens"]}
SAVES_HEAD = {"modules_to_save": ["lm_head"]}
BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}
TABLE = f"{TABLE}.weight"
HEAD = f"{HEAD}.weight"


@pytest.mark.parametrize(
    ("tensors", "keys"),
    [
        ({TABLE: table(1)}, SAVES_TABLE),
        ({TABLE: table(1)}, {"modules_to_save": ["model.embed_tokens"], "ensure_weight_tying": False}),
        ({TABLE.replace(".weight", ".modules_to_save.default.weight"): table(1)}, {}),
        ({HEAD: table(1)}, SAVES_HEAD),
        ({HEAD: table(1)}, {**SAVES_HEAD, "ensure_weight_tying": True}),
        ({TABLE: table(1), HEAD: table(2)}, BOTH),
        ({TABLE: table(1), HEAD: table()}, SAVES_TABLE),
        ({TABLE: table(1), HEAD: table(2)}, {**BOTH, "ensure_weight_tying": True}),
        (LORA_TABLE, {}),
        (LORA_HEAD, {}),
        ({**LORA_TABLE, TABLE.replace(".weight", ".lora_magnitude_vector"): np.ones(WIDTH, "f4")}, {"use_dora": True}),
        (LOKR_TABLE, {}),
        ({f"{HEAD.removesuffix('.weight')}.lokr_w1": np.ones([1, 1], "f4")}, {}),
    ],
)
def test_an_adapter_of_one_side_of_a_tied_model_is_refused(tmp_path: Path, tensors: Any, keys: Any) -> None:
    model = open_model(base(tmp_path / "base"), FAMILIES)
    with pytest.raises(UserError, match=r"one matrix for both \(tie_word_embeddings\)"):
        add_adapter(model, adapter(tmp_path / "adapter", tensors, **keys))


@pytest.mark.parametrize(
    ("tensors", "keys", "expected"),
    [
        ({TABLE: table(1)}, {**SAVES_TABLE, "ensure_weight_tying": True}, 1),
        ({TABLE: table(1), HEAD: table(1)}, {}, 1),
        ({TABLE: table(1), HEAD: table(1)}, BOTH, 1),
        ({TABLE: table(), HEAD: table()}, {}, 0),
        ({TABLE: table()}, SAVES_TABLE, 0),
        ({HEAD: table()}, SAVES_HEAD, 0),
    ],
)
def test_an_adapter_of_both_sides_alike_is_merged(tmp_path: Path, tensors: Any, keys: Any, expected: float) -> None:
    found = add_adapter(open_model(base(tmp_path / "base"), FAMILIES), adapter(tmp_path / "adapter", tensors, **keys))
    np.testing.assert_array_equal(found.read(EMBEDDING), table(expected))


def test_a_model_with_two_matrices_gets_one_of_them(tmp_path: Path) -> None:
    config = dataclasses.replace(TIED, tie_word_embeddings=False)
    model = open_model(base(tmp_path / "base", config), FAMILIES)
    found = add_adapter(model, adapter(tmp_path / "adapter", {TABLE: table(1)}, **SAVES_TABLE))
    np.testing.assert_array_equal(found.read(EMBEDDING), table(1))
    np.testing.assert_array_equal(found.read("lm_head.weight"), model.read("lm_head.weight"))


@pytest.mark.parametrize("family", ["gpt", "ernie", "qwen"])
def test_other_families_are_looked_at_by_their_own_names(tmp_path: Path, family: str) -> None:
    directory = write_family(tmp_path / "base", family, tie_word_embeddings=True)
    model = open_model(directory, FAMILIES)
    (stored,) = model.tensors[EMBEDDING].names
    module = stored.removesuffix(".weight")
    matrices = [n for n in model.names if ".layers." in n and len(model.spec(n).shape) == 2]
    target = next(n for n in matrices if model.tensors[n].num_parts == 1)
    (name,), shape = model.tensors[target].names, model.spec(target).shape
    plain = f"base_model.model.{name.removesuffix('.weight')}"
    tensors = {f"{plain}.lora_A.weight": np.ones([2, shape[0]], "f4")}
    tensors |= {f"{plain}.lora_B.weight": np.ones([shape[1], 2], "f4")}
    tensors |= {f"base_model.model.{stored}": model.read(EMBEDDING) + 1}
    own = tmp_path / "adapter"
    own.mkdir()
    safetensors.numpy.save_file(tensors, own / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "modules_to_save": [module.rpartition(".")[2]]}
    (own / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="tie_word_embeddings"):
        add_adapter(model, own)


# full checkpoints


def with_head(directory: Path, head: np.ndarray, layout: Any = "hf", config: Any = TIED) -> Path:
    """A tied model whose files have the head too."""
    values = tiny_llama.values(config)
    specs = [TensorSpec(name, value.shape, "float32") for name, value in values.items()]
    directory.mkdir()
    write_model(directory, FAMILIES["llama"], config, values.__getitem__, specs, layout)
    path = next(directory.glob("model-*.safetensors"))
    index = next(directory.glob("*.index.json"))
    stored = {**safetensors.numpy.load_file(path), "lm_head.weight": np.ascontiguousarray(head)}
    safetensors.numpy.save_file(stored, path)
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = path.name
    index.write_text(json.dumps(content))
    (directory / "manifest.json").unlink(missing_ok=True)
    return directory


@pytest.mark.parametrize("layout", ["hf", "paddlenlp"])
@pytest.mark.parametrize("rotate_keys", [False, True])
def test_a_head_that_is_the_embedding_again_is_fine(tmp_path: Path, layout: Any, rotate_keys: bool) -> None:
    directory = with_head(tmp_path / "model", table().T if rotate_keys else table(), layout)
    found = open_model(directory, FAMILIES)
    np.testing.assert_array_equal(found.read(EMBEDDING), table())
    np.testing.assert_array_equal(found.read(EMBEDDING, [slice(3, 7), slice(2, 5)]), table()[3:7, 2:5])


def test_a_head_in_fewer_bits_is_the_embedding_again(tmp_path: Path) -> None:
    import ml_dtypes

    directory = with_head(tmp_path / "model", table().astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(open_model(directory, FAMILIES).read(EMBEDDING), table())


@pytest.mark.parametrize("words", ["--layout hf", "--layout paddlenlp", "--layout hf --dtype bf16"])
def test_another_head_is_refused_whatever_is_made_of_it(
    tmp_path: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    head = table()
    head[5, 3] += 1
    directory = with_head(tmp_path / "model", head)
    assert main(["convert", str(directory), "-o", str(tmp_path / "out"), *words.split()]) == 2
    output = capsys.readouterr().err
    assert "'lm_head.weight' [19, 24] differs from 'model.embed_tokens.weight' [19, 24]" in output
    assert "tie_word_embeddings" in output
    assert not (tmp_path / "out").exists()
    model = open_model(directory, FAMILIES)
    np.testing.assert_array_equal(model.read(EMBEDDING, [slice(0, 5), slice(0, 24)]), table()[:5])
    with pytest.raises(UserError, match="differs"):
        model.read(EMBEDDING, [slice(4, 6), slice(0, 24)])


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    directory = with_head(tmp_path / "model", np.zeros([ROWS + 1, WIDTH], "f4"))
    with pytest.raises(UserError, match="differs from"):
        open_model(directory, FAMILIES).read(EMBEDDING)
