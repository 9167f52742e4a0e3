"""ReFT, prefixes and VeRA between llmsuite and PaddleNLP's own classes, in both directions, by the same logits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.adapters.layers.reft import chosen_tokens
from llmsuite.base.errors import UserError
from llmsuite.checkpoint.convert.paddle_save import write_pickle
from llmsuite.checkpoint.convert.paddlenlp_prefix import rotate_keys
from llmsuite.checkpoint.convert.pdparams import PickledTensors
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.cli.main import main
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.load import load_model, open_any
from llmsuite.models.initial_values import initial_values
from llmsuite.models.token_context import tokens
from tests.support.adapter_models import IDS, adapted, base_of, section, write
from tests.support.families import FAMILIES

RANK = 3
LAYERS = (0, 2)
PREFIX = 3
PROMPTS = np.array([5, 4])[:, None].repeat(5, 1)
PLACES = [[0, 3, 4], [0, 2, 3]]
"""The tokens that `f1+l2` names in prompts of these lengths."""
LIMIT = 1e-5


@pytest.fixture(scope="module", params=["llama"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in our layout and in PaddleNLP's."""
    directory = tmp_path_factory.mktemp(request.param) / "base"
    base_of(request.param, directory)
    assert main(["convert", str(directory), "-o", f"{directory}-nlp", "--layout", "paddlenlp"]) == 0
    return directory


def of_paddlenlp(base: Path) -> Any:
    """PaddleNLP's own model."""
    from paddlenlp.transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(f"{base}-nlp", dtype="float32")
    model.eval()
    return model


def fill(layer: Any, seed: int, std: float = 0.4) -> None:
    """Random parameters, all of them."""
    for name, parameter in layer.named_parameters():
        parameter.set_value(initial_values(seed, name, parameter.shape, std))


def convert(source: Path, target: Path, layout: str, base: Path) -> Path:
    words = ["--config", str(base), *["--allow-pickle"] * (layout == "hf")]
    assert main(["convert", str(source), "-o", str(target), "--layout", layout, *words]) == 0
    return target


def ours(directory: Path, base: Path) -> np.ndarray:
    """Logits of our model with what is in a directory."""
    source = open_any(directory, FAMILIES, base=base, allow_pickle=True, runs=True)
    model = load_model(source, CpuBackend())
    with tokens(chosen_tokens(paddle.to_tensor(PROMPTS), None, (1, 2))):
        return np.asarray(model(paddle.to_tensor(IDS)).numpy())


def near(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=LIMIT * np.abs(expected).max())


def plain(base: Path) -> np.ndarray:
    return np.asarray(load_model(open_model(base, FAMILIES), CpuBackend())(paddle.to_tensor(IDS)).numpy())


# ReFT


def reft_of_paddlenlp(base: Path, kind: str) -> Any:
    """PaddleNLP's model with random interventions, whose R is not orthonormal."""
    from paddlenlp.peft.reft import LoreftIntervention, ReFTConfig, ReFTModel, TinyIntervention

    model = of_paddlenlp(base)
    params = {"embed_dim": model.config.hidden_size, "low_rank_dimension": RANK, "dropout": 0.0, "dtype": "float32"}
    chosen = {"loreft": LoreftIntervention, "tiny": TinyIntervention}[kind]
    representations = []
    for number in LAYERS:
        intervention = chosen(**params)
        fill(intervention, number)
        keys = {"layer": number, "component": "block_output", "low_rank_dimension": RANK}
        representations.append({**keys, "intervention": intervention})
    return ReFTModel(ReFTConfig(representations, params, position="f1+l2"), model)


def reft_logits(model: Any) -> np.ndarray:
    places = np.array(PLACES)[:, None].repeat(len(LAYERS), 1)  # [B, layers, places]
    for intervention, _ in model.interventions.values():
        intervention.eval()
    with paddle.no_grad():
        found = model(input_ids=paddle.to_tensor(IDS), intervention_locations=paddle.to_tensor(places))
    return np.asarray((found[0] if isinstance(found, tuple) else found).numpy())


@pytest.mark.xfail(
    sys.version_info >= (3, 12), reason="paddlenlp 3.0.0b4's ReFTConfig cannot be saved there", raises=UnboundLocalError
)
@pytest.mark.parametrize("kind", ["loreft", "tiny"])
def test_interventions_of_paddlenlp_and_back(base: Path, tmp_path: Path, kind: str) -> None:
    from paddlenlp.peft.reft import ReFTModel

    theirs = reft_of_paddlenlp(base, kind)
    expected = reft_logits(theirs)
    assert np.abs(expected - plain(base)).max() > 100 * LIMIT * np.abs(expected).max(), "it changes something"
    theirs.save_pretrained(str(tmp_path / "theirs"))
    near(ours(tmp_path / "theirs", base), expected)
    near(ours(convert(tmp_path / "theirs", tmp_path / "ours", "hf", base), base), expected)
    convert(tmp_path / "ours", tmp_path / "back", "paddlenlp", base)
    near(reft_logits(ReFTModel.from_pretrained(str(tmp_path / "back"), of_paddlenlp(base))), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"act_fn": "relu"}, "act_fn is 'relu'; only linear interventions"),
        ({"position": None}, "position is None; it has to give the tokens"),
        ({"layer": 9}, "its interventions are of another model: model.layers.9"),
        ({"width": 7}, "its interventions are of another model: model.layers.0"),
        ({"short": 1}, "their shapes do not match"),
        ({"rank": 2}, r"ranks .2, 3.; all layers need the same rank"),
        ({"name": "weight"}, "interventions of PaddleNLP have rotate_layer.weight"),
    ],
)
def test_other_interventions_are_refused(base: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    size = open_model(base, FAMILIES).config.hidden_size
    for number in (0, change.get("layer", 1)):
        width = change.get("width", size)
        rank = change.get("rank", RANK) if number else RANK
        values = {
            change.get("name", "rotate_layer.weight"): np.ones((width, rank), "f4"),
            "learned_source.weight": np.ones((width, rank), "f4"),
            "learned_source.bias": np.ones(rank - change.get("short", 0), "f4"),
        }
        write_pickle(tmp_path / f"intkey_layer.{number}.bin", values)
    config = {"intervention_params": {"act_fn": change.get("act_fn")}, "position": change.get("position", "f1+l2")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        ours(tmp_path, base)


# prefixes


def prefix_of_paddlenlp(base: Path, is_projected: bool) -> Any:
    from paddlenlp.peft.prefix import PrefixConfig, PrefixModelForCausalLM, llama_postprocess_past_key_value

    model = of_paddlenlp(base)
    config = open_model(base, FAMILIES).config
    keys = {
        "num_prefix_tokens": PREFIX,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "multi_query_group_num": config.num_key_value_heads,
        "prefix_projection": is_projected,
        "prefix_projection_hidden_size": 7 if is_projected else None,
    }
    found = PrefixModelForCausalLM(model, PrefixConfig(**keys), llama_postprocess_past_key_value)
    fill(found.prefix_encoder, 5)
    found.eval()
    return found


def prefix_logits(model: Any) -> np.ndarray:
    with paddle.no_grad():
        found = model(input_ids=paddle.to_tensor(IDS))
    return np.asarray((found[0] if isinstance(found, tuple) else found).numpy())


@pytest.mark.parametrize("is_projected", [False, True])
def test_prefixes_of_paddlenlp_and_back(base: Path, tmp_path: Path, is_projected: bool) -> None:
    from paddlenlp.peft.prefix import PrefixModelForCausalLM, llama_postprocess_past_key_value

    theirs = prefix_of_paddlenlp(base, is_projected)
    expected = prefix_logits(theirs)
    assert np.abs(expected - plain(base)).max() > 100 * LIMIT * np.abs(expected).max(), "it changes something"
    theirs.save_pretrained(str(tmp_path / "theirs"))
    near(ours(tmp_path / "theirs", base), expected)
    near(ours(convert(tmp_path / "theirs", tmp_path / "ours", "hf", base), base), expected)
    convert(tmp_path / "ours", tmp_path / "back", "paddlenlp", base)
    back = PrefixModelForCausalLM.from_pretrained(
        of_paddlenlp(base), str(tmp_path / "back"), llama_postprocess_past_key_value
    )
    back.eval()
    near(prefix_logits(back), expected)
    assert back.prefix_config.prefix_projection == is_projected
    before, after = (model.prefix_encoder.state_dict() for model in (theirs, back))
    assert before.keys() == after.keys()
    assert len(after) == (5 if is_projected else 1)
    for name, value in after.items():
        near(value.numpy(), before[name].numpy())
    caches = [np.load(tmp_path / name / "pre_caches.npy") for name in ("theirs", "back")]
    np.testing.assert_allclose(caches[1], caches[0], rtol=0, atol=1e-5 * np.abs(caches[0]).max())


def test_a_rotated_key_has_the_same_products(base: Path) -> None:
    config = open_model(base, FAMILIES).config
    query, key = initial_values(0, "qk", [2, config.head_size], 1.0).astype("float64")
    for at in (0, 5):
        found = rotate_keys(query, config, at + 3) @ rotate_keys(key, config, 3)
        assert found == pytest.approx(rotate_keys(query, config, at) @ key, abs=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": None}, "num_attention_heads is None; a whole number"),
        ({"num_hidden_layers": 7}, "gives keys and values"),
        ({"prefix_projection": True}, "has 0.weight, not 0.weight, 1.weight"),
        ({"file": "prefix_model_state.tp00.pdparams"}, "tp00.pdparams are parts of ranks"),
        ({"family": "gpt"}, "PaddleNLP has prefix tuning for llama, mistral, qwen2, and the model is a gpt2"),
    ],
)
def test_other_prefixes_are_refused(base: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    model = base
    if "family" in change:
        base_of(change["family"], tmp_path / "model")
        model = tmp_path / "model"
    config = open_model(base, FAMILIES).config
    keys = {"num_prefix_tokens": 2, "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    (tmp_path / "prefix").mkdir()
    (tmp_path / "prefix" / "prefix_config.json").write_text(json.dumps({**keys, **change}))
    file = change.get("file", "prefix_model_state.pdparams")
    write_pickle(tmp_path / "prefix" / file, {"0.weight": np.ones((2, 16), "f4")})
    assert config.hidden_size != 8
    with pytest.raises(UserError, match=message):
        ours(tmp_path / "prefix", model)


# VeRA


def vera_logits(model: Any) -> np.ndarray:
    model.eval()
    with paddle.no_grad():
        found = model(paddle.to_tensor(IDS))
    return np.asarray((found[0] if isinstance(found, tuple) else found).numpy())


def test_vera_of_paddlenlp_is_merged(base: Path, tmp_path: Path) -> None:
    from paddlenlp.peft import VeRAConfig, VeRAModel

    config = VeRAConfig(r=RANK, vera_alpha=6, target_modules=[".*q_proj", ".*down_proj"])
    theirs = VeRAModel(of_paddlenlp(base), config)
    for name, parameter in theirs.model.state_dict().items():
        if not parameter.stop_gradient:  # norms and embeddings too: PaddleNLP freezes only what it wraps
            random = initial_values(2, name, parameter.shape, 0.3)
            parameter.set_value(random if "vera_" in name else parameter + 0.1 * random)
    theirs.save_pretrained(str(tmp_path / "theirs"), save_model_config=False)
    expected = vera_logits(theirs)
    words = ["--base", str(base), "--allow-pickle"]
    assert main(["merge", str(tmp_path / "theirs"), "-o", str(tmp_path / "merged"), *words]) == 0
    near(plain(tmp_path / "merged"), expected)
    assert np.abs(expected - plain(base)).max() > 100 * LIMIT * np.abs(expected).max(), "it changes something"


def test_vera_is_written_for_paddlenlp(base: Path, tmp_path: Path) -> None:
    from paddlenlp.peft import LoRAModel, VeRAModel

    lora = section(method="vera", rslora=True)
    model, modules = adapted("llama", base, lora)
    write(tmp_path / "run", model, modules, lora, base)
    expected = np.asarray(model(paddle.to_tensor(IDS)).numpy())
    assert main(["convert", str(tmp_path / "run"), "-o", str(tmp_path / "nlp"), "--layout", "paddlenlp"]) == 0
    near(vera_logits(VeRAModel.from_pretrained(of_paddlenlp(base), str(tmp_path / "nlp"))), expected)
    near(vera_logits(LoRAModel.from_pretrained(of_paddlenlp(base), str(tmp_path / "nlp"))), expected)
    assert main(["merge", str(tmp_path / "nlp"), "-o", str(tmp_path / "merged")]) == 0
    near(plain(tmp_path / "merged"), expected)


@pytest.mark.parametrize("rank", [RANK, 64])
def test_lokr_is_written_for_paddlenlp(base: Path, tmp_path: Path, rank: int) -> None:
    from paddlenlp.peft import LoKrModel

    lora = section(method="lokr", rank=rank, alpha=3.0)
    model, modules = adapted("llama", base, lora)
    write(tmp_path / "run", model, modules, lora, base)
    expected = np.asarray(model(paddle.to_tensor(IDS)).numpy())
    assert main(["convert", str(tmp_path / "run"), "-o", str(tmp_path / "nlp"), "--layout", "paddlenlp"]) == 0
    near(vera_logits(LoKrModel.from_pretrained(of_paddlenlp(base), str(tmp_path / "nlp"))), expected)
    assert main(["merge", str(tmp_path / "nlp"), "-o", str(tmp_path / "merged"), "--allow-pickle"]) == 0
    near(plain(tmp_path / "merged"), expected)
    assert np.abs(expected - plain(base)).max() > 100 * LIMIT * np.abs(expected).max(), "it changes something"


@pytest.mark.parametrize("layout", ["hf", "paddlenlp"])
def test_mora_has_no_other_layout(base: Path, tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    lora = section(method="mora")
    model, modules = adapted("llama", base, lora)
    write(tmp_path / "run", model, modules, lora, base)
    assert main(["convert", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--layout", layout]) == 2
    assert "adapters of MORA have no other layout; merge them" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pissa_init": True}, "pissa_init is on"),
        ({"drop": "vera_A"}, "q_proj has no vera_A; PaddleNLP saves only trained parameters"),
        ({"size": 4}, "vera_d' is .4., which does not match"),
        ({"vera_alpha": None}, "lora_alpha is None; a number is needed"),
    ],
)
def test_incomplete_vera_is_refused(base: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    size = open_model(base, FAMILIES).config.hidden_size
    shapes = {"A": (size, RANK), "B": (RANK, size), "d": (change.get("size", RANK),), "b": (size,)}
    values = {f"llama.layers.0.self_attn.q_proj.vera_{kind}": np.ones(of, "f4") for kind, of in shapes.items()}
    values = {name: value for name, value in values.items() if not name.endswith(change.get("drop", "none"))}
    write_pickle(tmp_path / "vera_model_state.pdparams", values)
    (tmp_path / "vera_config.json").write_text(json.dumps({"r": RANK, "vera_alpha": 6, **change}))
    with pytest.raises(UserError, match=message):
        ours(tmp_path, base)


# pickles


def test_a_written_pickle_is_read_by_paddle_and_by_us(tmp_path: Path) -> None:
    values = {"a": np.arange(6, dtype="f4").reshape(2, 3), "b": initial_values(0, "b", [4], 1.0).astype("bfloat16")}
    write_pickle(tmp_path / "x.pdparams", values)
    found = paddle.load(str(tmp_path / "x.pdparams"))
    files = PickledTensors([tmp_path / "x.pdparams"])
    np.testing.assert_array_equal(found["a"].numpy(), values["a"])
    for name, value in values.items():
        assert files.read(name).dtype == value.dtype
        assert files.read(name).tobytes() == value.tobytes()


@pytest.mark.parametrize("file", ["intkey_layer.0.bin", "prefix_config.json"])
def test_pickles_are_read_only_with_allow_pickle(
    base: Path, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).write_text("{}")
    assert main(["merge", str(tmp_path), "-o", str(tmp_path / "merged"), "--base", str(base)]) == 2
    assert "nothing to merge or export" in capsys.readouterr().err
    words = ["generate", str(tmp_path), "--prompt", "a", "--base", str(base)]
    assert main(words) == 2
    assert "is a pickle. With --allow-pickle" in capsys.readouterr().err
