"""Stage 3 around a model: parameters are whole while a module computes, in parts otherwise, and nothing is changed."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.models.dense_plan import PLAN
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.recompute import recompute_layers
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.zero3 import Zero3Hooks
from tests.support import many, tiny_llama

DEGREES = Degrees(pp=1, dp=1, sharding=2, tp=1)
IDS = [np.random.default_rng(rank).integers(0, 19, (2, 7)) for rank in range(2)]
CONFIGS = {"untied": tiny_llama.CONFIG, "tied": tiny_llama.tied()}


def loss_of(model: Any, rank: int) -> Any:
    ids = paddle.to_tensor(IDS[rank])
    hidden, _ = model.hidden_states(ids)
    return model.token_nll(hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).sum()


class Watched(ParameterShard):
    """Counts what is whole at once, and how often it was brought together."""

    def __init__(self, *arguments: Any, counts: collections.Counter[str]):
        self.counts = counts
        super().__init__(*arguments)

    def start_gather(self) -> None:
        if not self.parameter._is_initialized() and self._arriving is None:
            self.counts[self.name] += 1
            self.counts["now"] += self.parameter.size
            self.counts["peak"] = max(self.counts["peak"], self.counts["now"])
        super().start_gather()

    def free(self) -> None:
        if hasattr(self, "_arriving") and (self.parameter._is_initialized() or self._arriving):
            self.counts["now"] -= self.parameter.size
        super().free()


def cut_model(config: Any, mesh: Mesh, ahead: bool) -> tuple[Any, list[Watched], collections.Counter[str]]:
    counts: collections.Counter[str] = collections.Counter()
    model = tiny_llama.model(config)
    shards = [Watched(n, p, mesh, None, 3, counts=counts) for n, p in model.named_parameters()]
    Zero3Hooks(model, PLAN, shards, config.tie_word_embeddings, ahead)
    counts.clear()
    return model, shards, counts


def largest_units(config: Any, ahead: bool) -> int:
    """Elements that are gathered at once: of a decoder layer, with `ahead` two of them, or of the embedding."""
    layer = sum(v.size for n, v in tiny_llama.values(config).items() if n.startswith("model.layers.0."))
    table = config.vocab_size * config.hidden_size
    return max((1 + ahead) * layer, table)


@pytest.mark.parametrize(("ahead", "backend"), [(False, "GLOO"), (True, "GLOO"), (True, "NCCL")])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_model_in_parts_computes_what_it_computes_whole(config: Any, ahead: bool, backend: str) -> None:
    def work(mesh: Mesh) -> tuple[list[float], dict[str, np.ndarray]]:
        model, shards, counts = cut_model(config, mesh, ahead)
        with paddle.no_grad():
            losses = [float(loss_of(model, mesh.rank))]
        assert counts["now"] == 0, "what an evaluation has gathered is freed"
        assert set(counts.values()) - {counts["peak"]} <= {0, 1, 2}  # the tied embedding is used twice
        counts.clear()

        model.train()
        for _ in range(2):  # two micro-batches
            total = loss_of(model, mesh.rank)
            assert counts["now"] == 0, "parameters are freed before the backward pass"
            total.backward()
            assert counts["now"] == 0, "and after it"
            assert all(shard.parameter.grad is None for shard in shards)
            losses.append(float(total))
        assert counts["peak"] == largest_units(config, ahead), "one layer at a time, or two"
        # once forward and once backward, of each micro-batch
        assert counts["model.layers.0.mlp.up_proj.weight"] == counts["model.norm.weight"] == 4
        own = {shard.name: shard.finish_gradient() for shard in shards}
        whole = {
            s.name: s.gather_shard(own[s.name] if own[s.name] is not None else s.main_param.detach()) for s in shards
        }
        return losses, {name: value.numpy() for name, value in whole.items()}

    found = many.run(DEGREES, work, backend)
    model = tiny_llama.model(config)
    for rank, (losses, _) in enumerate(found):
        total = loss_of(model, rank)
        total.backward()
        assert losses == pytest.approx([float(total)] * 3, rel=1e-6)
    for name, parameter in model.named_parameters():
        for _, gradients in found:
            np.testing.assert_allclose(gradients[name], 2 * parameter.grad.numpy(), rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("ahead", [False, True], ids=["alone", "ahead"])
def test_a_layer_that_is_computed_again_is_gathered_once_for_it(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """On one rank, whose neighbour has the same part: Paddle's recompute is not for threads."""
    monkeypatch.setattr(
        collective, "start_all_gather", lambda part, group, dim=0: lambda: paddle.concat([part, part], axis=dim)
    )
    monkeypatch.setattr(
        collective, "start_reduce_scatter", lambda flat, group: (flat[: flat.shape[0] // 2].clone(), None)
    )
    monkeypatch.setattr(Mesh, "group", lambda self, kind: None)
    results = []
    for recompute in (False, True):
        model, shards, counts = cut_model(tiny_llama.CONFIG, Mesh(DEGREES, 0), ahead)
        if recompute:
            recompute_layers(model, PLAN, every=1)
        model.train()
        total = loss_of(model, 0)
        assert counts["now"] == 0
        total.backward()
        assert counts["now"] == 0
        assert counts["peak"] == largest_units(tiny_llama.CONFIG, ahead)
        assert {counts[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2)} == {2}
        results.append([float(total), *(shard._sum.numpy() for shard in shards)])
    for plain, again in zip(*results):
        assert np.array_equal(plain, again)


def test_a_layer_that_some_passes_leave_out_does_not_arrive_ahead() -> None:
    def work(mesh: Mesh) -> None:
        counts: collections.Counter[str] = collections.Counter()
        model = tiny_llama.model()
        model.model.layers[1].is_mtp = True
        shards = [Watched(n, p, mesh, None, 3, counts=counts) for n, p in model.named_parameters()]
        Zero3Hooks(model, PLAN, shards, is_tied=False, ahead=True)
        counts.clear()
        with paddle.no_grad():
            loss_of(model, mesh.rank)
        assert counts["model.layers.0.mlp.up_proj.weight"] == 1
        assert counts["model.layers.1.mlp.up_proj.weight"] == counts["now"] == 0

    many.run(DEGREES, work)


def test_a_parameter_in_no_module_of_the_plan_is_our_bug() -> None:
    def work(mesh: Mesh) -> None:
        model = tiny_llama.model()
        model.bias = model.create_parameter([3])
        shards = [ParameterShard(n, p, mesh, None, 3) for n, p in model.named_parameters()]
        with pytest.raises(AssertionError, match=r"no module for \['bias'\]"):
            Zero3Hooks(model, PLAN, shards, is_tied=False, ahead=False)

    many.run(DEGREES, work)
