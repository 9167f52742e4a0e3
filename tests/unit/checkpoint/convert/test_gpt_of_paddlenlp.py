"""GPT as PaddleNLP and PaddleFleetX save it, with weights and logits by PaddleNLP's own code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.checkpoint.model_dir import open_model
from llmsuite.cli.main import main
from tests.support.families import FAMILIES, load

SHAPE = {
    "vocab_size": 62,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 32,
}
IDS = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (2, 9))


@pytest.fixture(scope="module")
def theirs() -> Any:
    """PaddleNLP's model with random weights."""
    from paddlenlp.transformers import GPTConfig, GPTForCausalLM

    model = GPTForCausalLM(GPTConfig(**SHAPE, initializer_range=0.3))
    rng = np.random.default_rng(1)
    for name, parameter in model.named_parameters():
        parameter.set_value((rng.standard_normal(parameter.shape) * 0.3 + ("norm" in name)).astype("float32"))
    model.eval()
    return model


@pytest.fixture(scope="module")
def logits(theirs: Any) -> np.ndarray:
    with paddle.no_grad():
        found: np.ndarray = theirs(paddle.to_tensor(IDS)).numpy()
    return found


def assert_is(directory: Path, logits: np.ndarray) -> None:
    """The model of a directory gives these logits."""
    with paddle.no_grad():
        found = load(directory)(paddle.to_tensor(IDS)).numpy()
    assert np.abs(found - logits).max() <= 1e-5 * np.abs(logits).max()


def fused(theirs: Any, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The state with q, k and v in one matrix, by PaddleNLP's function."""
    from paddlenlp.transformers import GPTConfig, GPTForCausalLM

    settings = GPTConfig(**SHAPE, fuse_attention_qkv=True)
    result = dict(state)
    for (*parts, full), fn in GPTForCausalLM._get_fuse_or_split_param_mappings(settings, is_fuse=True).items():
        result[f"gpt.{full}"] = fn([result.pop(f"gpt.{part}") for part in parts])
    return result


def cut(state: Mapping[str, np.ndarray], rank: int, ranks: int, fuse: bool) -> dict[str, np.ndarray]:
    """The part of a tensor parallel rank, by PaddleNLP's function."""
    from paddlenlp.transformers import GPTConfig, GPTForCausalLM

    if ranks == 1:
        return dict(state)
    degree = {"tensor_parallel_degree": ranks, "tensor_parallel_rank": rank, "fuse_attention_qkv": fuse}
    actions = GPTForCausalLM._get_tensor_parallel_mappings(GPTConfig(**SHAPE, **degree))
    result = {}
    for name, value in state.items():
        key = name.removeprefix("gpt.").removeprefix("decoder.").removeprefix("embeddings.")
        result[name] = actions[key](value) if key in actions else value
    return result


def in_pipeline(name: str) -> tuple[str, int]:
    """The name of a parameter in PaddleFleetX's pipeline of two stages, and its stage."""
    name = name.removeprefix("gpt.")
    if name.startswith("embeddings."):
        return f"_layers.shared_layers.embed.{name.removeprefix('embeddings.')}", 0
    if name.startswith("decoder.norm."):
        return f"_layers.{SHAPE['num_hidden_layers'] + 1}.{name.removeprefix('decoder.')}", 1
    number, rest = name.removeprefix("decoder.layers.").split(".", 1)
    return f"_layers.{int(number) + 1}.{rest}", int(number)


def save(directory: Path, state: Mapping[str, np.ndarray], file: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    paddle.save({name: paddle.to_tensor(value) for name, value in state.items()}, str(directory / file))


def state_of(theirs: Any) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in theirs.state_dict().items() if not name.startswith("lm_head.")}


def test_safetensors_are_read_as_they_are(tmp_path: Path, theirs: Any, logits: np.ndarray) -> None:
    theirs.save_pretrained(str(tmp_path), safe_serialization=True)
    assert_is(tmp_path, logits)
    model = open_model(tmp_path, FAMILIES)
    assert "lm_head.weight" not in model.names
    query = model.read("model.layers.1.self_attn.q_proj.weight", [slice(3, 9), slice(2, 20)])
    assert np.array_equal(query, state_of(theirs)["gpt.decoder.layers.1.self_attn.q_proj.weight"][3:9, 2:20])


@pytest.mark.parametrize("command", ["merge", "import"])
@pytest.mark.parametrize("is_fused", [False, True], ids=["single", "fused"])
def test_one_file(
    tmp_path: Path, theirs: Any, logits: np.ndarray, is_fused: bool, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs.config.save_pretrained(str(tmp_path / "a"))
    state = state_of(theirs)
    save(tmp_path / "a", fused(theirs, state) if is_fused else state, "model_state.pdparams")
    words = [command, str(tmp_path / "a"), "-o", str(tmp_path / "b")]
    assert main(words) == 2
    assert "With --allow-pickle they are read" in capsys.readouterr().err
    assert main([*words, "--allow-pickle"]) == 0
    assert json.loads((tmp_path / "b" / "config.json").read_text())["model_type"] == "gpt2"
    assert_is(tmp_path / "b", logits)


@pytest.mark.parametrize("is_fused", [False, True], ids=["single", "fused"])
@pytest.mark.parametrize(("mp", "sharding", "pp"), [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 1, 2)])
def test_directories_of_ranks(
    tmp_path: Path, theirs: Any, logits: np.ndarray, is_fused: bool, mp: int, sharding: int, pp: int
) -> None:
    directory = tmp_path / "epoch_0_step_10"
    state = state_of(theirs)
    state = fused(theirs, state) if is_fused else state
    for rank in range(mp):
        own = cut(state, rank, mp, is_fused)
        for stage in range(pp):
            here = own
            if pp > 1:
                placed = {name: in_pipeline(name) for name in own}
                here = {name: own[old] for old, (name, at) in placed.items() if at == stage}
            if stage:  # the last stage also has the embedding module, of which only the words are trained
                words, positions = (f"gpt.embeddings.{kind}_embeddings.weight" for kind in ("word", "position"))
                here |= {in_pipeline(words)[0]: own[words], in_pipeline(positions)[0]: own[positions] * 2}
            for copy in range(sharding):
                save(directory / f"mp_{rank:02d}_sharding_{copy:02d}_pp_{stage:02d}", here, "model.pdparams")
    theirs.config.save_pretrained(str(tmp_path / "config"))
    words = ["merge", str(directory), "--config", str(tmp_path / "config"), "-o", str(tmp_path / "b"), "--allow-pickle"]
    assert main(words) == 0
    assert_is(tmp_path / "b", logits)


def test_one_directory_of_many_ranks_is_refused(
    tmp_path: Path, theirs: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs.config.save_pretrained(str(tmp_path / "a"))
    for rank in range(2):
        state = cut(state_of(theirs), rank, 2, fuse=False)
        save(tmp_path / f"a/mp_{rank:02d}_sharding_00_pp_00", state, "model.pdparams")
    words = ["-o", str(tmp_path / "b"), "--allow-pickle"]
    assert main(["merge", str(tmp_path / "a/mp_01_sharding_00_pp_00"), *words]) == 2
    assert "is one of 2 ranks; name the directory above" in capsys.readouterr().err
    (tmp_path / "a/mp_00_sharding_00_pp_00/model.pdparams").unlink()
    assert main(["merge", str(tmp_path / "a"), *words]) == 2
    assert "model.pdparams of 1 ranks are missing: mp_00_sharding_00_pp_00" in capsys.readouterr().err


@pytest.mark.parametrize(("key", "value"), [("hidden_activation", "relu"), ("normalize_before", False)])
def test_another_computation_is_refused(key: str, value: Any) -> None:
    from llmsuite.base.errors import UserError

    with pytest.raises(UserError, match=f"{key} is {value!r}; the gpt family has"):
        FAMILIES["gpt"].config_cls.from_hf({"model_type": "gpt", key: value})
