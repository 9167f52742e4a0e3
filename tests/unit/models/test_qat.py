"""Quantisation-aware training: what becomes of values and gradients, how scales move, what is written as int8."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from llmsuite.base.errors import Problem, UserError
from llmsuite.base.files import write_json
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.train_state import FORMAT, TrainState
from llmsuite.cli.main import main
from llmsuite.cli.model import check_refreshable
from llmsuite.contract.schema.recipe import QatSection
from llmsuite.contract.schema.section import violations
from llmsuite.devices.cpu import CpuBackend
from llmsuite.engine.input_scales import InputScales
from llmsuite.inference.load import load_model
from llmsuite.models import int8_grid as grid
from llmsuite.models.qat import (
    FakeQuantLinear,
    fake_quantize,
    fake_quantize_layers,
    fake_quantize_weight,
    fake_quantized,
    observing,
    rounded_modules,
    weight_scale,
)
from llmsuite.parallel.loss_ledger import LossTerms
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.parallel.recompute import recompute_layers
from llmsuite.parallel.schedule import Action
from llmsuite.recipe.resolve import RunPlan
from tests.support import alone, tiny_llama
from tests.support.adapter_models import base_of
from tests.support.families import FAMILIES

IDS = np.array([[1, 7, 11, 3, 2], [4, 4, 9, 0, 5]])


def leaf(values: Any) -> Any:
    return paddle.to_tensor(np.asarray(values, "float32"), stop_gradient=False)


# by hand


def test_a_weight_is_rounded_by_output_and_keeps_its_gradient() -> None:
    weight = leaf([[12.7, -0.5, 0.0], [0.26, 2.54, 0.0], [-1.14, 0.03, 0.0]])
    np.testing.assert_allclose(weight_scale(weight).numpy()[:2], [0.1, 0.02], rtol=1e-6)
    rounded = fake_quantize_weight(weight)
    by_hand = [[12.7, -0.5, 0.0], [0.3, 2.54, 0.0], [-1.1, 0.04, 0.0]]  # 0.03 / 0.02 is a tie in decimals only
    np.testing.assert_allclose(rounded.numpy()[:, [0, 2]], np.array(by_hand, "float32")[:, [0, 2]], rtol=1e-6)
    np.testing.assert_allclose(rounded.numpy()[:2, 1], [-0.5, 2.54], rtol=1e-6)
    (rounded * paddle.arange(9, dtype="float32").reshape([3, 3])).sum().backward()
    np.testing.assert_array_equal(weight.grad.numpy(), np.arange(9.0).reshape(3, 3))


def test_inputs_are_rounded_ties_to_even_and_cut_off_with_their_gradient() -> None:
    x = leaf([0.06, 0.0625, 0.1875, -0.2, 15.875, 15.88, -16.0, 1000.0])  # steps of 1/8 up to 127/8 = 15.875
    rounded = fake_quantize(x, 0.125)
    np.testing.assert_array_equal(rounded.numpy(), [0.0, 0.0, 0.25, -0.25, 15.875, 15.875, -15.875, 15.875])
    (rounded * 3).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), [3, 3, 3, 3, 3, 0, 0, 0])


def test_a_layer_is_a_product_of_integers() -> None:
    linear = paddle.nn.Linear(2, 2)
    linear.weight.set_value(np.array([[1.27, -0.5], [0.4, 2.54]], "float32"))
    linear.bias.set_value(np.array([0.5, -0.25], "float32"))
    layer = FakeQuantLinear(linear, rounds_weight=True)
    layer.input_scale = 0.5
    # inputs 3, -7 (of 0.5), weights 127, -25 and 40, 127 (of 0.01 and 0.02)
    by_hand = [(3 * 127 - 7 * 40) * 0.5 * 0.01 + 0.5, (3 * -25 - 7 * 127) * 0.5 * 0.02 - 0.25]
    np.testing.assert_allclose(layer(paddle.to_tensor([[1.4, -3.6]])).numpy(), [by_hand], rtol=1e-6)


def test_sixteen_bit_values_are_rounded_in_float32() -> None:
    values = np.random.default_rng(0).normal(size=(7, 5)).astype("float16")
    rounded = fake_quantize_weight(paddle.to_tensor(values)).numpy()
    scale = grid.weight_scale(values)
    assert rounded.dtype == np.float16
    np.testing.assert_array_equal(rounded, (grid.to_int8(values, scale) * scale).astype("float16"))


def test_an_infinite_input_is_not_hidden() -> None:
    x = leaf([np.inf, 1.0])
    assert not np.isfinite(fake_quantize(x, 0.1).numpy()[0])


# laws

VALUES = st.floats(-50, 50, width=32, allow_subnormal=False)  # Paddle takes those for zero
SCALES = st.floats(2**-10, 1.0, width=32)


@given(arrays("float32", 9, elements=VALUES), SCALES)
def test_rounding_twice_is_rounding_once(values: np.ndarray, scale: float) -> None:
    once = fake_quantize(paddle.to_tensor(values), scale)
    np.testing.assert_array_equal(fake_quantize(once, scale).numpy(), once.numpy())


@given(arrays("float32", (4, 3), elements=VALUES))
def test_a_rounded_weight_has_the_same_steps(values: np.ndarray) -> None:
    once = fake_quantize_weight(paddle.to_tensor(values)).numpy()
    scale = grid.weight_scale(values)
    steps = grid.to_int8(values, scale)
    assert np.abs(steps.astype("int32")).max() <= grid.LEVELS
    np.testing.assert_array_equal(steps * scale, once)  # NumPy and Paddle agree to the last bit
    if np.abs(values).max(0).min() > 1e-6:
        np.testing.assert_array_equal(grid.to_int8(once, grid.weight_scale(once)), steps)


@given(arrays("float32", 9, elements=VALUES), SCALES)
def test_gradients_pass_inside_and_nowhere_else(values: np.ndarray, scale: float) -> None:
    x = leaf(values)
    y = fake_quantize(x, scale)
    y.sum().backward()
    edge = np.float32(grid.LEVELS * scale)
    np.testing.assert_array_equal(x.grad.numpy(), (np.abs(values) <= edge).astype("float32"))
    error = np.abs(y.numpy() - values.clip(-edge, edge))
    assert error.max() <= scale / 2 * (1 + 1e-4)


# scales


def tiny(layers: int = 1) -> tuple[Any, InputScales]:
    model = paddle.nn.Sequential(*(paddle.nn.Linear(3, 3, bias_attr=False) for _ in range(layers)))
    names = [str(i) for i in range(layers)]
    fake_quantize_layers(model, names, rounds_weight=True)
    part = PipelineStage([model], alone.MESH, 3, [], None)
    return model, InputScales(names, part, 0.9)


def see(layer: FakeQuantLinear, *values: float) -> None:
    """Micro-batches of one value each, in training."""
    for value in values:
        with observing([layer]):
            layer(paddle.full([2, 3], value))


def test_a_scale_is_a_moving_average_of_the_largest_input_of_each_step() -> None:
    model, scales = tiny(2)
    see(model[0], 0.5, -1.0)
    scales.after_update()
    see(model[0], 2.0)
    scales.after_update()
    # (0.9 * 1 + 2) / (0.9 + 1); the second layer has seen nothing
    assert model[0].input_scale == pytest.approx(2.9 / 1.9 / 127, rel=1e-6)
    assert model[1].input_scale is None
    assert scales.state() == {"0": [pytest.approx(2.9), pytest.approx(1.9)], "1": [0.0, pytest.approx(1.9)]}


def test_in_a_step_and_in_evaluation_scales_are_frozen() -> None:
    model, scales = tiny()
    see(model[0], 1.0)
    assert model[0].input_scale is None, "the first step rounds no inputs"
    scales.after_update()
    model(paddle.full([1, 3], 64.0))  # not in a forward pass of training
    assert model[0].largest is None
    see(model[0], 64.0)
    assert model[0].input_scale == pytest.approx(1 / 127)
    scales.after_skip()  # as of a step that is skipped
    assert scales.state() == {"0": [1.0, 1.0]}
    see(model[0], 3.0)
    scales.after_update()
    assert scales.state() == {"0": [pytest.approx(3.9), 1.9]}


def test_padding_is_not_seen() -> None:
    model, _ = tiny()
    x = np.ones([2, 3, 3], "float32")
    x[0, 2] = 100.0
    x[1, 1] = -2.0
    model[0].token_mask = paddle.to_tensor([[True, True, False], [True, True, True]])
    with observing([model[0]]):
        model(paddle.to_tensor(x))
        assert float(model[0].largest) == 2.0
        model(paddle.to_tensor(x[:, 2]))  # after the layers there is no padding
    assert float(model[0].largest) == 100.0


def test_scales_come_back_as_they_were() -> None:
    model, scales = tiny(2)
    for value in (0.3, 0.7, 0.11):
        see(model[0], value)
        scales.after_update()
    other, restored = tiny(2)
    restored.load(json.loads(json.dumps(scales.state())))
    assert restored.state() == scales.state()
    assert [m.input_scale for _, m in fake_quantized(other)] == [m.input_scale for _, m in fake_quantized(model)]


@pytest.mark.parametrize("document_starts", [None, [[0, 0, 2, 2, 2], [0, 0, 0, 0, 4]]], ids=["rows", "packed"])
def test_what_is_seen_depends_on_neither_padding_nor_recompute(document_starts: list[list[int]] | None) -> None:
    """Rows of lengths 3 and 5 together, with padding, or one after the other."""
    plan = FAMILIES["llama"].shard_plan
    assert plan is not None
    ids = np.array([[1, 7, 11, 18, 18], [4, 4, 9, 0, 5]])
    lengths = np.array([3, 5])
    found = []
    gradients = []
    for apart, again in ((False, False), (True, False), (False, True), (True, True)):
        model = tiny_llama.model()
        names = rounded_modules(model, plan, ["layers.*", "lm_head"])
        fake_quantize_layers(model, names, rounds_weight=True)
        if again:
            recompute_layers(model, plan, 1)
        part = PipelineStage([model], alone.MESH, model.config.hidden_size, [], None)
        scales = InputScales(names, part, 0.9)
        model.train()
        for _ in range(2):
            rows = [slice(i, i + 1) for i in range(2)] if apart else [slice(0, 2)]
            for number, row in enumerate(rows):
                size = int(lengths[row].max())
                docs = None if document_starts is None else paddle.to_tensor(document_starts)[row, :size]
                given = paddle.to_tensor(ids[row, :size])

                def loss(part: Any = part, given: Any = given, docs: Any = docs, row: slice = row) -> LossTerms:
                    hidden, _ = part.hidden_states(given, docs)
                    real = paddle.concat([hidden[i, :n] for i, n in enumerate(lengths[row])])
                    return LossTerms(part.logits(real).square().sum(), 1.0)

                part.forward(Action(True, number, 0), loss, lengths[row])
            for number in range(len(rows)):  # once all forward passes are done
                part.backward(Action(False, number, 0))
            scales.after_update()
            gradients.append({name: p.grad.numpy() for name, p in model.named_parameters()})
            model.clear_gradients()
        found.append(scales.state())
    for state in found[1:]:
        assert state.keys() == found[0].keys()
        assert all(values == pytest.approx(found[0][name], rel=1e-6) for name, values in state.items())
    assert found[0] == found[2], "recompute"
    for first, second in zip(gradients[:2], gradients[4:6]):
        assert all(np.array_equal(first[name], second[name]) for name in first)


# as int8


@dataclasses.dataclass(frozen=True)
class Trained:
    """A checkpoint of a run, the model that was trained, and what was made of it."""

    family: str
    checkpoint: Path
    int8: Path
    model: Any
    rounded: dict[str, list[float]]


def rounded_of(names: list[str], with_inputs: bool) -> dict[str, list[float]]:
    # layers that have the same inputs, as q, k and v, have seen the same
    return {n: [1.0 + len(n.rpartition(".")[0]) / 10, 1.9] if with_inputs else [] for n in names}


def save_state(directory: Path, rounded: dict[str, list[float]] | None) -> None:
    state = TrainState(step=3, samples=24, seed=0, recipe_sha256="", rounded=rounded)
    write_json(directory / "state.json", {"format": FORMAT, **dataclasses.asdict(state)})


@pytest.fixture(
    scope="module", params=[(f, w) for f in FAMILIES for w in (True, False)], ids=lambda p: f"{p[0]}-{p[1]}"
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    (family, with_inputs), directory = request.param, tmp_path_factory.mktemp("int8")
    base_of(family, directory / "run")
    model = load_model(open_model(directory / "run", FAMILIES), CpuBackend())
    names = rounded_modules(model, FAMILIES[family].shard_plan, None)  # type: ignore[arg-type]
    rounded = rounded_of(names, with_inputs)
    save_state(directory / "run", rounded)
    fake_quantize_layers(model, names, rounds_weight=True)
    for name, layer in fake_quantized(model):
        layer.input_scale = grid.input_scale(rounded[name])
    model.eval()
    assert main(["merge", str(directory / "run"), "-o", str(directory / "int8"), "--dtype", "int8"]) == 0
    return Trained(family, directory / "run", directory / "int8", model, rounded)


def test_the_int8_model_has_the_logits_of_the_trained_one(trained: Trained) -> None:
    loaded = load_model(open_model(trained.int8, FAMILIES, check=True), CpuBackend())
    expected = trained.model(paddle.to_tensor(IDS)).numpy()
    np.testing.assert_array_equal(loaded(paddle.to_tensor(IDS)).numpy(), expected)
    plain = load_model(open_model(trained.checkpoint, FAMILIES), CpuBackend())(paddle.to_tensor(IDS)).numpy()
    assert np.abs(plain - expected).max() > 1e-4, "rounding changes nothing, so nothing was tested"


def test_a_model_that_rounds_inputs_is_not_one_to_be_replaced(trained: Trained) -> None:
    """`serve --rl`: the scales of its inputs would round those of other weights."""
    rounds_inputs = any(trained.rounded.values())
    with pytest.raises(UserError, match="rounds its inputs with scales") if rounds_inputs else contextlib.nullcontext():
        check_refreshable(trained.int8, open_model(trained.int8, FAMILIES))
    check_refreshable(trained.checkpoint, open_model(trained.checkpoint, FAMILIES))


def test_anybody_can_read_the_int8_model(trained: Trained) -> None:
    def tensors(directory: Path, stem: str) -> dict[str, np.ndarray]:
        files = directory.glob(f"{stem}*.safetensors")
        return {name: value for file in files for name, value in safetensors.numpy.load_file(file).items()}

    found = tensors(trained.int8, "model")
    before = tensors(trained.checkpoint, "model")
    scales = tensors(trained.int8, "quant_scales")
    assert found.keys() == before.keys()
    is_int8 = {name for name, value in found.items() if value.dtype == np.int8}
    assert len(is_int8) == len([name for name in scales if name.endswith(".weight_scale")]) > 5
    has_inputs = any(trained.rounded.values())
    for name in is_int8:
        scale = scales[name.replace(".weight", ".weight_scale")]
        assert np.abs(found[name] * scale - before[name]).max() <= scale.max() * 0.5001
        assert (name.replace(".weight", ".input_scale") in scales) == has_inputs
    assert json.loads((trained.int8 / "config.json").read_text())["quantization_config"]["weight_bits"] == 8
    others = set(found) - is_int8
    assert all(np.array_equal(found[name], before[name]) for name in others)


@pytest.mark.parametrize("trained", [("llama", True)], indirect=True, ids=["llama"])
def test_int8_goes_into_paddlenlps_layout_and_back_to_floats(trained: Trained, tmp_path: Path) -> None:
    expected = trained.model(paddle.to_tensor(IDS)).numpy()
    words = ["merge", str(trained.checkpoint), "-o", str(tmp_path / "nlp"), "--dtype", "int8", "--layout", "paddlenlp"]
    assert main(words) == 0
    opened = open_model(tmp_path / "nlp", FAMILIES, check=True)
    assert opened.layout == "paddlenlp"
    np.testing.assert_array_equal(load_model(opened, CpuBackend())(paddle.to_tensor(IDS)).numpy(), expected)
    # a slice is multiplied with the scales of its outputs
    name = "model.layers.1.mlp.up_proj.weight"
    for model in (opened, open_model(trained.int8, FAMILIES)):
        part = model.read(name, [slice(3, 9), slice(2, 5)])
        np.testing.assert_array_equal(part, model.read(name)[3:9, 2:5])
    # without --dtype: the values that are on the grid, as an ordinary model
    assert main(["merge", str(trained.int8), "-o", str(tmp_path / "floats")]) == 0
    floats = open_model(tmp_path / "floats", FAMILIES)
    assert floats.spec(name).dtype == "float32"
    np.testing.assert_array_equal(floats.read(name), opened.read(name))
    assert "quantization_config" not in json.loads((tmp_path / "floats" / "config.json").read_text())


@pytest.mark.parametrize("trained", [("gpt", True)], indirect=True, ids=["gpt"])
def test_the_program_of_an_int8_model_is_verified(trained: Trained, tmp_path: Path, capsys: Any) -> None:
    from llmsuite.base.resources import find
    from llmsuite.checkpoint.tokenizer_files import copy_tokenizer

    copy_tokenizer(find("data/tokenizer"), trained.int8)
    static = tmp_path / "static"
    assert main(["export", str(trained.int8), "-o", str(static)]) == 0
    assert main(["verify", str(static)]) == 0
    assert "logits differ by at most" in capsys.readouterr().out
    scales = [path.name for path in trained.int8.glob("quant_scales*")]
    assert all((static / name).read_bytes() == (trained.int8 / name).read_bytes() for name in scales)
    assert main(["deploy", str(trained.int8), "-o", str(tmp_path / "deployed")]) == 2
    assert "use `llmsuite export`" in capsys.readouterr().err


@pytest.mark.parametrize("trained", [("llama", True)], indirect=True, ids=["llama"])
def test_int8_that_cannot_be_read_is_refused(trained: Trained, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(trained.int8, tmp_path / "alone")
    for path in (tmp_path / "alone").glob("quant_scales*"):
        path.unlink()
    with pytest.raises(UserError, match=r"is int8, and there is no quant_scales.safetensors"):
        open_model(tmp_path / "alone", FAMILIES)


def test_what_was_not_trained_for_int8_is_not_written_so(tmp_path: Path, capsys: Any) -> None:
    base_of("gpt", tmp_path / "base")
    words = ["merge", str(tmp_path / "base"), "-o", str(tmp_path / "int8"), "--dtype", "int8"]
    assert main(words) == 2
    assert "is no checkpoint of a run with qat.weight_bits" in capsys.readouterr().err
    save_state(tmp_path / "base", None)
    assert main(words) == 2
    assert "is no checkpoint of a run with qat.weight_bits" in capsys.readouterr().err
    save_state(tmp_path / "base", {"model.layers.0.self_attn.q_proj": []})
    assert main(words) == 2
    assert "qat.target_modules named only some of them" in capsys.readouterr().err
    assert main([*words, "--fused", "--layout", "paddlenlp"]) == 2
    assert "--dtype int8" in capsys.readouterr().err


# recipes


def test_a_recipe_without_the_section_rounds_nothing(plan: Callable[..., RunPlan]) -> None:
    qat = plan().recipe.qat
    assert (qat.weight_bits, qat.activation_bits) == (None, None)


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        ({"activation_bits": 8}, "activation_bits", "no effect while weight_bits is null"),
        ({"target_modules": ["q_proj"]}, "target_modules", "no effect while weight_bits is null"),
        ({"weight_bits": 8, "moving_rate": 0.5}, "moving_rate", "no effect while activation_bits is null"),
        ({"weight_bits": 8, "target_modules": []}, "target_modules", "nothing would be quantised"),
    ],
)
def test_a_key_without_effect_is_named(keys: dict[str, Any], key: str, message: str) -> None:
    ((found, said),) = violations(QatSection(**keys))
    assert found == key
    assert message in said


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"stage": "dpo"}, "qat.weight_bits", "use pretrain or sft"),
        ({"lora.rank": 4}, "qat.weight_bits", "set one of the two to null"),
        ({"stage": "lora", "lora.rank": 4}, "qat.weight_bits", "set one of the two to null"),
        ({"qat.activation_bits": 8, "engine.mode": "to_static"}, "qat.activation_bits", "or engine.mode to dynamic"),
        ({"qat.weight_bits": 4}, "qat.weight_bits", "8 or null"),
    ],
)
def test_what_does_not_go_together_is_refused(
    problems: Callable[..., list[Problem]], changes: dict[str, Any], key: str, message: str
) -> None:
    (problem,) = problems({"stage": "sft", "qat.weight_bits": 8, **changes})
    assert problem.key == key
    assert message in problem.message


def test_a_pattern_that_matches_nothing_names_its_key() -> None:
    with pytest.raises(UserError, match=r"qat.target_modules: 'query' matches no matrix"):
        rounded_modules(tiny_llama.model(), FAMILIES["llama"].shard_plan, ["query"])  # type: ignore[arg-type]
