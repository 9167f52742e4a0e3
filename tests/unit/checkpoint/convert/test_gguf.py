"""A GGUF file, as llama.cpp writes it, becomes the model and the tokenizer it was made of."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import paddle
import pytest
from gguf.quants import dequantize, quantize

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.convert.gguf import import_gguf
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.data.chat_template import load_template
from llmsuite.data.rows import Message
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.load import load_model
from llmsuite.models.dense_names import GGUF_NAMES as names
from tests.support import tiny_llama
from tests.support.gguf_files import CONFIG, TOKENS, write_gguf
from tests.support.tiny_llama import FAMILIES


def imported(tmp_path: Path, layout: Any = "hf", **options: Any) -> Path:
    source = write_gguf(tmp_path / "model.gguf", **options)
    directory = tmp_path / "model"
    directory.mkdir(exist_ok=True)
    import_gguf(source, directory, FAMILIES, layout)
    return directory


def refusal(tmp_path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        imported(tmp_path, **options)
    assert str(tmp_path / "model.gguf") in str(caught.value)
    return str(caught.value)


def test_every_end_is_kept(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(0)
        writer.add_eom_token_id(5)

    found = imported(tmp_path, more=more)
    assert open_model(found, FAMILIES).config.eos_token_id == [2, 0, 5]
    assert TextTokenizer(found).stop_token_ids() == {2, 0, 5}


@pytest.mark.parametrize("layout", ["hf", "paddlenlp"])
def test_logits_are_those_of_the_source(tmp_path: Path, layout: str) -> None:
    source = open_model(imported(tmp_path, layout), FAMILIES)
    expected = dataclasses.replace(CONFIG, bos_token_id=1, eos_token_id=2)
    assert (source.config, source.layout) == (expected, layout)
    for name, value in tiny_llama.values(CONFIG).items():
        assert np.array_equal(source.read(name), value), name
    ids = paddle.to_tensor([[5, 80, 2, 33, 1, 99, 7]])
    with paddle.no_grad():
        logits = load_model(source, CpuBackend())(ids).numpy()
        assert np.abs(logits - tiny_llama.model(CONFIG)(ids).numpy()).max() <= 1e-5
    assert logits.std() > 0.1


def test_a_file_without_output_projection_is_tied(tmp_path: Path) -> None:
    source = open_model(imported(tmp_path, change=lambda tensors: tensors.pop("output.weight")), FAMILIES)
    assert source.config.tie_word_embeddings
    assert "lm_head.weight" not in source.names


def test_quantised_weights_are_read_as_their_values(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, hidden_size=32, intermediate_size=64, head_dim=8)
    kind = gguf.GGMLQuantizationType.Q8_0
    source = open_model(imported(tmp_path, config=config, kind=kind), FAMILIES)
    for name, value in tiny_llama.values(config).items():
        # blocks lie along the inputs, so the order of the outputs plays no part
        stored = np.ascontiguousarray(value.T if names.is_linear(name) else value)
        near = dequantize(quantize(stored, kind), kind).reshape(stored.shape) if value.ndim > 1 else stored
        assert np.array_equal(source.read(name), near.T if names.is_linear(name) else near), name


def test_fields_a_converter_may_leave_out(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, num_key_value_heads=4, hidden_size=16)
    skip = ("head_count_kv", "key_length", "freq_base", "chat_template", "bos", "pad")
    source = open_model(imported(tmp_path, config=config, skip=skip), FAMILIES)
    assert (source.config.num_key_value_heads, source.config.head_size) == (4, 4)
    assert (source.config.rope_theta, source.config.bos_token_id) == (10000.0, None)
    assert TextTokenizer(source.path).pad_id == 2


def test_the_tokenizer_is_the_one_of_the_file(tmp_path: Path) -> None:
    directory = imported(tmp_path)
    tokenizer = TextTokenizer(directory)
    assert tokenizer.vocab_size == len(TOKENS)
    assert [tokenizer.token_id(token) for token in TOKENS] == list(range(len(TOKENS)))
    assert tokenizer.special_tokens == {"bos_token": TOKENS[1], "eos_token": TOKENS[2], "pad_token": TOKENS[0]}

    def pieces(text: str) -> list[str]:
        return [TOKENS[i] for i in tokenizer.encode(text)]

    assert pieces("hello wo") == ["hello", "\u0120w", "o"]
    assert pieces("<|im_start|>he<|im_end|>") == ["<|im_start|>", "he", "<|im_end|>"]
    assert pieces("12") == ["1", "2"], "smollm: every digit stands alone"
    assert pieces("a<tool>b") == ["a", "<tool>", "b"], "a token of the user's is not split"
    assert tokenizer.decode(tokenizer.encode("<|im_start|>\u4e16 hello<tool>")) == "\u4e16 hello<tool>"
    template = load_template("tokenizer", directory, tokenizer.special_tokens)
    assert template.render([Message("user", "hello")]) == "<|im_start|>hello"


def test_gpt2_merges_digits(tmp_path: Path) -> None:
    directory = imported(tmp_path, skip=("pre",), more=lambda writer: writer.add_tokenizer_pre("gpt-2"))
    assert TextTokenizer(directory).encode("12") == [TOKENS.index("12")]


def test_linear_scaling_is_kept_and_others_are_refused(tmp_path: Path) -> None:
    def scale(kind: gguf.RopeScalingType) -> Callable[[gguf.GGUFWriter], None]:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_scaling_type(kind)
            writer.add_rope_scaling_factor(4.0)

        return add

    for name in ("linear", "yarn"):
        (tmp_path / name).mkdir()
    source = open_model(imported(tmp_path / "linear", more=scale(gguf.RopeScalingType.LINEAR)), FAMILIES)
    assert source.config.rope_frequencies() == [f / 4 for f in CONFIG.rope_frequencies()]
    assert "'yarn' is not supported" in refusal(tmp_path / "yarn", more=scale(gguf.RopeScalingType.YARN))


def test_rotary_factors_are_not_dropped_silently(tmp_path: Path) -> None:
    def factors(value: float) -> Callable[[dict[str, np.ndarray]], None]:
        return lambda tensors: tensors.update({"rope_freqs.weight": np.asarray([1, value], "float32")})

    for name in ("ones", "scaled"):
        (tmp_path / name).mkdir()
    imported(tmp_path / "ones", change=factors(1))
    assert "rope_freqs.weight" in refusal(tmp_path / "scaled", change=factors(8))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    assert "architecture 'gemma' is not supported; supported: llama" in refusal(tmp_path, architecture="gemma")


@pytest.mark.parametrize(("key", "value"), [("model", "llama"), ("pre", "tekken")])
def test_a_tokenizer_that_is_not_supported(tmp_path: Path, key: str, value: str) -> None:
    message = refusal(tmp_path, skip=(key,), more=lambda writer: getattr(writer, f"add_tokenizer_{key}")(value))
    assert repr(value) in message
    assert "smollm" in message


@pytest.mark.parametrize("field", ["embedding_length", "rms_epsilon", "tokens", "merges", "token_type"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    assert f"lacks the field {'tokenizer.ggml' if field in ('tokens', 'merges', 'token_type') else 'llama'}." in (
        refusal(tmp_path, skip=(field,))
    )


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.0.attn_q.bias"] = tensors.pop("blk.1.ffn_up.weight")[0]

    message = refusal(tmp_path, change=change)
    assert "missing tensors ['model.layers.1.mlp.up_proj.weight']" in message
    assert "unexpected ['model.layers.0.self_attn.q_proj.bias']" in message


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = [content[:n] for n in (0, 3, 4, 20, 24, 100, 1000, len(content) // 2, len(content) - 100)]
    for i, text in enumerate([*cut, b"PK\3\4" + bytes(100), b"GGUF" + b"\xff" * 100, content[:4] + bytes(100)]):
        (tmp_path / "model.gguf").write_bytes(text)
        with pytest.raises(UserError, match=r"model\.gguf: "):
            import_gguf(tmp_path / "model.gguf", tmp_path / f"none{i}", FAMILIES)
    with pytest.raises(UserError, match=r"absent\.gguf: is not a readable GGUF file"):
        import_gguf(tmp_path / "absent.gguf", tmp_path, FAMILIES)


def counts(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.gguf: is not a readable GGUF file: it ") as caught:
        import_gguf(path, path.parent / "none", FAMILIES)
    return str(caught.value)


@pytest.mark.parametrize("order", ["<", ">"])
def test_counts_that_no_file_has(tmp_path: Path, order: str) -> None:
    path = tmp_path / "model.gguf"
    version = b"GGUF" + struct.pack(order + "I", 3)

    def header(num_tensors: int, num_fields: int) -> bytes:
        return version + struct.pack(order + "QQ", num_tensors, num_fields)

    def field(kind: int, more: bytes) -> bytes:
        return header(0, 1) + struct.pack(order + "QcI", 1, b"a", kind) + more

    follow = r"says that 1,099,511,627,776 values follow"
    assert follow in counts(path, header(1 << 40, 0) + bytes(99))
    assert follow in counts(path, header(0, 1 << 40) + bytes(99))
    assert follow in counts(path, field(9, struct.pack(order + "IQ", 4, 1 << 40) + bytes(99)))
    assert follow in counts(path, field(9, struct.pack(order + "IQ", 8, 1 << 40) + bytes(99)))
    assert "ends within its header" in counts(path, field(8, struct.pack(order + "Q", 1 << 40) + bytes(99)))
    assert "has a field of type 77" in counts(path, field(77, bytes(99)))
    nested = struct.pack(order + "IQ", 9, 1) * 9
    assert "has arrays in arrays in arrays" in counts(path, field(9, nested + bytes(99)))
    assert "has more than 4,194,304" in counts(path, field(9, struct.pack(order + "IQ", 0, 5 << 20) + bytes(5 << 20)))
    tensor = struct.pack(order + "QcI", 1, b"t", 1 << 30)
    assert "has a tensor with 1,073,741,824 dims" in counts(path, header(1, 0) + tensor + bytes(99))


def test_a_shape_that_no_model_has(tmp_path: Path) -> None:
    def layers(count: Any) -> Callable[[gguf.GGUFWriter], Any]:
        return lambda writer: writer.add_uint32("llama.block_count", count)

    assert "num_hidden_layers: Input should be less than or equal to 10000" in refusal(
        tmp_path, skip=("block_count",), more=layers(100_000_000)
    )
    assert "num_hidden_layers: Input should be a valid integer" in refusal(
        tmp_path, skip=("block_count",), more=lambda writer: writer.add_string("llama.block_count", "two")
    )
    assert "a field of its shape is none" in refusal(
        tmp_path, skip=("rms_epsilon",), more=lambda w: w.add_string("llama.attention.layer_norm_rms_epsilon", "x")
    )
    assert "its tokenizer fields are invalid" in refusal(
        tmp_path, skip=("merges",), more=lambda writer: writer.add_array("tokenizer.ggml.merges", [1, 2])
    )
    assert "its tokenizer fields are invalid" in refusal(
        tmp_path, skip=("bos",), more=lambda writer: writer.add_uint32("tokenizer.ggml.bos_token_id", 1 << 30)
    )


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.1.ffn_up.weight", "token_embd.weight"])
def test_dims_are_those_of_the_fields(tmp_path: Path, name: str) -> None:
    def change(found: dict[str, np.ndarray]) -> None:
        found[name] = np.concatenate([found[name], found[name]])

    output = refusal(tmp_path, change=change)
    assert f"1 tensors have another shape: {name} is [" in output
    assert "by the fields of the file it is [" in output
