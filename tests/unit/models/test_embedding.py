"""Embeddings with a choice of their lookup."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from llmsuite.base.errors import UserError
from llmsuite.models.embedding import Embedding, is_plain_embedding, set_lookup

IDS = [[3, 1, 3]]


def doubled(input_ids: Any, table: Any) -> Any:
    return 2.0 * F.embedding(input_ids, table)


@pytest.mark.parametrize("kind", [nn.Embedding, Embedding])
def test_a_lookup_is_chosen(kind: type) -> None:
    embedding = kind(7, 4)
    model = nn.Sequential(nn.Sequential(embedding), nn.Tanh())
    ids = paddle.to_tensor(IDS)
    expected = embedding(ids).numpy()
    set_lookup(model, "0.0", doubled, "tp")
    (chosen,) = model[0]
    assert isinstance(chosen, Embedding)
    assert chosen.weight is embedding.weight
    assert np.array_equal(chosen(ids).numpy(), 2.0 * expected)
    assert [name for name, _ in model.named_parameters()] == ["0.0.weight"]


def test_an_embedding_with_code_of_its_own_keeps_it() -> None:
    class Shifted(Embedding):
        def forward(self, input_ids: Any) -> Any:
            return super().forward(input_ids) + 1.0

    model = nn.Sequential(Shifted(7, 4))
    assert not is_plain_embedding(model[0])
    with pytest.raises(UserError, match=r"tp: 0 \(Shifted\) has a forward pass of its own"):
        set_lookup(model, "0", doubled, "tp")
