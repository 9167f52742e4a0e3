"""`llmsuite calibrate`: a model that is stored in 4 bits as it was written, and nearer to the one it was made of."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from llmsuite.checkpoint.model_dir import open_model
from llmsuite.cli.main import main
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.load import load_model
from llmsuite.models.block_quant import block_format
from tests.support import tiny_llama
from tests.support.tiny_llama import FAMILIES
from tests.support.written_family import write_family

CONFIG = dataclasses.replace(
    tiny_llama.CONFIG, vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16
)
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PRECISIONS = ("nf4", "int4")
TEXT = "The cat sat on the mat, and 12 birds sang of it. What did they sing? Nobody knows. " * 40


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("calibrate")
    tiny_llama.write(found / "model", CONFIG, tokenizer=tiny_llama.TOKENIZER)
    (found / "texts.txt").write_text(TEXT)
    words = ["--texts", str(found / "texts.txt"), "--max_length", "32", "--windows", "20"]
    for precision in PRECISIONS:
        target = ["-o", str(found / precision), "--precision", precision]
        assert main(["calibrate", str(found / "model"), *words, *target]) == 0
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_its_layers_are_stored_without_another_error(place: Path, precision: str) -> None:
    before, after = (open_model(place / name, FAMILIES) for name in ("model", precision))
    assert before.names == after.names
    for name in after.names:
        value = after.read(name)
        if name.split(".")[-2] not in LAYERS:
            kept = before.read(name).astype("float16" if precision == "int4" else "float32")
            assert np.array_equal(value, kept), "all else is as it was"
            continue
        form = block_format(precision, len(value))
        assert np.array_equal(form.rounded(value), value), name
        assert not np.array_equal(form.rounded(before.read(name)), value), name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_its_states_are_nearer_than_those_of_plain_rounding(place: Path, precision: str) -> None:
    tokens = TextTokenizer(place / "model").encode(TEXT[7:])
    ids = paddle.to_tensor(np.asarray(tokens[: 4 * 24], "int64").reshape(4, 24))

    def logits(name: str, rounds: bool = False) -> np.ndarray:
        model = load_model(open_model(place / name, FAMILIES), CpuBackend())
        for part, parameter in model.named_parameters():
            if rounds and part.split(".")[-2] in LAYERS:
                parameter.set_value(block_format(precision, parameter.shape[0]).rounded(parameter.numpy()))
        with paddle.no_grad():
            hidden, _ = model.decode_step(ids, paddle.zeros([4], "int64"), None)
            return np.asarray(model.logits(hidden).numpy())

    exact = logits("model")
    plain, calibrate_model = (np.square(found - exact).mean() for found in (logits("model", True), logits(precision)))
    assert 0 < calibrate_model < 0.8 * plain


def test_a_checkpoint_of_gptq_is_stored_answers_and_is_converted(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((place / "int4" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "gptq"
    assert (config["quantization_config"]["group_size"], config["torch_dtype"]) == (64, "float16")
    words = ["-o", str(tmp_path / "fp32"), "--layout", "hf", "--dtype", "fp32"]
    assert main(["convert", str(place / "int4"), *words]) == 0
    places = (place / "int4", tmp_path / "fp32")
    ours, plain = (open_model(path, FAMILIES) for path in places)
    assert all(np.array_equal(ours.read(name), plain.read(name)) for name in ours.names)
    assert "quantization_config" not in json.loads((tmp_path / "fp32" / "config.json").read_text())
    for precision in ("fp32", "int4"):
        answers = []
        for path in places:
            command = ["generate", str(path), "--raw", "--prompt", "The cat", "--max_new_tokens", "8"]
            output = tmp_path / f"{path.name}-{precision}.jsonl"
            assert main([*command, "--precision", precision, "--output", str(output)]) == 0
            answers.append(json.loads(output.read_text())["answers"][0]["ids"])
        assert answers[0] == answers[1]
        assert len(answers[0]) == 8
    tiny_llama.write(
        tmp_path / "odd", dataclasses.replace(CONFIG, intermediate_size=96), tokenizer=tiny_llama.TOKENIZER
    )
    words = ["-o", str(tmp_path / "none"), "--texts", str(place / "texts.txt"), "--precision", "int4"]
    assert main(["calibrate", str(tmp_path / "odd"), *words]) == 2
    assert "outputs that are a multiple of 8; here inputs are 64, 96. Choose nf4" in capfd.readouterr().err


@pytest.mark.parametrize("precision", ["nf4", "int4"])
@pytest.mark.parametrize("family", ["gpt", "qwen_moe", "deepseek"])
def test_layers_of_another_kind_are_refused(
    family: str, precision: str, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = write_family(tmp_path / "model", family)
    texts = str(place / "texts.txt")
    words = ["-o", str(tmp_path / "none"), "--texts", texts, "--precision", precision]
    assert main(["calibrate", str(model), *words]) == 2
    assert f"models of this kind are not calibrated ({family})" in capfd.readouterr().err


def test_what_is_refused(place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    texts = ["--texts", str(place / "texts.txt")]
    (tmp_path / "short.txt").write_text("Hi")
    for words, message in (
        ([str(place / "model"), "-o", str(place / "model"), *texts], "exists; choose another --output"),
        (
            [str(place / "model"), "-o", str(tmp_path / "none"), "--texts", str(tmp_path / "short.txt")],
            "tokens; one window of --max_length 64 needs more",
        ),
    ):
        assert main(["calibrate", *words]) == 2
        assert message in capfd.readouterr().err
    assert not (tmp_path / "none").exists()
