"""llama.cpp answers with a GGUF file as llmsuite does with its source: the same tokens and log-probabilities."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import xllamacpp

from llmsuite.checkpoint.convert.gguf import import_gguf
from llmsuite.checkpoint.convert.gguf_types import DTYPES, quantised
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.generate import Generator
from llmsuite.inference.load import load_model
from llmsuite.inference.sampling import Sampling
from tests.support.families import FAMILIES
from tests.support.gguf_cases import K_SHAPE, SHAPES, SPLITS, export, write_case

PROMPTS = ("Hello 1234 World's end,\n\n  it'll  be", "日本語 and cafés", "a")
COUNT = 12


def answers(path: Path, banned: list[int]) -> list[dict[str, Any]]:
    """Greedy continuations of each prompt by llama.cpp."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 512
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.verbosity = -1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it has sums in fp16
    server = xllamacpp.Server(params)
    bias = [[token, False] for token in banned]
    options = {"n_predict": COUNT, "temperature": 0, "logprobs": 1, "logit_bias": bias}
    return [server.handle_completions({"prompt": prompt, **options}) for prompt in PROMPTS]


def compare(directory: Path, path: Path, tolerance: float) -> None:
    """Raises AssertionError unless both give the same tokens, with log-probabilities that differ by no more."""
    tokenizer = TextTokenizer(directory)
    decoder = ModelDecoder(load_model(open_model(directory, FAMILIES), CpuBackend()))
    generator = Generator(decoder, tokenizer, stop_ids=set())
    # its server leaves out tokens that are incomplete characters, and ends at some
    banned = [token for token in range(520) if token >= tokenizer.vocab_size or "\ufffd" in tokenizer.decode([token])]
    banned += [token for token in range(tokenizer.vocab_size) if not tokenizer.decode([token])]
    sampling = Sampling(max_new_tokens=COUNT, num_logprobs=0, logit_bias=tuple((token, -100) for token in banned))
    for prompt, theirs in zip(PROMPTS, answers(path, banned)):
        ids = tokenizer.encode(prompt)
        ((ours,),) = generator.answers([ids], sampling)
        tokens = theirs["choices"][0]["logprobs"]["content"][:COUNT]
        assert theirs["usage"]["prompt_tokens"] == len(ids), prompt
        assert [token["id"] for token in tokens] == list(ours.ids), prompt
        for token, kept in zip(tokens, ours.logprobs):
            assert abs(token["logprob"] - kept.logprob) <= tolerance, (prompt, token)


@pytest.mark.parametrize("case", SHAPES)
def test_every_shape(tmp_path: Path, case: str) -> None:
    model = write_case(tmp_path / "source", case)
    compare(model.path, export(model, tmp_path / "model.gguf"), 1e-4)


@pytest.mark.parametrize("split", SPLITS)
def test_every_splitting(tmp_path: Path, split: str) -> None:
    model = write_case(tmp_path / "source", "llama/grouped_query", split)
    compare(model.path, export(model, tmp_path / "model.gguf"), 1e-4)


def test_the_values_of_fp16(tmp_path: Path) -> None:
    """llama.cpp rounds the inputs of such matrices too, so that log-probabilities differ by more."""
    path = export(write_case(tmp_path / "source", "llama/llama3_rope"), tmp_path / "model.gguf", "fp16")
    (tmp_path / "back").mkdir()
    import_gguf(path, tmp_path / "back", FAMILIES)
    compare(tmp_path / "back", path, 0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read(tmp_path: Path, dtype: str) -> None:
    """With 8 bits and fewer, inputs are rounded as coarsely as matrices, and tokens may differ."""
    path = export(write_case(tmp_path / "source", "llama/llama3_rope"), tmp_path / "model.gguf", dtype)
    assert all(answer["usage"]["completion_tokens"] == COUNT for answer in answers(path, [*range(97, 260), 0, 1, 2]))


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_are_those_of_llama_cpp_to_the_byte(kind: str) -> None:
    """The types of `--dtype q4_k_m`: so its files equal those of llama-quantize."""
    theirs = ctypes.CDLL(xllamacpp.xllamacpp.__file__).ggml_quantize_chunk
    theirs.restype = ctypes.c_size_t
    theirs.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    random = np.random.default_rng(0)
    number = gguf.GGMLQuantizationType[kind]
    for values in (random.normal(size=(37, 512)), random.standard_cauchy(size=(5, 256)), np.zeros((2, 256))):
        value = np.ascontiguousarray(values.astype("float32"))
        ours = quantised(value, number)
        expected = np.empty_like(ours)
        size = theirs(int(number), value.ctypes.data, expected.ctypes.data, 0, *value.shape, None)
        assert size == ours.nbytes
        assert np.array_equal(ours, expected)


def test_q4_k_m_is_read(tmp_path: Path) -> None:
    model = write_case(tmp_path / "source", "llama/grouped_query", **K_SHAPE)
    path = export(model, tmp_path / "model.gguf", "q4_k_m")
    assert {t.tensor_type.name for t in gguf.GGUFReader(path).tensors} == {"F32", "Q4_K", "Q6_K"}
    assert all(answer["usage"]["completion_tokens"] == COUNT for answer in answers(path, [*range(97, 260), 0, 1, 2]))
