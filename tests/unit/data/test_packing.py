"""Packs: full, always the same, and to the model no different from their documents one by one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.data.keys import ColumnRules
from llmsuite.data.packing import best_fit, first_fit, pack_samples
from llmsuite.data.read import read_rows
from llmsuite.devices.ops import Ops
from llmsuite.stages.language_model import WeightedTokens, collate, join, weighted_loss
from tests.support import dpo_case, sft_case
from tests.support.families import FAMILIES
from tests.support.paths import REAL

PAD = 0


LENGTHS = [30, 20, 25, 10, 39, 1, 14, 40, 5, 5]


def pack(samples: Sequence[WeightedTokens], max_length: int) -> Sequence[WeightedTokens]:
    return pack_samples(samples, lambda some: np.array([[s.num_inputs] for s in some]), max_length, join)[0]


@given(st.lists(st.integers(1, 40), max_size=60))
def test_every_sample_is_in_one_pack_and_no_two_packs_fit_together(lengths: list[int]) -> None:
    packs = best_fit(lengths, 40)
    assert sorted(i for picked in packs for i in picked) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in picked) for picked in packs]
    assert all(0 < tokens <= 40 for tokens in filled)
    assert all(a + b > 40 for a, b in itertools.combinations(filled, 2))
    assert all(picked.tolist() == sorted(picked) for picked in packs)


def test_best_fit_leaves_the_least_room() -> None:
    # 6 leaves 4, 5 leaves 5; of these 4 fits best to the first, 3 and 2 into the second
    assert [pack.tolist() for pack in best_fit([3, 6, 2, 5, 4], 10)] == [[1, 4], [0, 2, 3]]
    assert list(best_fit([], 10)) == []
    assert [pack.tolist() for pack in best_fit([10, 10], 10)] == [[0], [1]]


weighted = st.lists(st.tuples(st.integers(3, 511), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12).map(
    lambda rest: WeightedTokens(
        np.array([1, *(i for i, _ in rest), 5], "int32"), np.array([0, *(w for _, w in rest), 1], "float32")
    )
)
several = st.lists(weighted, min_size=1, max_size=6)


def documents(sample: WeightedTokens) -> list[tuple[list[int], list[float]]]:
    bounds = itertools.pairwise([*sample.begins, len(sample.ids)])
    return [(sample.ids[a:b].tolist(), sample.weights[a:b].tolist()) for a, b in bounds]


@given(several, st.integers(13, 40))
def test_a_pack_has_the_loss_of_its_documents(samples: list[WeightedTokens], max_length: int) -> None:
    packs = pack(samples, max_length)
    found = sorted(document for sample in packs for document in documents(sample))
    assert found == sorted((sample.ids.tolist(), sample.weights.tolist()) for sample in samples)
    assert all(sample.num_inputs <= max_length for sample in packs)


@given(several, st.integers(13, 40), st.integers(1, 8))
def test_every_target_is_predicted_from_its_own_document(
    samples: list[WeightedTokens], max_length: int, multiple: int
) -> None:
    packs = pack(samples, max_length)
    batch = collate(packs, PAD, multiple)
    input_ids = batch["input_ids"]
    length = batch["input_ids"].shape[1]
    assert ("document_starts" in batch) == any(len(sample.begins) > 1 for sample in packs)
    begins = batch.get("document_starts", np.zeros_like(input_ids))
    supervised = []
    for position, target, weight in zip(batch["positions"], batch["targets"], batch["weights"]):
        row, column = divmod(int(position), length)
        context = input_ids[row, begins[row, column] : column + 1]
        supervised.append((context.tolist(), int(target), float(weight)))
    expected = [
        (ids[:i], ids[i], weights[i])
        for sample in packs
        for ids, weights in documents(sample)
        for i in range(len(ids))
        if weights[i]
    ]
    assert supervised == expected
    assert batch["num_tokens"] == sum(len(sample.ids) for sample in samples)
    for ids, of_row, sample in zip(input_ids, begins, packs):
        assert (ids[sample.num_inputs :] == PAD).all()
        if "document_starts" in batch:
            assert (of_row[sample.num_inputs :] == sample.num_inputs).all()


def gradients(batches: Sequence[Sequence[WeightedTokens]]) -> tuple[float, float, dict[str, np.ndarray]]:
    """Loss, its weight and the gradient of each parameter, summed over the batches."""
    model = dpo_case.model(num_hidden_layers=2)
    loss = weight = 0.0
    for samples in batches:
        terms = weighted_loss(model, collate(samples, PAD, 1))
        terms.total.backward()
        loss = loss + float(terms.total)
        weight = weight + terms.weight
    return loss, weight, {name: p.grad.numpy() for name, p in model.named_parameters()}


@settings(max_examples=8)
@given(several, st.integers(13, 40))
def test_packing_does_not_change_loss_and_gradients(samples: list[WeightedTokens], max_length: int) -> None:
    packs = pack(samples, max_length)
    one_by_one = gradients([[s] for s in samples])
    padded = gradients([samples])
    packed = gradients([packs])
    for loss, weight, found in (padded, packed):
        assert loss == pytest.approx(one_by_one[0], rel=1e-6)
        assert weight == one_by_one[1]
        norm = np.sqrt(sum(float((g.astype("float64") ** 2).sum()) for g in one_by_one[2].values()))
        for name, gradient in one_by_one[2].items():
            assert np.linalg.norm(found[name] - gradient) <= 1e-6 * norm, name


def test_learned_positions_reach_through_a_row_that_is_longer_than_they_are() -> None:
    spec = FAMILIES["gpt"]
    model = spec.factory()(spec.config_cls(**{**spec.smoke, "max_position_embeddings": 5}), Ops())
    model.model.embed_positions.weight.set_value(np.random.default_rng(0).normal(size=(5, 64)).astype("float32"))
    ids = np.arange(12).reshape(1, 12)
    begins = np.array([[0] * 4 + [4] * 5 + [9] * 3])
    joined = model.embed(paddle.to_tensor(ids), document_starts=paddle.to_tensor(begins)).numpy()
    alone = [model.embed(paddle.to_tensor(ids[:, a:b])).numpy() for a, b in ((0, 4), (4, 9), (9, 12))]
    assert (joined == np.concatenate(alone, axis=1)).all()
    with pytest.raises(AssertionError, match="no positions up to 12"):
        model.embed(paddle.to_tensor(ids))


def test_first_fit_makes_the_packs_of_axolotl() -> None:
    """Those of `pack_group` of its multipack sampler (067b021c)."""
    assert [pack.tolist() for pack in first_fit(LENGTHS, 40)] == [[0, 3], [1, 5, 6, 8], [2, 9], [4], [7]]
    assert [len(pack) for pack in first_fit([1] * 450, 1000)] == [200, 200, 50]
    assert first_fit([], 8) == []


def test_first_fit_packs_samples_of_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmsuite.data.packing._GROUP", 4)
    assert [pack.tolist() for pack in first_fit(LENGTHS, 40)] == [[0, 3], [1], [2], [4, 5], [6], [7], [8, 9]]


def test_the_stage_packs_rows_in_an_order_by_seed() -> None:
    plain = sft_case.make_stage(max_length=256)
    stage = sft_case.make_stage(max_length=256, packing="first_fit", pack_length=512)
    path = sft_case.DATA / "sft" / "train.jsonl"
    rows = plain.reader.read(path)
    packs = stage.reader.read(path)
    found = sorted(document for sample in packs for document in documents(sample))
    assert found == sorted((sample.ids.tolist(), sample.weights.tolist()) for sample in rows)
    order = np.random.default_rng(42).permutation(len(rows))
    expected = first_fit([len(rows[number].ids) for number in order], 512)
    for sample, numbers in zip(packs, expected, strict=True):
        assert [ids for ids, _ in documents(sample)] == [rows[number].ids.tolist() for number in order[numbers]]
        assert len(sample.ids) <= 512
    assert max(len(sample.ids) for sample in packs) > 256


def test_the_stage_packs_the_rows_of_a_file() -> None:
    said: list[str] = []
    plain = sft_case.make_stage(max_length=256)
    stage = sft_case.make_stage(max_length=256, packing="best_fit", report=said.append)
    path = sft_case.DATA / "sft" / "train.jsonl"
    assert len(read_rows(path, "conversation", "auto", sft_case.FORMATS, columns=ColumnRules(ignored=["tasks"]))) == 160
    rows = plain.reader.read(path)
    packs = stage.reader.read(path)
    assert len(packs) < len(rows) / 2
    found = sorted(document for sample in packs for document in documents(sample))
    assert found == sorted((sample.ids.tolist(), sample.weights.tolist()) for sample in rows)
    full = sum(sample.num_inputs for sample in rows) / (len(packs) * 256)
    assert said[-1] == f"{path}: packed into {len(packs)} samples, which are {full:.1%} full"
    assert full > 0.9
    assert stage.row_lengths(packs).tolist() == [[sample.num_inputs] for sample in packs]
    batch = stage.collate(packs[:2])
    assert batch["input_ids"].shape == batch["document_starts"].shape
    terms = stage.loss(dpo_case.model(), batch)
    assert float(terms.total) > 0


@pytest.mark.parametrize("language", ["en", "zh"])
def test_packs_of_real_rows_are_nearly_full(language: str) -> None:
    path = REAL / f"alpaca_{language}_demo.json"
    if not path.is_file():
        pytest.skip("the real data is not there")
    stage = sft_case.make_stage(max_length=2048, packing="best_fit")
    packs = stage.reader.read(path)
    full = sum(sample.num_inputs for sample in packs) / (len(packs) * 2048)
    print(f"{len(packs)} packs, {full:.2%} full")
    assert full >= 0.97
