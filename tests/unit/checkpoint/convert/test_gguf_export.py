"""A model that was written as GGUF is read back as the same model."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from llmsuite.base.errors import UserError
from llmsuite.base.files import broken_file
from llmsuite.checkpoint.convert.gguf import import_gguf
from llmsuite.checkpoint.convert.gguf_export import GgufExport
from llmsuite.checkpoint.convert.gguf_types import DTYPES, tensor_type
from llmsuite.checkpoint.model_dir import ModelDirectory, open_model
from llmsuite.cli.main import main
from llmsuite.data.chat_template import load_template
from llmsuite.data.rows import Message
from llmsuite.data.tokenizer import TextTokenizer
from tests.support.families import CASES, FAMILIES, read_config
from tests.support.gguf_cases import K_SHAPE, SHAPES, SPLITS, export, write_case, write_tokenizer

GROUPED = "llama/grouped_query"
TEXTS = ("hello 1234 World's\n\n  café <|im_end|>x", "日本語  \t|| it'll", "a\u0301 e", "")


def back(path: Path) -> ModelDirectory:
    """The model that our reader makes of a GGUF file."""
    directory = path.with_suffix("")
    directory.mkdir()
    import_gguf(path, directory, FAMILIES)
    return open_model(directory, FAMILIES)


def refusal(model: ModelDirectory, dtype: str = "fp16") -> str:
    with pytest.raises(UserError) as caught:
        export(model, model.path.parent / "refused.gguf", dtype)
    return str(caught.value)


def rotate_keys(name: str, value: np.ndarray) -> np.ndarray:
    return value.T if FAMILIES["llama"].names().is_linear(name) else value


@pytest.mark.parametrize("case", SHAPES)
def test_the_same_model_is_read_back(tmp_path: Path, case: str) -> None:
    model = write_case(tmp_path / "source", case)
    found = back(export(model, tmp_path / "model.gguf"))
    # fields without a counterpart in GGUF are for training, or stored in another form
    ignored = {"initializer_range": 0.02, "kept": None, "model_type": "", "head_dim": 1}
    ignored |= {"bos_token_id": 1, "pad_token_id": 0}  # those of the tokenizer
    ours, theirs = (dataclasses.asdict(m.config) | ignored for m in (model, found))
    assert (ours, model.config.head_size) == (theirs, found.config.head_size)
    assert found.config.rope_frequencies() == model.config.rope_frequencies()
    assert found.names == model.names
    for name in model.names:
        assert np.array_equal(found.read(name), model.read(name)), name


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in ("fp32", "q4_k_m")])
def test_matrices_are_those_of_the_dtype(tmp_path: Path, dtype: str) -> None:
    model = write_case(tmp_path / "source", "llama/llama3_rope", intermediate_size=72)
    found = back(export(model, tmp_path / "model.gguf", dtype))
    kinds = gguf.GGMLQuantizationType
    for name in model.names:
        value = np.ascontiguousarray(rotate_keys(name, model.read(name)))
        kind = kinds[DTYPES[dtype]]
        if name in ("model.embed_tokens.weight", "lm_head.weight") and dtype in ("q5_1", "q4_1"):
            kind = kinds.Q8_0
        if name.endswith("down_proj.weight") and dtype.startswith("q"):
            kind = kinds.F16  # 72 is no multiple of the block
        near = dequantize(quantize(value, kind), kind).reshape(value.shape) if value.ndim > 1 else value
        assert np.array_equal(rotate_keys(name, found.read(name)), near), name
        assert value.ndim == 1 or not np.array_equal(near, value)


def kinds_of(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("tied", [False, True])
def test_the_mixture_of_q4_k_m(tmp_path: Path, tied: bool) -> None:
    """Layers, of 8, whose values and down projections get more bits from llama-quantize."""
    model = write_case(tmp_path / "source", GROUPED, tie_word_embeddings=tied, **K_SHAPE)
    path = export(model, tmp_path / "model.gguf", "q4_k_m")
    found = kinds_of(path)
    for layer in range(8):
        for part in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
            assert found[f"blk.{layer}.{part}.weight"] == "Q4_K"
        for part in ("attn_v", "ffn_down"):
            assert (found[f"blk.{layer}.{part}.weight"] == "Q6_K") == (layer in (0, 3, 6, 7)), layer
        assert found[f"blk.{layer}.attn_norm.weight"] == "F32"
    assert found["token_embd.weight"] == ("Q6_K" if tied else "Q4_K")
    assert found.get("output.weight") == (None if tied else "Q6_K")
    assert gguf.GGUFReader(path).fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    assert path.stat().st_size < 0.3 * export(model, tmp_path / "half.gguf", "fp16").stat().st_size + 100_000
    read = back(path)
    for name in model.names:
        value = model.read(name)
        near = read.read(name)
        assert np.abs(near - value).max() <= 0.15 * np.abs(value).max(), name


def test_the_values_of_70b_get_more_bits() -> None:
    family = FAMILIES["llama"]
    config = family.config_cls.from_hf({**read_config(GROUPED), "num_hidden_layers": 80})
    of_values = {tensor_type("Q4_K_M", f"blk.{n}.attn_v.weight", 256, config, False) for n in range(80)}
    of_down = {tensor_type("Q4_K_M", f"blk.{n}.ffn_down.weight", 256, config, False) for n in range(80)}
    assert (of_values, of_down) == ({"Q5_K", "Q6_K"}, {"Q4_K", "Q6_K"})
    small = dataclasses.replace(config, num_hidden_layers=79)
    assert tensor_type("Q4_K_M", "blk.10.attn_v.weight", 256, small, False) == "Q4_K"


def test_rows_that_are_no_multiple_of_256(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2}
    found = GgufExport(write_case(tmp_path / "source", GROUPED, **shape), "q4_k_m")
    kinds = {tensor.theirs: tensor.kind.name for tensor in found.tensors}
    assert (kinds["blk.0.attn_q.weight"], kinds["output.weight"]) == ("Q5_0", "Q8_0")
    assert kinds["blk.0.ffn_down.weight"] == "F16", "nor of 32"
    assert found.remarks == [
        "16 of 16 matrices have rows of 24, 64, 72, which is no multiple of 256: these are Q5_0, Q8_0 or F16, as "
        "llama.cpp does"
    ]


def test_the_library_of_k_quants_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_case(tmp_path / "model", GROUPED)
    monkeypatch.setitem(sys.modules, "libgguf", None)
    assert "--dtype q4_k_m needs the package libgguf; install it with: pip install" in refusal(model, "q4_k_m")
    export(model, tmp_path / "model.gguf", "q4_1")


@pytest.mark.parametrize("split", SPLITS)
def test_the_same_tokenizer_is_read_back(tmp_path: Path, split: str) -> None:
    model = write_case(tmp_path / "source", GROUPED, split)
    found = back(export(model, tmp_path / "model.gguf"))
    ours = TextTokenizer(model.path)
    theirs = TextTokenizer(found.path)
    assert [theirs.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    assert (theirs.vocab_size, theirs.control_tokens) == (ours.vocab_size, ours.control_tokens)
    assert theirs.special_tokens == {k: v for k, v in ours.special_tokens.items() if k != "unk_token"}
    talk = [Message("system", "s"), Message("user", "u")]
    texts = [
        load_template("tokenizer", t.directory, t.special_tokens).render(talk, add_generation_prompt=True)
        for t in (ours, theirs)
    ]
    assert texts[0] == texts[1]
    assert "<|im_start|>user\nu" in texts[0]


def test_splittings_differ(tmp_path: Path) -> None:
    """Else the test above would hold for any of them."""
    found = {}
    for split in SPLITS:
        write_tokenizer(tmp_path / split, split)
        found[split] = [TextTokenizer(tmp_path / split).encode(text) for text in TEXTS]
    assert found["qwen2"] != found["smollm"]


def test_a_token_in_front_of_each_text(tmp_path: Path) -> None:
    model = write_case(tmp_path / "source", GROUPED)
    bos = "<|im_start|>"
    single = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    begin = {"type": "TemplateProcessing", "single": single, "pair": single}
    begin["special_tokens"] = {bos: {"id": bos, "ids": [1], "tokens": [bos]}}
    write_tokenizer(model.path, post_processor={"type": "Sequence", "processors": [begin]})
    export(model, tmp_path / "model.gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True
    found = back(tmp_path / "model.gguf").path / "tokenizer.json"
    assert json.loads(found.read_text(encoding="utf-8"))["post_processor"]["single"] == single


def test_families_and_shapes_without_a_form_in_gguf(tmp_path: Path) -> None:
    gpt = write_case(tmp_path / "gpt", next(case for case in CASES if case.startswith("gpt/")))
    assert "is a gpt; GGUF can be written only for families" in refusal(gpt)
    yarn = write_case(tmp_path / "yarn", "qwen/qwen2_yarn")
    assert "rope_scaling is of type 'yarn'" in refusal(yarn)
    assert "has a window (sliding_window 5)" in refusal(write_case(tmp_path / "window", "llama/mistral_window"))
    model = write_case(tmp_path / "model", GROUPED)
    assert "has a score head" in refusal(
        dataclasses.replace(model, config=dataclasses.replace(model.config, head="score"))
    )
    assert "interventions or prefixes" in refusal(dataclasses.replace(model, side_adapter=object()))
    assert not (tmp_path / "refused.gguf").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder": {"type": "WordPiece"}}, "is a BPE tokenizer with decoder WordPiece"),
        ({"model": {"type": "Unigram", "vocab": []}}, "is a Unigram tokenizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "splits text like none of default, gpt-2, llama-bpe"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer Lowercase"),
        ({"added_tokens": [{"content": "<x>", "id": 600, "special": True}]}, "a token with the id 600"),
        ({"added_tokens": [{"content": "<x>"}]}, "is no tokenizer of the library"),
        ({"model": 3}, "is no tokenizer of the library"),
    ],
)
def test_a_tokenizer_without_a_form_in_gguf(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    model = write_case(tmp_path / "model", GROUPED)
    write_tokenizer(model.path, **change)
    assert message in refusal(model)
    (model.path / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal(model)


def test_values_too_large_for_fp16_are_named(tmp_path: Path) -> None:
    model = write_case(tmp_path / "model", GROUPED)
    values = {name: model.read(name) * np.float32(1e6) for name in model.names}
    changed = dataclasses.replace(model)
    changed.read = lambda name, index=None: values[name]  # type: ignore[method-assign]
    assert "'model.embed_tokens.weight' has values too large for fp16; use --dtype bf16" in refusal(changed)
    export(changed, tmp_path / "wide.gguf", "bf16")


QUERIES = "model.layers.0.self_attn.q_proj.weight"


def with_queries(path: Path, value: float) -> ModelDirectory:
    """A model whose first queries are all made of one number."""
    model = write_case(path, "llama/llama3_rope")
    changed = dataclasses.replace(model)

    def read(name: str, index: Any = None) -> np.ndarray:
        return np.full_like(model.read(name), value) if name == QUERIES else model.read(name)

    changed.read = read  # type: ignore[method-assign]
    return changed


@pytest.mark.parametrize("dtype", ["q8_0", "q5_1", "q4_1", "q4_k_m"])
@pytest.mark.parametrize("odd", [1e9, float("nan"), float("inf")])
def test_values_beyond_the_scales_of_blocks_are_named(tmp_path: Path, dtype: str, odd: float) -> None:
    found = refusal(with_queries(tmp_path / "model", odd), dtype)
    assert f"{QUERIES!r} has values that are not finite, or too large for the scales of Q" in found
    assert "use --dtype bf16" in found


def test_values_that_eight_bits_have_scales_for(tmp_path: Path) -> None:
    """127 steps of a scale in fp16 exceed the range of fp16."""
    found = back(export(with_queries(tmp_path / "model", 8e6), tmp_path / "wide.gguf", "q8_0"))
    np.testing.assert_allclose(found.read(QUERIES).astype("float32"), 8e6, rtol=1e-3)


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    target = tmp_path / "target"
    write_case(source, "qwen/qwen3")
    assert main(["convert", str(source), "-o", str(target), "--layout", "gguf"]) == 0
    assert "qwen3, 25 tensors" in capfd.readouterr().out
    assert sorted(path.name for path in target.iterdir()) == ["Modelfile", "manifest.json", "model.gguf"]
    assert broken_file(target) is None
    assert (target / "Modelfile").read_text(encoding="utf-8").startswith("FROM ./model.gguf\nTEMPLATE ")
    assert main(["import", str(target / "model.gguf"), "-o", str(tmp_path / "back")]) == 0
    assert main(["import", str(target), "-o", str(tmp_path / "none")]) == 2
    assert f"`llmsuite import {target / 'model.gguf'} -o DIR`" in capfd.readouterr().err
    small = ["merge", str(source), "-o", str(tmp_path / "small"), "--layout", "gguf", "--dtype", "q8_0"]
    assert main(small) == 0
    capfd.readouterr()
    for options, message in (
        (["hf", "--dtype", "q8_0"], "--dtype q8_0: is a dtype of GGUF; add --layout gguf"),
        (["gguf", "--dtype", "fp8"], "--dtype fp8: GGUF has no such dtype"),
        (["gguf", "--split-num", "2"], "--split-num: a GGUF model is one file"),
    ):
        assert main(["convert", str(source), "-o", str(tmp_path / "none"), "--layout", *options]) == 2
        assert message in capfd.readouterr().err


def test_the_disk_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = GgufExport(write_case(tmp_path / "model", GROUPED))
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": found.num_bytes - 1}))
    target = tmp_path / "target"
    assert main(["convert", str(tmp_path / "model"), "-o", str(target), "--layout", "gguf"]) == 2
    assert f"{target}: needs 0.0 GB" in capfd.readouterr().err
    assert not target.exists()
