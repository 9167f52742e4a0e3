"""Generation: the cache changes nothing, and tokens are sampled with the requested probabilities."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.generate import generate as generate_ids
from llmsuite.inference.load import load_model
from llmsuite.inference.sampling import Sampling, random_generator, sample_token
from tests.support import tiny_llama
from tests.support.tiny_llama import CONFIG, FAMILIES

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_k=5, seed=4),
    Sampling(temperature=2.0, top_p=0.8, seed=5),
]
CONFIGS = {"grouped": CONFIG, "tied": tiny_llama.tied(), "one head": dataclasses.replace(CONFIG, num_key_value_heads=1)}


def generate(model: Any, prompt: list[int], stop_ids: set[int], num_tokens: int, sampling: Sampling) -> Iterator[int]:
    """New tokens of a live model."""
    wanted = dataclasses.replace(sampling, max_new_tokens=num_tokens)
    return generate_ids(ModelDecoder(model), prompt, stop_ids, wanted)


def without_cache(model: Any, prompt: list[int], num_tokens: int, sampling: Sampling) -> list[int]:
    """Generate without a cache: every pass reads the full text again."""
    random = random_generator(sampling.seed)
    ids = list(prompt)
    with paddle.no_grad():
        for _ in range(num_tokens):
            ids.append(sample_token(model(paddle.to_tensor([ids])).numpy()[0, -1], sampling, random))
    return ids[len(prompt) :]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "plain", "top_k", "top_p"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("prompt", [[3], [1, 7, 2, 11, 5]])
def test_the_cache_changes_no_token(name: str, sampling: Sampling, prompt: list[int]) -> None:
    seen = set()
    for seed in (1, 2, 3):
        model = tiny_llama.model(CONFIGS[name], seed, generates=True)
        tokens = list(generate(model, prompt, set(), 12, sampling))
        assert tokens == without_cache(model, prompt, 12, sampling)
        seen.update(tokens)
    assert len(seen) > 3, "models that repeat themselves would hide a cache that is stale"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama.model(seed=2, generates=True)


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(model: Any) -> None:
    sampling = Sampling(temperature=1.5, seed=1)
    tokens = list(generate(model, [3], set(), 20, sampling))
    for stop_ids in ({tokens[4]}, {tokens[6], tokens[2]}, {tokens[0]}):
        end = next(i for i, token in enumerate(tokens) if token in stop_ids)
        assert list(generate(model, [3], stop_ids, 20, sampling)) == tokens[:end]
    # in the prompt it stops nothing
    assert list(generate(model, [3], {3} - set(tokens), 20, sampling)) == tokens


def test_max_new_tokens_is_the_limit_and_tokens_come_one_by_one(model: Any) -> None:
    sampling = Sampling(temperature=1.0, seed=1)
    assert list(generate(model, [3], set(), 0, sampling)) == []
    assert len(list(generate(model, [3], set(), 1, sampling))) == 1
    five = list(generate(model, [3], set(), 5, sampling))
    assert five == list(itertools.islice(generate(model, [3], set(), 10**9, sampling), 5))


def test_the_callers_gradients_stay_on_between_tokens(model: Any) -> None:
    tokens = generate(model, [3], set(), 3, Sampling())
    next(tokens)
    assert paddle.is_grad_enabled()
    with paddle.no_grad():
        next(tokens)
        assert not paddle.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_seed_decides(model: Any) -> None:
    texts = [tuple(generate(model, [3], set(), 12, Sampling(temperature=1.0, seed=seed))) for seed in range(8)]
    again = [tuple(generate(model, [3], set(), 12, Sampling(temperature=1.0, seed=seed))) for seed in range(8)]
    assert texts == again
    assert len(set(texts)) > 5


def test_load_model_is_ready_to_answer(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path, seed=2)
    loaded = load_model(open_model(tmp_path, FAMILIES), CpuBackend())
    expected = tiny_llama.model(seed=2)
    assert not loaded.training
    ids = paddle.to_tensor([[1, 7, 2]])
    assert np.abs(loaded(ids).numpy() - expected(ids).numpy()).max() <= 1e-5


# exact in binary, so that the boundaries of top_p are exact too: 1/2, 1/4, 1/8, 1/8 in a shuffled order
LOGITS = np.log(np.asarray([0.125, 0.5, 0.125, 0.25]))


def support(sampling: Sampling, logits: np.ndarray = LOGITS, draws: int = 400) -> set[int]:
    random = np.random.Generator(np.random.Philox(0))
    return {sample_token(logits, sampling, random) for _ in range(draws)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 1.5),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", float("inf")),
        ("min_new_tokens", 129),
        ("stop", ("a", "")),
        ("seed", -1),
    ],
)
def test_a_value_that_cannot_be_is_named(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{name}: is "):
        Sampling(**{name: value})


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=9))
def test_greedy_takes_the_first_of_the_most_likely(values: list[float]) -> None:
    logits = np.asarray(values, "float32")
    random = np.random.Generator(np.random.Philox(0))
    for sampling in (Sampling(), Sampling(top_k=2, top_p=0.5), Sampling(temperature=1.0, top_k=1)):
        assert sample_token(logits, sampling, random) == values.index(max(values))


@pytest.mark.parametrize(
    ("k", "expected"), [(0, {0, 1, 2, 3}), (1, {1}), (2, {1, 3}), (3, {0, 1, 3}), (9, {0, 1, 2, 3})]
)
def test_top_k(k: int, expected: set[int]) -> None:
    assert support(Sampling(temperature=1.0, top_k=k)) == expected


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.0, {1}),
        (0.25, {1}),
        (0.5, {1}),
        (0.51, {1, 3}),
        (0.75, {1, 3}),
        (0.76, {0, 1, 3}),
        (0.875, {0, 1, 3}),
        (0.9, {0, 1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_top_p_is_the_smallest_set_that_reaches_it(p: float, expected: set[int]) -> None:
    assert support(Sampling(temperature=1.0, top_p=p)) == expected


@pytest.mark.parametrize(
    ("p", "expected"), [(0.0, {0, 1, 2, 3}), (0.25, {0, 1, 2, 3}), (0.26, {1, 3}), (0.5, {1, 3}), (0.51, {1}), (1, {1})]
)
def test_min_p_is_a_fraction_of_the_highest_probability(p: float, expected: set[int]) -> None:
    assert support(Sampling(temperature=1.0, min_p=p)) == expected


def test_ties_at_the_border_of_top_k_fall_to_the_first() -> None:
    assert support(Sampling(temperature=1.0, top_k=3)) == {0, 1, 3}
    assert support(Sampling(temperature=1.0, top_k=2), np.zeros(5)) == {0, 1}


def test_top_p_applies_to_what_top_k_and_temperature_leave() -> None:
    # of the two most likely, 2/3 and 1/3
    assert support(Sampling(temperature=1.0, top_k=2, top_p=0.66)) == {1}
    assert support(Sampling(temperature=1.0, top_k=2, top_p=0.67)) == {1, 3}
    # at temperature 1/2: 16/22, 4/22, 1/22, 1/22
    assert support(Sampling(temperature=0.5, top_p=0.72)) == {1}
    assert support(Sampling(temperature=0.5, top_p=0.73)) == {1, 3}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    assert support(Sampling(temperature=temperature), np.asarray([3.0, 1e4, -1e4]), 20) == {1}
    assert support(Sampling(temperature=temperature), np.asarray([3.0, 3.0, -1e4]), 20) == {0, 1}


def test_masked_tokens_are_never_sampled() -> None:
    assert support(Sampling(temperature=5.0), np.asarray([0.0, -np.inf, 1.0])) == {0, 2}


def test_logits_that_are_rounded_otherwise_draw_the_same_tokens() -> None:
    logits = np.random.default_rng(1).normal(0, 2, 20000)
    rounded = logits + 1e-5 * (np.arange(len(logits)) < 10000)
    sampled = [
        [sample_token(given, Sampling(temperature=1.3), random_generator(seed)) for seed in range(200)]
        for given in (logits, rounded)
    ]
    assert sampled[0] == sampled[1]
    assert len(set(sampled[0])) > 150


def exact(sampling: Sampling, logits: np.ndarray) -> np.ndarray:
    """The distribution by its definition: softmax at the temperature, cut by top_k, then by top_p."""
    weights = np.exp(logits / sampling.temperature)
    ranked = sorted(range(len(logits)), key=lambda i: (-weights[i], i))[: sampling.top_k or None]
    total = sum(weights[i] for i in ranked)
    reached = 0.0
    kept = []
    for i in ranked:
        if reached >= sampling.top_p:
            break
        kept.append(i)
        reached += weights[i] / total
    kept = [i for i in kept if weights[i] >= sampling.min_p * max(weights)]
    return np.asarray([weights[i] if i in kept else 0.0 for i in range(len(logits))]) / sum(weights[i] for i in kept)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6),
        Sampling(temperature=2.5),
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=1.3, top_p=0.7),
        Sampling(temperature=1.3, top_k=5, top_p=0.9),
        Sampling(temperature=1.3, min_p=0.3),
        Sampling(temperature=0.9, top_k=6, top_p=0.95, min_p=0.2),
    ],
)
def test_frequencies_are_those_of_the_exact_distribution(sampling: Sampling) -> None:
    logits = np.asarray([0.3, -1.2, 2.0, 0.0, 1.1, -0.4, 0.9, 1.9])
    probabilities = exact(sampling, logits)
    random = np.random.Generator(np.random.Philox(11))
    draws = 8000
    sampled = [sample_token(logits, sampling, random) for _ in range(draws)]
    counts = np.bincount(sampled, minlength=8)
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = probabilities[possible] * draws
    chi_square = float(((counts[possible] - expected) ** 2 / expected).sum())
    # 99.9 % of the chi-square distribution with 1 to 7 degrees of freedom
    limit = [0.0, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32][int(possible.sum()) - 1]
    assert possible.sum() > 1
    assert chi_square < limit
