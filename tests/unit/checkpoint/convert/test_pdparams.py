"""PaddleNLP's files of ranks and fused matrices, cut and fused by PaddleNLP's own functions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.convert.sources import open_source
from llmsuite.checkpoint.fused import Heads, UnfusedTensors, fuse
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.inference.load import parameter_shapes
from tests.support import tiny_llama
from tests.support.tiny_llama import FAMILIES

# dimensions that two and three ranks can share, all of them different
CONFIG = dataclasses.replace(
    tiny_llama.CONFIG,
    vocab_size=30,
    hidden_size=48,
    intermediate_size=36,
    num_attention_heads=12,
    num_key_value_heads=6,
)


def paddlenlp_state(config: Any, fused: bool) -> dict[str, np.ndarray]:
    """The parameters as a PaddleNLP model with these settings holds them."""
    from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM

    state = {tiny_llama.to_paddlenlp(name): value for name, value in tiny_llama.values(config).items()}
    if fused:
        settings = LlamaConfig(**config.to_hf(), fuse_attention_qkv=True, fuse_attention_ffn=True)
        for (*parts, full), fn in LlamaForCausalLM._get_fuse_or_split_param_mappings(settings, is_fuse=True).items():
            state[f"llama.{full}"] = fn([state.pop(f"llama.{part}") for part in parts])
    return state


def save_ranks(directory: Path, config: Any, fused: bool = False, tp: int = 2, pp: int = 1) -> Path:
    """Save as PaddleNLP's trainer does for a model that was trained on tp x pp ranks."""
    from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM

    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    for rank in range(tp):
        flags = {"fuse_attention_qkv": fused, "fuse_attention_ffn": fused}
        settings = LlamaConfig(**config.to_hf(), tensor_parallel_degree=tp, tensor_parallel_rank=rank, **flags)
        actions = LlamaForCausalLM._get_tensor_parallel_mappings(settings, is_split=True)
        own: dict[str, Any] = {}
        for name, value in paddlenlp_state(config, fused).items():
            action = actions.get(name.removeprefix("llama."))
            own[name] = action(value) if action else value
        for stage in range(pp):
            suffix = "_".join([*([f"tp{rank:02d}"] if tp > 1 else []), *([f"pp{stage:02d}"] if pp > 1 else [])])
            mine = {n: paddle.to_tensor(v) for n, v in own.items() if pp == 1 or stage in stages_of(n, config)}
            paddle.save(mine, str(directory / f"model_state{'.' + suffix if suffix else ''}.pdparams"))
    return directory


def stages_of(name: str, config: Any) -> tuple[int, ...]:
    """Two pipeline stages of one layer each; a tied embedding is on both."""
    if "embed_tokens" in name:
        return (0, 1) if config.tie_word_embeddings else (0,)
    return (0,) if ".layers.0." in name else (1,)


def open_(directory: Path, **options: Any) -> ModelDirectory:
    return open_source(directory, FAMILIES, parameter_shapes, allow_pickle=True, **options)


def assert_is(model: ModelDirectory, config: Any) -> None:
    expected = tiny_llama.values(config)
    assert model.names == list(expected)
    for name, value in expected.items():
        assert np.array_equal(model.read(name), value), name
        half = [slice(n // 3, n // 3 + 1 + n // 2) for n in value.shape]
        assert np.array_equal(model.read(name, half), value[tuple(half)]), name


@pytest.mark.parametrize("fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_files_of_ranks_are_the_model(tmp_path: Path, fused: bool, tp: int, pp: int, tied: bool) -> None:
    config = tiny_llama.tied(CONFIG) if tied else CONFIG
    assert_is(open_(save_ranks(tmp_path / "ranks", config, fused, tp, pp)), config)


def test_tensors_that_cannot_be_sharded_are_replicated(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, vocab_size=31, num_key_value_heads=3)  # PaddleNLP cuts neither over 2 ranks
    assert_is(open_(save_ranks(tmp_path / "ranks", config)), config)


def test_pickles_need_allow_pickle(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--allow-pickle"):
        open_source(save_ranks(tmp_path / "ranks", CONFIG), FAMILIES, parameter_shapes)


def test_missing_ranks_are_listed(tmp_path: Path) -> None:
    directory = save_ranks(tmp_path / "ranks", CONFIG, tp=2, pp=2)
    (directory / "model_state.tp00_pp01.pdparams").unlink()
    with pytest.raises(UserError, match=r"1 of 4 ranks are missing: model_state\.tp00_pp01\.pdparams"):
        open_(directory)


def change(directory: Path, file: str, **changes: Any) -> None:
    """Load a file we have written, set (or with None remove) entries, save it."""
    state = paddle.load(str(directory / file))
    state.update({k.replace("__", "."): v for k, v in changes.items()})
    paddle.save({k: v for k, v in state.items() if v is not None}, str(directory / file))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lm_head__weight": None}, ["'lm_head.weight' is missing in tp01"]),
        ({"lm_head__weight": np.zeros((48, 14), "float32")}, ["parts of 'lm_head.weight' differ", "[48, 14]"]),
        ({"extra": np.zeros(3, "float32")}, ["1 tensors that a llama lacks: extra"]),
    ],
)
def test_ranks_that_do_not_fit_together(tmp_path: Path, changes: Mapping[str, Any], words: list[str]) -> None:
    directory = save_ranks(tmp_path / "ranks", CONFIG)
    change(directory, "model_state.tp01.pdparams", **changes)
    with pytest.raises(UserError) as caught:
        open_(directory)
    assert all(word in str(caught.value) for word in words), caught.value


def test_copies_of_a_tied_weight_have_to_agree(tmp_path: Path) -> None:
    directory = save_ranks(tmp_path / "ranks", tiny_llama.tied(CONFIG), tp=1, pp=2)
    embedding = tiny_llama.values(tiny_llama.tied(CONFIG))["model.embed_tokens.weight"]
    change(directory, "model_state.pp01.pdparams", llama__embed_tokens__weight=embedding * 2)
    with pytest.raises(UserError, match=r"differs from that in model_state\.pp00\.pdparams"):
        open_(directory)


def test_another_shape_than_that_of_the_config(tmp_path: Path) -> None:
    directory = save_ranks(tmp_path / "ranks", CONFIG)
    other = dataclasses.replace(CONFIG, intermediate_size=40)
    (directory / "config.json").write_text(json.dumps(other.to_hf()))
    with pytest.raises(UserError, match=r"gate_proj.weight' is \[48, 18\] in tp00; by config.json it is \[48, 40\]"):
        open_(directory)
    single = save_ranks(tmp_path / "single", CONFIG, tp=1)
    (single / "config.json").write_text(json.dumps(other.to_hf()))
    with pytest.raises(UserError, match=r"6 tensors have another shape: .*gate_proj.weight is \[48, 36\]"):
        open_(single)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1), (8, 2)])
def test_fusing_is_paddlenlps(heads: int, kv_heads: int) -> None:
    from paddlenlp.transformers.conversion_utils import fuse_param_func

    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(5, n * 3)).astype("float32") for n in (heads, kv_heads, kv_heads)]
    expected = fuse_param_func()(parts, is_qkv=True, num_heads=heads, num_key_value_heads=kv_heads)
    assert np.array_equal(fuse("llama.layers.0.self_attn.qkv_proj.weight", parts, Heads(heads, kv_heads)), expected)
    biases = [part[0] for part in parts]
    assert np.array_equal(fuse("x.qkv_proj.bias", biases, Heads(heads, kv_heads)), expected[0])
    assert np.array_equal(fuse("x.gate_up_fused_proj.weight", parts[1:], None), np.concatenate(parts[1:], axis=-1))


class OneMatrix:
    names = ("x.qkv_proj.weight",)
    paths = (Path("file"),)

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(name, (4, 13), "float32")


def test_heads_that_do_not_fit_a_fused_matrix() -> None:
    with pytest.raises(UserError, match="has 13 columns, which is no multiple of 8 heads"):
        UnfusedTensors(OneMatrix(), Heads(4, 2))  # type: ignore[arg-type]


def test_a_model_directory_with_numbered_files(tmp_path: Path) -> None:
    directory = save_ranks(tmp_path / "single", CONFIG, tp=1)
    state = paddle.load(str(directory / "model_state.pdparams"))
    (directory / "model_state.pdparams").unlink()
    for i in (1, 2):
        half = {name: value for j, (name, value) in enumerate(state.items()) if j % 2 == i - 1}
        paddle.save(half, str(directory / f"model_state-{i:05d}-of-00002.pdparams"))
    assert_is(open_(directory), CONFIG)
    (directory / "model_state-00002-of-00002.pdparams").unlink()
    with pytest.raises(UserError, match="files are missing: 2 of 2"):
        open_(directory)


def test_paddlenlp_loads_what_we_write(tmp_path: Path) -> None:
    """In its own layout and in HF's, single and fused; the logits are ours."""
    from paddlenlp.transformers import AutoModelForCausalLM

    from llmsuite.checkpoint.convert.rewrite import OutputFormat, Rewrite

    config = dataclasses.replace(CONFIG, head_dim=None)  # PaddleNLP derives it
    tiny_llama.write(tmp_path / "hf", config)
    ids = paddle.to_tensor([[1, 5, 7, 3, 18, 2]])
    expected = tiny_llama.model(config)(ids).numpy()
    source = open_model(tmp_path / "hf", FAMILIES)
    # a model with fused matrices wants both flags; with one of them PaddleNLP 3.0 beta 4 skips files it needs
    both = {"fuse_attention_qkv": True, "fuse_attention_ffn": True}
    for name, form, options in (
        ("single", OutputFormat("paddlenlp"), {}),
        ("fused", OutputFormat("paddlenlp", fused=True, max_file_bytes=20_000), both),
        ("again", OutputFormat("hf"), {"convert_from_torch": True}),
    ):
        Rewrite(source, form).write(tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(str(tmp_path / name), **options)
        model.eval()
        logits = model(input_ids=ids)
        logits = (logits[0] if isinstance(logits, tuple) else logits).numpy()
        assert np.abs(logits - expected).max() < 1e-5, name
        assert any("qkv_proj" in n for n in model.state_dict()) == (name == "fused")


@pytest.mark.parametrize("name", ["model_state-00001-of-9999999999", "model_state.tp99999999_pp99999999"])
def test_names_that_promise_very_many_files(tmp_path: Path, name: str) -> None:
    save_ranks(tmp_path / "a", CONFIG, tp=1)
    (tmp_path / "a" / "model_state.pdparams").rename(tmp_path / "a" / f"{name}.pdparams")
    with pytest.raises(UserError, match=r"by their names there are [0-9,]+ files; at most 65,536 are read"):
        open_(tmp_path / "a")
