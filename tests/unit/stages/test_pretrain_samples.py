"""Samples of pretraining as data: what is cut from a corpus, in which order it is seen, and by whom."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.base.cache import isolated_cache
from llmsuite.base.errors import RecipeError, UserError
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.generation import GenerationSection
from llmsuite.contract.schema.recipe import DataSection
from llmsuite.data.indexed_corpus import CorpusWriter
from llmsuite.data.loader import BatchSampler, SampleOrder, feistel_permute
from llmsuite.data.mixture import Mixture
from llmsuite.data.token_windows import TokenWindows, split_bounds
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.engine.stage import StageContext
from llmsuite.recipe.resolve import plan_run
from llmsuite.stages.pretrain import PretrainStage
from llmsuite.stages.sections import PretrainSection
from tests.support.dpo_case import model, train_section
from tests.support.paths import DATA


@given(num_tokens=st.integers(0, 200), length=st.integers(1, 40))
def test_every_token_but_the_first_is_predicted_once(num_tokens: int, length: int) -> None:
    samples = TokenWindows(np.arange(num_tokens), length)
    targets = [token for sample in samples for token in sample[1:].tolist()]
    assert targets == list(range(1, len(samples) * length + 1))
    assert num_tokens - 1 - len(targets) < length  # what is left is no whole sample
    assert all((sample[1:] == sample[:-1] + 1).all() for sample in samples)


@given(
    num_tokens=st.integers(2, 100),
    start=st.integers(-30, 30) | st.none(),
    stop=st.integers(-30, 30) | st.none(),
    step=st.integers(1, 7),
    count=st.integers(1, 60),
)
def test_slices_are_those_of_a_list(
    num_tokens: int, start: int | None, stop: int | None, step: int, count: int
) -> None:
    samples = TokenWindows(np.arange(num_tokens), 1)
    listed = [sample.tolist() for sample in samples]
    assert [s.tolist() for s in samples[start:stop:step]] == listed[start:stop:step]
    spread = [s.tolist() for s in samples.spread(count)]
    assert len(spread) == min(count, len(listed))
    assert all(sample in listed for sample in spread)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 600), name=st.text(max_size=5))
def test_shuffled_is_a_permutation(size: int, name: str) -> None:
    assert sorted(feistel_permute(i, size, name) for i in range(size)) == list(range(size))


def test_shuffled_is_even() -> None:
    counts = np.zeros([7, 7])
    for epoch in range(3000):
        for i in range(7):
            counts[i, feistel_permute(i, 7, f"{epoch}")] += 1
    expected = 3000 / 7
    assert (np.abs(counts - expected) < 5 * math.sqrt(expected)).all()  # five standard deviations


def test_a_large_order_is_a_function_of_position_alone() -> None:
    order = SampleOrder(10**12, 3)
    seen = [order.at(position) for position in range(1000)]
    assert len(set(seen)) == 1000
    assert seen != [order.at(10**12 + i) for i in range(1000)]  # the next pass
    assert np.mean(seen) == pytest.approx(5e11, rel=0.1)
    assert SampleOrder(10**12, 3).at(999) == seen[999]
    assert SampleOrder(10**12, 4).at(999) != seen[999]


def consumed(samples: Sequence[np.ndarray], seed: int, num_ranks: int, steps: int, size: int, micro: int) -> list[str]:
    """Hashes of the samples in the order of the global batches, each made by the rank that sees it."""
    dealer = BatchSampler(SampleOrder(len(samples), seed), size, micro, num_ranks)
    hashes = []
    accumulate = size // (micro * num_ranks)
    for step in range(steps):
        by_rank = [dealer.micro_batches(step * size, rank) for rank in range(num_ranks)]
        for at in range(accumulate):
            for rank in range(num_ranks):
                hashes += [hashlib.sha256(samples[i].tobytes()).hexdigest() for i in by_rank[rank][at]]
    return hashes


@given(
    sizes=st.lists(st.integers(20, 300), min_size=1, max_size=3),
    weights=st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
    seed=st.integers(0, 2**32),
    micro=st.integers(1, 3),
)
def test_the_tokens_seen_do_not_depend_on_the_ranks(
    sizes: list[int], weights: list[float], seed: int, micro: int
) -> None:
    parts = [TokenWindows(np.arange(size) + 1000 * i, 10) for i, size in enumerate(sizes)]
    samples: Sequence[np.ndarray] = parts[0] if len(parts) == 1 else Mixture(parts, weights)
    one, two, four = (consumed(samples, seed, ranks, 3, 4 * micro, micro) for ranks in (1, 2, 4))
    assert one == two == four
    assert len(one) == 12 * micro
    assert one == consumed(samples, seed, 1, 3, 4 * micro, 4 * micro)  # nor on the accumulation


@given(lengths=st.lists(st.integers(1, 50), min_size=2, max_size=4), weights=st.lists(st.floats(0.1, 10), min_size=4))
def test_a_pass_over_a_mixture(lengths: list[int], weights: list[float]) -> None:
    weights = weights[: len(lengths)]
    samples = Mixture([TokenWindows(np.arange(n + 1) + 100 * i, 1) for i, n in enumerate(lengths)], weights)
    counts = Counter(int(sample[0]) for sample in samples)
    assert set(counts) == {100 * i + j for i, n in enumerate(lengths) for j in range(n)}  # all of every corpus
    taken = [sum(count for token, count in counts.items() if token // 100 == i) for i in range(len(lengths))]
    scale = max(n / w for n, w in zip(lengths, weights))
    assert all(abs(found - scale * weight) <= 1 for found, weight in zip(taken, weights))
    assert any(found == n for found, n in zip(taken, lengths))  # one of them just once
    for i, n in enumerate(lengths):  # and the samples of each equally often, but for one
        of_this = [counts[100 * i + j] for j in range(n)]
        assert max(of_this) - min(of_this) <= 1


@given(num_documents=st.integers(0, 5000), parts=st.lists(st.integers(1, 1000), min_size=2, max_size=3))
def test_split_bounds_follow_the_shares(num_documents: int, parts: list[int]) -> None:
    first, last = split_bounds(num_documents, ",".join(map(str, parts)))
    assert 0 <= first <= last <= num_documents
    assert abs(first - num_documents * parts[0] / sum(parts)) <= 0.5
    assert len(parts) == 3 or last == num_documents


def stage(
    max_length: int = 8,
    length_multiple: int = 1,
    report: Any = lambda text: None,
    mtp_loss_weight: float = 0.0,
    max_new_tokens: int | None = None,
    **keys: Any,
) -> PretrainStage:
    context = StageContext(
        stage_name="pretrain",
        data=DataSection(train="nothing", max_length=max_length),
        train=train_section(mtp_loss_weight=mtp_loss_weight),
        seed=42,
        generation=GenerationSection(max_new_tokens=max_new_tokens),
        tokenizer=TextTokenizer(DATA / "tokenizer"),
        template=lambda: pytest.fail("there are no conversations"),
        data_formats={},
        initial_digest=lambda: "model",
        length_multiple=length_multiple,
        report=report,
    )
    return PretrainStage(PretrainSection(**keys), context)


@pytest.mark.parametrize(
    ("is_masked", "tokens", "wanted"),
    [
        (False, [5, 2, 6, 7, 8, 9, 10, 11, 12], [((5, 2, 6, 7, 8), (9, 10, 11))]),
        (True, [5, 2, 6, 7, 8, 9, 10, 11, 12], [((6, 7, 8), (9, 10, 11))]),
        (False, [5, 4, 6, 7, 8, 9, 2, 11, 12], [((5, 4, 6, 7, 8), (9,))]),
        (True, [5, 4, 6, 7, 2, 9, 10, 11, 12], []),
    ],
)
def test_the_end_of_a_sample_is_the_evaluated_answer(is_masked: bool, tokens: list[int], wanted: list[Any]) -> None:
    made = stage(max_length=8, max_new_tokens=3, document_mask=is_masked)  # 2 is the end-of-sequence token
    found = made.eval_prompts(np.array(tokens, "uint16"))
    assert [(question.prompt, question.answer) for question in found] == wanted


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """100 documents of 10 tokens; document d is of token d."""
    with CorpusWriter(tmp_path / "c", "<u2") as writer:
        for document in range(100):
            writer.add(np.full(10, document, "<u2").tobytes(), np.full(1, 10, "<i4").tobytes())
        writer.commit()
    return tmp_path / "c.idx"


def test_split_is_by_documents(corpus: Path) -> None:
    train, held_back = stage(split="80,15,5").reader.read_all(corpus, {})
    assert set(np.concatenate(list(train))) == set(range(80))
    assert set(np.concatenate(list(held_back[""]))) == set(range(80, 95))
    assert len(train) == 799 // 8
    _, few = stage(split="80,15,5", max_eval_samples=3).reader.read_all(corpus, {})
    assert len(few[""]) == 3
    whole, given = stage(split="80,15,5").reader.read_all(corpus, {"": corpus})  # data.eval comes first
    assert len(whole) == len(given[""]) == 999 // 8
    assert stage().reader.read_all(corpus, {})[1] == {"": []}


def test_a_mixture_of_files(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path / "cache")))
    (tmp_path / "a.txt").write_text("Something else.\n\n" * 30)
    reported: list[str] = []
    mixed = stage(mix={str(tmp_path / "a.txt"): 0.25}, split="9,1", report=reported.append)
    train, held_back = mixed.reader.read_all(corpus, {})
    assert len(train) == 112 + 28  # of 900 tokens in windows of 8, and a quarter of that
    assert [text.startswith("the evaluation part") for text in reported] == [True, False, True, False]
    assert len(held_back[""]) > 12  # those of the corpus and some of the text
    assert mixed.reader.mixed_files() == {f"pretrain.mix {tmp_path / 'a.txt'}": tmp_path / "a.txt"}
    with pytest.raises(UserError, match=r"pretrain\.mix: nowhere is not a file"):
        stage(mix={"nowhere": 1.0}).reader.read_all(corpus, {})


def test_faulty_rows_of_text(tmp_path: Path, write_recipe: Callable[..., Path], capsys: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one two three four"}\n{"text": 5}\n' * 3)
    recipe = write_recipe({"stage": "pretrain", "data.train": str(path), "data.max_length": 4})
    assert main(["data", "stats", str(recipe)]) == 2
    assert f"{path}:2: 'text' is a int, not text" in capsys.readouterr().err
    for _ in range(2):  # the second time from the cache
        assert main(["data", "stats", str(recipe), "--data.on_bad_row=skip"]) == 0
        out = capsys.readouterr().out
        assert "  rows       6 read, 3 used, 3 dropped\n" in out
        assert f"dropped: 3 that cannot be read: 'text' is a int, not text (3, first at {path}:2)\n" in out


def test_too_little_text(corpus: Path) -> None:
    with pytest.raises(UserError, match=r"has 1000 tokens; one sample takes data\.max_length 1000 and one more"):
        stage(max_length=1000).reader.read(corpus)
    assert len(stage(max_length=999).reader.read(corpus)) == 1
    with pytest.raises(UserError, match=r"the evaluation part of .* has 0 tokens"):
        stage(split="999,1").reader.read_all(corpus, {})


@pytest.mark.parametrize("wrong", [512, -1])
def test_ids_of_another_tokenizer(wrong: int) -> None:
    made = stage(max_length=2)
    message = rf"data\.train or data\.eval: has token {wrong}, and model\.tokenizer knows 512"
    with pytest.raises(UserError, match=message):
        made.collate([np.array([1, 2, wrong])])


def test_padding_changes_no_loss(corpus: Path) -> None:
    llama = model(seed=1)
    samples = [np.random.default_rng(i).integers(0, 512, 9) for i in range(3)]
    losses = []
    for multiple in (1, 64):
        made = stage(length_multiple=multiple)
        batch = made.collate(samples)
        assert batch["input_ids"].shape == (3, 8 if multiple == 1 else 64)
        assert batch["num_tokens"] == batch["num_supervised"] == 24
        terms = made.loss(llama, batch)
        assert terms.weight == 24
        losses.append(float(terms.total))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    # against the definition: the model on each sample alone, a softmax in float64
    import paddle

    total = 0.0
    for sample in samples:
        hidden, _ = llama.hidden_states(paddle.to_tensor(sample[None, :-1]))
        logits = llama.logits(hidden).numpy()[0].astype("float64")
        total += sum(np.log(np.exp(row).sum()) - row[target] for row, target in zip(logits, sample[1:]))
    assert losses[0] == pytest.approx(total, rel=1e-6)


def documents_in(sample: np.ndarray, eos: int) -> list[np.ndarray]:
    """Each with the end-of-sequence token after it; the first one may have started before the sample."""
    ends = np.flatnonzero(sample == eos) + 1
    return [part for part in np.split(sample, ends) if len(part)]


@given(st.lists(st.lists(st.sampled_from([2, 2, 5, 6, 7, 8]), min_size=9, max_size=9), min_size=1, max_size=3))
def test_masked_documents_are_as_if_they_were_alone(rows: list[list[int]]) -> None:
    import paddle

    samples = [np.array(sample) for sample in rows]
    llama = model(seed=1, num_hidden_layers=1)
    total = 0.0
    count = 0
    for document in (d for sample in samples for d in documents_in(sample, 2) if len(d) > 1):
        hidden, _ = llama.hidden_states(paddle.to_tensor(document[None, :-1]))
        logits = llama.logits(hidden).numpy()[0].astype("float64")
        total += sum(np.log(np.exp(row).sum()) - row[target] for row, target in zip(logits, document[1:]))
        count += len(document) - 1
    for multiple in (1, 16):
        made = stage(length_multiple=multiple, document_mask=True)
        batch = made.collate(samples)
        assert (batch["num_tokens"], batch["num_supervised"]) == (8 * len(samples), count)
        terms = made.loss(llama, batch)
        assert terms.weight == count
        assert float(terms.total) == pytest.approx(total, rel=1e-6, abs=1e-6)


@given(
    st.lists(st.lists(st.sampled_from([2, 2, 5, 6, 7, 8]), min_size=9, max_size=9), min_size=1, max_size=3),
    st.booleans(),
)
def test_tokens_with_two_of_their_document_before_them_are_predicted_by_these(
    rows: list[list[int]], mask: bool
) -> None:
    samples = [np.array(sample) for sample in rows]
    batch: Any = stage(length_multiple=5, document_mask=mask, mtp_loss_weight=0.3).collate(samples)
    found = [
        (batch["input_ids"].flat[at], batch["next_ids"].flat[at], target)
        for at, target, weight in zip(batch["mtp_positions"], batch["mtp_targets"], batch["mtp_weights"])
        if weight
    ]
    documents = (d for sample in samples for d in (documents_in(sample, 2) if mask else [sample]))
    assert found == [triple for document in documents for triple in zip(document, document[1:], document[2:])]


def test_documents_without_an_end_token_are_refused(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path / "c", "<u2") as writer:
        writer.add(np.arange(3, 43, dtype="<u2").tobytes(), np.full(4, 10, "<i4").tobytes())
        writer.commit()
    assert len(stage().reader.read(tmp_path / "c.idx")) == 4
    with pytest.raises(
        UserError, match=r"document_mask: .*c\.idx: none of its first 4 documents ends with token 2, the"
    ):
        stage(document_mask=True).reader.read(tmp_path / "c.idx")


@pytest.mark.parametrize("split", ["", "9", "9,0", "0,1", "1,2,3,4", "1,2,", "1.2.3,1", "-1,2", "nan,1", "9;1"])
def test_wrong_splits(split: str, registry: Registry) -> None:
    with pytest.raises(RecipeError, match=r"pretrain\.split: is .* it has to be such as"):
        plan_run("recipes/llama/pretrain.json", [f"--pretrain.split={split!r}".replace("'", '"')], registry)


def test_best_metric_of_a_split(registry: Registry) -> None:
    words = ["--data.eval=null", "--checkpoint.best_metric=eval/loss"]
    plan_run("recipes/llama/pretrain.json", [*words, '--pretrain.split="9,1"'], registry)
    with pytest.raises(RecipeError, match=r"checkpoint\.best_metric"):
        plan_run("recipes/llama/pretrain.json", [*words, "--pretrain.split=null"], registry)


def test_a_prefix_names_its_index(corpus: Path, registry: Registry) -> None:
    for name in (corpus.with_suffix(""), corpus):
        plan = plan_run("recipes/llama/pretrain.json", [f"--data.train={name}"], registry, smoke=True)
        plan.check_files()
        assert plan.data.train_file == corpus
