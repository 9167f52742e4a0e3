"""A padded vocabulary: which values its ranks get."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import local_slice
from llmsuite.parallel.vocabulary import is_padded, network_of, pad_values
from tests.support.families import FAMILIES


@given(
    st.integers(1, 40), st.sampled_from([1, 2, 4, 8]), st.sampled_from(["model.embed_tokens.weight", "lm_head.weight"])
)
def test_slices_of_all_ranks_are_the_values_and_zeros(size: int, tp: int, name: str) -> None:
    plan: Any = FAMILIES["llama"].shard_plan
    shape = (size, 3) if plan.dim(name) == 0 else (3, size)
    padded = tuple(-(-n // tp) * tp if n == size and d == plan.dim(name) else n for d, n in enumerate(shape))
    values = np.random.default_rng(size).standard_normal(shape, dtype="float32")
    read = pad_values(lambda found, whole, index: values[tuple(index)], {name: shape})
    degrees = Degrees(pp=1, dp=1, sharding=1, tp=tp)
    slices = [local_slice(name, padded, plan, Mesh(degrees, rank)) for rank in range(tp)]
    # the planner knows the true shape only
    assert slices == [local_slice(name, shape, plan, Mesh(degrees, rank)) for rank in range(tp)]
    whole = np.concatenate([read(name, padded, index) for index in slices], plan.dim(name))
    assert whole.shape == padded
    assert np.array_equal(whole[: shape[0], : shape[1]], values)
    assert np.count_nonzero(whole) == np.count_nonzero(values)


def test_what_is_padded() -> None:
    config = FAMILIES["gpt"].config_cls()
    assert [is_padded(config, tp) for tp in (1, 2, 4)] == [False, True, True]
    assert not is_padded(object(), 2)


@pytest.mark.parametrize("found", [None, object])
def test_a_factory_that_gives_no_network(found: Any) -> None:
    family = dataclasses.replace(FAMILIES["llama"], factory=lambda: found)
    with pytest.raises(UserError, match=r"model llama: its factory returned .*; it has to return a class derived from"):
        network_of(family)
