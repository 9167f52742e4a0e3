"""Pairs that share rows are to the model no different from pairs in rows of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.base.cache import isolated_cache
from llmsuite.data.packing import pack_samples as packed_samples
from llmsuite.engine.batch import tokens_by_answer
from llmsuite.engine.supervision import supervised_sequences
from llmsuite.stages.answers import answer_logps
from llmsuite.stages.dpo import DpoStage
from llmsuite.stages.pairs import Pair, Pairs, PairStage, chosen_then_rejected, join
from llmsuite.stages.rm import RmStage
from llmsuite.stages.sections import DpoSection, RmSection
from tests.support import alone, dpo_case
from tests.support.dpo_variants import VARIANTS, made
from tests.support.recorded_steps import Recording

tokens = st.lists(st.integers(3, 511), min_size=1, max_size=6)
some = st.lists(st.builds(Pair, tokens, tokens.map(lambda ids: [*ids, 2]), tokens.map(lambda ids: [*ids, 2])),
                min_size=1, max_size=8)  # fmt: skip
DPO = dpo_case.stage()
STAGES: dict[str, PairStage] = {"dpo": DPO, "rm": RmStage(RmSection(), DPO.context)}


def pack(stage: PairStage, pairs: Sequence[Pair], max_length: int) -> list[Pairs]:
    return list(packed_samples(pairs, stage.row_lengths, max_length, join)[0])


@pytest.mark.parametrize("name", STAGES)
@settings(max_examples=40)
@given(some, st.integers(13, 40), st.integers(1, 8))
def test_every_pair_is_in_one_pack_and_no_row_is_too_long(
    name: str, pairs: list[Pair], max_length: int, multiple: int
) -> None:
    stage = STAGES[name]
    stage.context = dataclasses.replace(stage.context, length_multiple=multiple)
    packs = pack(stage, pairs, max_length)
    found = [pair for sample in packs for pair in sample.pairs]
    assert sorted(map(dataclasses.astuple, found)) == sorted(map(dataclasses.astuple, pairs))
    lengths = stage.row_lengths(packs)
    assert lengths.max() <= max_length
    batch = stage.collate(packs)
    assert batch["input_ids"].shape == (2 * len(packs), -(-lengths.max() // multiple) * multiple)
    assert batch["num_tokens"] == stage.collate(pairs)["num_tokens"]
    assert ("document_starts" in batch) == (len(packs) < len(pairs))
    # the supervised tokens, from the arrays: each answer after its own prompt, and nothing else
    rows = supervised_sequences(batch)
    assert rows is not None
    documents = [
        (row.ids[row.documents == number].tolist(), row.weights[row.documents == number].tolist())
        for row in rows
        for number in np.unique(row.documents)
    ]
    expected = []
    for answer in (answer for row in chosen_then_rejected(packs) for answer in row):
        weights = [0] * len(answer.prompt) + [1] * len(answer.ids)
        expected.append((answer.prompt + answer.ids, weights if name == "dpo" else [0] * (len(answer) - 1) + [1]))
    assert documents == expected


def gradients(stage: PairStage, batches: Sequence[Sequence[Pair | Pairs]]) -> tuple[float, float, dict[str, Any]]:
    """Loss, its weight and the gradient of each parameter, summed over the batches."""
    model = dpo_case.model(num_hidden_layers=2, **({"head": "score"} if isinstance(stage, RmStage) else {}))
    loss = weight = 0.0
    for samples in batches:
        batch = stage.collate(samples)
        if isinstance(stage, DpoStage):  # a reference of which each answer has its own value
            batch["reference"] = -tokens_by_answer(batch).numpy() - np.array([
                sum(answer.ids) % 7 for row in chosen_then_rejected(samples) for answer in row
            ], "float32")  # fmt: skip
        terms = stage.loss(model, batch)
        terms.total.backward()
        loss = loss + float(terms.total)
        weight = weight + terms.weight
    return loss, weight, {name: p.grad.numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", STAGES)
@settings(max_examples=4)
@given(some, st.integers(13, 40))
def test_packed_or_not_is_the_same_loss_and_the_same_gradients(name: str, pairs: list[Pair], max_length: int) -> None:
    stage = STAGES[name]
    stage.context = dataclasses.replace(stage.context, length_multiple=1)
    packs = pack(stage, pairs, max_length)
    one_by_one = gradients(stage, [[pair] for pair in pairs])
    for batches in ([pairs], [packs], [[sample] for sample in packs]):
        loss, weight, found = gradients(stage, batches)
        assert loss == pytest.approx(one_by_one[0], rel=1e-6)
        assert weight == one_by_one[1]
        norm = np.sqrt(sum(float((g.astype("float64") ** 2).sum()) for g in one_by_one[2].values()))
        for key, gradient in one_by_one[2].items():
            assert np.linalg.norm(found[key] - gradient) <= 1e-6 * norm, key


PAIRS = [Pair([5 + i] * i, [40 * i, 7, 2], [9] * (6 - i) + [2]) for i in range(1, 6)]


@pytest.mark.parametrize("name", STAGES)
def test_joined_or_not_is_the_same_loss_and_the_same_gradients(name: str) -> None:
    # an answer of one token, and two pairs of one prompt
    pairs = [*PAIRS, Pair([77, 8], [2], [3, 2]), Pair(PAIRS[3].prompt, [31, 32, 2], [33, 2])]
    packs = pack(STAGES[name], pairs, 15)
    assert len(packs) < len(pairs)
    found = []
    for padding_free in (False, True):
        stage = type(STAGES[name])(DpoSection() if name == "dpo" else RmSection(), DPO.context)
        stage.context = dataclasses.replace(stage.context, length_multiple=1, padding_free=padding_free)
        found += [gradients(stage, [samples]) for samples in (pairs, packs)]
        if padding_free:
            read = stage.row_lengths(pairs).sum() - sum(len(pair.prompt) for pair in pairs) - len(pairs[3].prompt)
            assert stage.collate(pairs)["input_ids"].shape == (1, read), "no padding, and each prompt once"
    for loss, weight, joined in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert weight == found[0][1]
        norm = np.sqrt(sum(float((g.astype("float64") ** 2).sum()) for g in found[0][2].values()))
        for key, gradient in found[0][2].items():
            assert np.linalg.norm(joined[key] - gradient) <= 1e-6 * norm, key


@pytest.mark.parametrize("name", STAGES)
@settings(max_examples=30)
@given(some, st.integers(1, 8))
def test_answers_that_share_a_prompt_are_explained_with_their_own_copy(
    name: str, pairs: list[Pair], multiple: int
) -> None:
    stage = type(STAGES[name])(DpoSection() if name == "dpo" else RmSection(), DPO.context)
    plain = stage.collate(pairs)
    stage.context = dataclasses.replace(stage.context, length_multiple=multiple, padding_free=True)
    joined = stage.collate(pairs)
    assert len(joined["input_ids"]) == 1
    for key in ("num_tokens", "num_supervised", "weight"):
        assert joined[key] == plain[key]
    found = supervised_sequences(joined)
    expected = supervised_sequences(plain)
    assert found is not None
    assert expected is not None
    for of_answer in ("ids", "weights"):
        values = np.concatenate([getattr(row, of_answer) for row in found])
        assert values.tolist() == np.concatenate([getattr(row, of_answer) for row in expected]).tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_with_prepasses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, pairs = made(name, tmp_path, monkeypatch)
    packs = pack(stage, pairs, 160)
    assert len(packs) < len(pairs) - 1
    found = []
    for batches in ([pairs], [packs[:1], packs[1:]]):
        model = dpo_case.model()
        train = dpo_case.train_section(max_grad_norm=None)
        optimizer = Recording(alone.shards(dict(model.named_parameters())), train, total_steps=4)
        metrics = alone.step(1, batches, stage, model, optimizer)
        del metrics["reader_seconds"]
        found.append((metrics, optimizer.gradients))
    (expected, plain), (metrics, packed) = found
    # log-probabilities are about -100, of which float32 holds 1e-5; rewards are differences of them
    assert metrics == pytest.approx(expected, rel=1e-6, abs=2e-5)
    for key in ("loss", "grad_norm"):
        assert metrics[key] == pytest.approx(expected[key], rel=1e-6, abs=2e-6)
    for key, value in plain.items():
        assert np.linalg.norm(packed[key] - value) <= 3e-6 * np.linalg.norm(value), key


@pytest.mark.parametrize("made_of", [DpoStage, RmStage])
def test_the_stages_pack_the_pairs_of_a_file(made_of: Any) -> None:
    reported: list[str] = []
    context = dpo_case.stage(max_length=256, report=reported.append).context
    section = DpoSection() if made_of is DpoStage else RmSection()
    plain = made_of(section, context)
    data = dataclasses.replace(context.data, packing="best_fit")
    stage = made_of(section, dataclasses.replace(context, data=data))
    path = dpo_case.DATA / "preference" / "eval.jsonl"
    rows = plain.reader.read(path)
    packs = stage.reader.read(path)
    assert len(rows) == 48
    assert len(packs) < 12
    packed = [pair for sample in packs for pair in sample.pairs]
    assert sorted(map(dataclasses.astuple, packed)) == sorted(map(dataclasses.astuple, rows))
    lengths = stage.row_lengths(packs)
    full = lengths.sum() / (2 * len(packs) * 256)
    assert reported[-1] == f"{path}: packed into {len(packs)} samples, which are {full:.1%} full"
    assert lengths.sum() == plain.row_lengths(rows).sum()


def test_answers_keep_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each log-probability is subtracted the reference of the same answer."""
    monkeypatch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path)))
    stage = dpo_case.stage()
    pairs, _ = dpo_case.pairs(stage, dpo_case.rows(6))
    packs = pack(stage, pairs, 200)
    model = dpo_case.model()
    stage.before_training(model, packs)
    with paddle.no_grad():
        batch = stage.collate(packs)
        np.testing.assert_allclose(answer_logps(model, batch).numpy(), batch["reference"], rtol=1e-5)
    assert len(set(batch["reference"].tolist())) == 12
