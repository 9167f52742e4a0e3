"""Matrices in 16, 8 and 4 bits: numbers are those of a float32 model with the values that are stored, which rounds the
inputs of its products."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from llmsuite.base.errors import UserError
from llmsuite.cli.main import main
from llmsuite.devices.cpp_library import build_library
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.decoding_ops import MatrixPart as Part
from llmsuite.devices.matmul_ops import MatmulOps
from llmsuite.devices.ops import Ops
from llmsuite.inference.batch import Batch, DecodingSequence
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.evaluate import scorer
from llmsuite.inference.load import load_model, open_any
from llmsuite.inference.pack_model import head_precision, pack_matrices
from llmsuite.inference.sampling import Sampling
from llmsuite.models.block_quant import block_format
from llmsuite.models.linear import Linear
from llmsuite.models.linear_ops import LinearOps, use_linear_ops
from llmsuite.models.qat import fake_quantize_layers
from llmsuite.plugins.cpu_kernels import kernels, packing
from llmsuite.plugins.cpu_kernels import libraries as of_kernels
from llmsuite.plugins.cpu_kernels.packing import pack_parts, pack_stack, rounded
from tests.support.adapter_models import adapted, section, write
from tests.support.families import CASES, FAMILIES, reference, tiny
from tests.support.packed_models import stored
from tests.support.paths import REFERENCE, ROOT
from tests.support.written_family import write_family

PRECISIONS = ("bf16", "int8", "nf4", "fp4", "int4")
KEPT = ("_conv", "kv_b_proj", "mlp.gate", "e_score_correction_bias", "shared_expert_gate", "embed_positions")
"""Names of the matrices of layers, and others, that stay in float32."""
LIMIT = 1e-5
"""Limit of the largest difference, relative to the largest value."""


def is_kept(name: str) -> bool:
    return name.removesuffix(".weight").endswith(KEPT)


def near(found: Any, wanted: np.ndarray) -> None:
    assert np.abs(np.asarray(found) - wanted).max() <= LIMIT * np.abs(wanted).max()


def near_rounded(found: Any, wanted: np.ndarray, exact: np.ndarray) -> None:
    """Beside the order of sums nothing differs, so that few inputs of products are rounded to another side, and what
    comes after those. Without rounding all of it would be missing, and other roundings would be off by the square root
    of 2 of it."""
    rounding = np.linalg.norm(wanted - exact)
    assert rounding > LIMIT * np.linalg.norm(exact), "rounding the inputs changes something"
    assert np.linalg.norm(np.asarray(found) - wanted) <= 0.75 * rounding


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def packed(values: np.ndarray, precision: str) -> Any:
    """A matrix as the kernels read it."""
    part = Part(values.shape[1], lambda first, end: values[:, first:end])
    return pack_parts([part], len(values), precision)


def dequantised(path: Path, precision: str, base: Path | None = None, rounds_inputs: bool = True) -> Any:
    """A plain float32 model of the values that are stored, which NumPy has rounded. It rounds the inputs of its
    matmuls to bfloat16 by default."""
    model = load_model(open_any(path, FAMILIES, base, runs=True), CpuBackend())
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.ndim == 3:
            parameter.set_value(np.stack([rounded(values, precision) for values in parameter.numpy()]))
        elif parameter.ndim == 2 and not is_kept(name) and not name.endswith(".bias"):  # of experts
            is_embedding = "embed_tokens" in name
            kind = head_precision(precision) if is_embedding or "lm_head" in name else precision
            values = parameter.numpy()
            parameter.set_value(rounded(values.T, kind).T if is_embedding else rounded(values, kind))
    if rounds_inputs:
        matmuls = MatmulOps(round_activation=lambda x: x.astype("bfloat16").astype("float32"))
        use_linear_ops(model, LinearOps(Ops(matmuls=matmuls)))
        for name, layer in model.named_sublayers():
            if name.endswith(KEPT) and isinstance(layer, Linear):
                layer.kernel = F.linear
    return model


def check_products(marker: str = "") -> None:
    """Products with few and many rows, and single outputs, of matrices of all kinds of sizes."""
    for num_inputs, num_outputs in ((28, 40), (64, 32), (576, 300), (1152, 33), (1600, 64)):
        values = random(num_inputs, num_outputs, seed=1)
        for precision in PRECISIONS:
            matrix = packed(values, precision)
            dense = rounded(values, precision).astype("float64")
            assert 0 < np.abs(dense - values).max() < 1, "storing changes something, and not too much"
            for rows in (1, 3, 8, 9, 16, 17, 70):
                x = random(rows, num_inputs, seed=2)
                near(kernels.packed_matmul(paddle.to_tensor(x), matrix).numpy(), rounded(x, "bf16") @ dense)
            some = np.array([0, 31, num_outputs - 1, 5])
            found = kernels.packed_embedding(paddle.to_tensor(some), matrix).numpy()
            assert np.array_equal(found, rounded(values, precision)[:, some].T)
    print(marker)


def test_products_are_those_of_the_rounded_matrix() -> None:
    kernels.load()
    check_products()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_of_experts_are_multiplied_with_their_own_matrix(precision: str) -> None:
    """Some have none, few or many rows; rows after them belong to experts elsewhere."""
    kernels.load()
    counts = [0, 3, 40, 0, 1]
    num_inputs = 192
    num_outputs = 70
    values = random(len(counts), num_inputs, num_outputs, seed=1)
    parts = [Part(num_outputs, lambda first, end, one=one: one[:, first:end]) for one in values]
    stack = pack_stack(parts, num_inputs, precision)
    x = random(sum(counts) + 2, num_inputs, seed=2)
    found = kernels.packed_grouped_matmul(paddle.to_tensor(x), stack, paddle.to_tensor(counts)).numpy()
    ends = np.cumsum(counts)
    for one, count, end in zip(values, counts, ends):
        rows = paddle.to_tensor(x[end - count : end])
        if count:
            expected = kernels.packed_matmul(rows, packed(one, precision)).numpy()
            assert np.array_equal(found[end - count : end], expected)
    assert not found[ends[-1] :].any()
    for wrong in ([0, 3, 40, 0, 9], [0, 3, 40, -1, 1], [1, 1]):
        with pytest.raises(OSError, match=r"counts|its bytes"):
            kernels.packed_grouped_matmul(paddle.to_tensor(x), stack, paddle.to_tensor(wrong))


_FLAGS = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()


@pytest.mark.parametrize(
    "processor",
    [
        pytest.param("x86-64-v4", marks=pytest.mark.skipif("avx512vl" not in _FLAGS, reason="it has no AVX-512")),
        pytest.param("x86-64-v3", marks=pytest.mark.skipif("avx2" not in _FLAGS, reason="it has no AVX2")),
        "x86-64",
    ],
)
def test_products_on_processors_with_less(processor: str) -> None:
    """The kernels are built for the processor at hand; here for one without products of bfloat16, for one
    without AVX-512, and for one without AVX2."""
    full = of_kernels.KERNELS
    sources = tuple(path for path in full.sources if path.suffix == ".h" or path.name == "stored.cc")
    less = dataclasses.replace(
        full,
        name=f"stored-{processor}",
        sources=tuple(sorted(sources, key=lambda path: path.suffix == ".h")),
        options=(*full.options, f"-march={processor}"),
        is_for_this_cpu=False,
    )
    program = (
        "import paddle\n"
        f"paddle.utils.cpp_extension.load_op_meta_info_and_register_op({str(build_library(less))!r})\n"
        "from tests.unit.inference.test_pack_model import check_products\n"
        "check_products('all are equal')\n"
    )
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "all are equal" in found.stdout, found.stderr


def test_blocks_are_whole() -> None:
    assert [block_format("int8", size).block for size in (28, 24, 576, 4096, 96)] == [4, 8, 64, 64, 32]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_matrix_is_read_a_part_at_a_time(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of several parameters, whose outputs end within a tile."""
    values = random(64, 300)
    read = list[int]()
    full = packed(values, precision).bytes.numpy()
    monkeypatch.setattr(packing, "_CHUNK_BYTES", 64 * 64 * 4)

    def part(begin: int, size: int) -> Part:
        def some(first: int, end: int) -> np.ndarray:
            read.append(end - first)
            return values[:, begin + first : begin + end]

        return Part(size, some)

    found = pack_parts([part(0, 100), part(100, 150), part(250, 50)], 64, precision)
    assert np.array_equal(found.bytes.numpy(), full)
    assert sum(read) == 300
    assert max(read) <= 64


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
def test_every_shape_has_the_logits_of_the_values_it_stores(case: str, precision: str) -> None:
    ids, plain = reference(case)
    with paddle.no_grad():
        wanted, exact = (
            dequantised(REFERENCE / case, precision, rounds_inputs=rounds)(paddle.to_tensor(ids)).numpy()
            for rounds in (True, False)
        )
    assert np.abs(exact - plain).max() > 100 * LIMIT * np.abs(plain).max(), "storing changes something"
    model = stored(REFERENCE / case, precision)
    near_rounded(model(paddle.to_tensor(ids)).numpy(), wanted, exact)
    left = [name for name, parameter in model.named_parameters() if parameter.ndim > 1 and not is_kept(name)]
    assert not [name for name in left if not name.endswith(".bias")], "stored, and not kept too"
    decoder = ModelDecoder(model)
    padding = np.zeros(len(ids), "int64")
    logits, cache = decoder.forward(ids[:, :3], padding, None)
    found = [logits]
    for i in range(3, ids.shape[1]):
        logits, cache = decoder.forward(ids[:, i : i + 1], padding, cache)
        found.append(logits)
    near_rounded(np.stack(found, 1), wanted[:, 2:], exact[:, 2:])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", ["llama", "qwen", "ernie", "gpt"])
def test_greedy_tokens_are_those_of_the_dequantised_model(family: str, precision: str, tmp_path: Path) -> None:
    place = write_family(tmp_path / "model", family)
    models = (stored(place, precision), dequantised(place, precision))
    exact_model = dequantised(place, precision, rounds_inputs=False)
    prompts = ([3], [7, 300, 12, 9], [5] * 20)
    sequences = [DecodingSequence(prompt, Sampling(max_new_tokens=20), set()) for prompt in prompts]
    batch = Batch(ModelDecoder(models[0]))
    batch.advance(sequences[:2])
    batch.advance(sequences[2:])
    while batch.sequences:
        batch.advance()
    for prompt, line in zip(prompts, sequences, strict=True):
        assert len(line.ids) == 20
        full = paddle.to_tensor([[*prompt, *line.ids]])
        wanted, exact = (model(full).numpy()[0, len(prompt) - 1 : -1] for model in (models[1], exact_model))
        rounding = np.abs(wanted - exact).max()
        assert rounding < 0.1 * wanted.std()
        # of two tokens that are as good but for rounding either may come, by the order of sums
        lost = wanted.max(-1) - np.take_along_axis(wanted, np.array(line.ids)[:, None], -1)[:, 0]
        assert lost.max() <= 2 * rounding
    text = [[int(token) for token in np.random.default_rng(0).integers(0, 512, 40)], [1, 2, 3]]
    scores = [scorer(model, 2)(text) for model in (*models, exact_model)]
    for mine, wanted, exact in zip(*scores):
        near_rounded(mine, wanted, exact)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_has_the_same_bits_in_any_batch(precision: str) -> None:
    decoder = ModelDecoder(stored(REFERENCE / "qwen/qwen3", precision))
    draw = np.random.default_rng(0)
    rows = 11
    padding = draw.integers(0, 6, [rows])
    _, start = decoder.forward(draw.integers(0, 32, [rows, 6]), padding, None)
    new = draw.integers(0, 32, [rows, 1])
    together, _ = decoder.forward(new, padding, start)
    assert len(np.unique(together, axis=0)) == rows
    for some in (slice(0, 1), slice(4, 7), slice(2, 11)):
        logits, _ = decoder.forward(new[some], padding[some], [tensor[some].clone() for tensor in start])
        assert np.array_equal(logits, together[some])


def test_adapters_are_merged_before_they_are_stored(tmp_path: Path) -> None:
    base = write_family(tmp_path / "base", "llama")
    adapter = tmp_path / "adapter"
    model, modules = adapted("llama", base, section())
    write(adapter, model, modules, section(), base)
    ids = np.array([[7, 300, 12, 9]])
    logits, _ = ModelDecoder(stored(adapter, "int8")).forward(ids, np.zeros(1, "int64"), None)
    with paddle.no_grad():
        wanted, exact = (
            dequantised(adapter, "int8", rounds_inputs=rounds)(paddle.to_tensor(ids)).numpy()[:, -1]
            for rounds in (True, False)
        )
    near_rounded(logits, wanted, exact)
    without, _ = ModelDecoder(stored(base, "int8")).forward(ids, np.zeros(1, "int64"), None)
    assert np.abs(logits - without).max() > 0.01 * np.abs(logits).max()


@pytest.mark.parametrize("case", ["llama-grouped_query", "ernie-tied"])
def test_prefixes_stand_in_front_of_stored_matrices(case: str, tmp_path: Path) -> None:
    shutil.copytree(REFERENCE / "peft" / "prefix" / case, tmp_path / "adapter")
    base = REFERENCE / case.replace("-", "/", 1)
    ids, _ = reference(case.replace("-", "/", 1))
    exact = functools.partial(dequantised, rounds_inputs=False)
    decoders = [ModelDecoder(form(tmp_path / "adapter", "int8", base)) for form in (stored, dequantised, exact)]
    padding = np.arange(len(ids))
    for passes in zip(*(_passes(decoder, ids, padding) for decoder in decoders)):
        near_rounded(*passes)


def test_prefixes_stand_in_front_of_a_cache_in_bf16(tmp_path: Path) -> None:
    case = "llama-grouped_query"
    shutil.copytree(REFERENCE / "peft" / "prefix" / case, tmp_path / "adapter")
    base = REFERENCE / case.replace("-", "/", 1)
    ids, _ = reference(case.replace("-", "/", 1))
    decoders = [ModelDecoder(stored(tmp_path / "adapter", "bf16", base, cache)) for cache in ("bfloat16", None)]
    for half, full in zip(*(_passes(decoder, ids, np.arange(len(ids))) for decoder in decoders)):
        assert 0 < np.abs(half - full).max() < 3e-2 * np.abs(full).max()


def _passes(decoder: ModelDecoder, ids: np.ndarray, padding: np.ndarray) -> list[np.ndarray]:
    logits, cache = decoder.forward(ids[:, :-1], padding, None)
    return [logits, decoder.forward(ids[:, -1:], padding, cache)[0]]


def test_the_commands_take_it(tmp_path: Path, capsys: Any) -> None:
    model = str(write_family(tmp_path / "model", "llama"))
    prompts = tmp_path / "prompts.jsonl"
    chances = list[float]()
    prompts.write_text('{"prompt": "Hello"}\n')
    for precision in ("fp32", *PRECISIONS):
        answers = tmp_path / f"{precision}.jsonl"
        words = ["--precision", precision, "--logprobs", "1", "--max_new_tokens", "4", "--output", str(answers)]
        assert main(["generate", model, "--input", str(prompts), *words]) == 0
        chances.append(json.loads(answers.read_text())["answers"][0]["logprobs"][0]["logprob"])
    assert len(set(chances)) == 1 + len(PRECISIONS)
    assert np.abs(np.array(chances) - chances[0]).max() < 1
    capsys.readouterr()
    (tmp_path / "text.txt").write_text("one two three " * 20)
    assert main(["eval", model, "--perplexity", str(tmp_path / "text.txt"), "--precision", "bf16"]) == 0
    assert "perplexity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "words", "why"),
    [
        ("llama", ["--precision", "fp16"], "--precision fp16: cpu has fp32, bf16, int8, nf4, fp4"),
        ("llama", ["--precision", "int8", "--num_devices", "2"], "for one device; leave out --num_devices"),
        ("llama", ["--precision", "int8", "--engine", "static"], "of an exported program is set by"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(
    family: str, words: list[str], why: str, tmp_path: Path, capsys: Any
) -> None:
    model = write_family(tmp_path / "model", family)
    assert main(["generate", str(model), "--prompt", "Hi", *words]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "--prompt", "Hi"], ["serve", "--port", "0"]])
def test_ranks_that_cannot_share_a_model_are_refused_before_they_start(
    command: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(f"llmsuite.cli.{command[0]}.launch_ranks", start)
    model = write_family(tmp_path / "model", "llama")
    assert main([command[0], str(model), *command[1:], "--num_devices", "3"]) == 2
    assert "--num_devices is 3, which does not divide num_attention_heads" in capsys.readouterr().err


@pytest.mark.parametrize(("family", "key"), [("llama", "intermediate_size"), ("qwen_moe", "moe_intermediate_size")])
def test_odd_numbers_of_inputs_are_refused_by_name(family: str, key: str, tmp_path: Path) -> None:
    source = open_any(write_family(tmp_path / "model", family, **{key: 33}), FAMILIES)
    for precision in ("int8", "int4"):
        with pytest.raises(UserError, match=rf"--precision {precision}: model\..* has 33 inputs, an odd number"):
            load_model(source, CpuBackend(), packed=precision)
    load_model(source, CpuBackend(), packed="bf16")


@pytest.mark.parametrize("layer", ["q_proj", "down_proj", "kv_a_proj_with_mqa", "up_proj"])
def test_layers_that_round_their_inputs_are_refused_by_name(layer: str) -> None:
    family = "gpt" if layer == "up_proj" else "deepseek" if "kv" in layer else "llama"
    model = tiny(family)
    *_, name = [name for name, _ in model.named_sublayers() if name.endswith(layer)]
    fake_quantize_layers(model, [name], rounds_weight=False)

    def read(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        return np.zeros(shape, "float32")[tuple(index)]

    with pytest.raises(UserError, match=rf"--precision int8: {name}.*use fp32"):
        pack_matrices(model, read, "int8", CpuBackend().ops("fp32").decoding.packed)


def test_weights_that_are_replaced_are_as_they_are_trained(tmp_path: Path, capsys: Any) -> None:
    model = write_family(tmp_path / "model", "llama")
    assert main(["serve", str(model), "--rl", "--precision", "int8"]) == 2
    assert "weights that are replaced (--rl) are fp32 or bf16; choose one" in capsys.readouterr().err
