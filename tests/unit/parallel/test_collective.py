"""Collectives outside of the model: which ranks are counted, and which part belongs to which rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.parallel import collective
from llmsuite.parallel.loss_ledger import LossLedger, LossTerms
from llmsuite.parallel.mesh import Mesh
from tests.support import many

TWO = Degrees(1, 2, 1, 1)
every_mesh = pytest.mark.parametrize("degrees", many.MESHES, ids=str)


@every_mesh
def test_sums_are_exact_in_float64(degrees: Degrees) -> None:
    # a tenth more than float32 can tell apart: the sums are made in float64
    fine = 1 + 2.0**-40

    def work(mesh: Mesh) -> tuple[list[float], ...]:
        sums = [collective.sum_over_run([mesh.rank * fine, 1.0]), collective.broadcast_from_rank0([mesh.rank + fine])]
        if mesh.loads_data:
            sums += [collective.sum_over_data([mesh.data_rank * fine, 1.0]), collective.sum_over_loader_ranks([1.0])]
        return tuple(sums)

    ranks = degrees.num_ranks
    data_ranks = degrees.num_data_ranks
    middle = ranks // degrees.pp * max(0, degrees.pp - 2)
    num_middle = 0
    for run, first, *readers in many.run(degrees, work):
        assert run == [fine * sum(range(ranks)), ranks]
        assert first == [fine]
        assert readers in ([], [[fine * sum(range(data_ranks)), data_ranks], [ranks - middle]])
        num_middle += readers == []
    assert num_middle == middle


def test_alone_nothing_is_sent() -> None:
    assert collective.sum_over_run([1.5]) == collective.sum_over_data([1.5]) == [1.5]
    assert collective.sum_over_loader_ranks([1.5]) == collective.broadcast_from_rank0([1.5]) == [1.5]
    tensor = paddle.to_tensor([1.0, 2.0])
    collective.sum_in_group(tensor, None)
    assert collective.start_reduce_scatter(tensor, None) == (tensor, None)
    assert collective.all_gather(tensor, None) is tensor
    assert tensor.tolist() == [1.0, 2.0]


@every_mesh
@pytest.mark.parametrize("group", ["tensor_group", "data_group", "dp_group", "sharding_group", "pipeline_group"])
@pytest.mark.parametrize("backend", ["GLOO", "NCCL"])
def test_within_a_group(degrees: Degrees, group: str, backend: str) -> None:
    def brings(rank: int) -> np.ndarray:
        return np.float32([[rank, 2 * rank, 1]])

    def work(mesh: Mesh) -> None:
        members = mesh.rows(*AXES[group])
        (row,) = (list(row) for row in members if mesh.rank in row)
        mine: Any = getattr(mesh, group)
        whole = paddle.to_tensor(brings(mesh.rank))
        collective.sum_in_group(whole, mine)
        assert np.array_equal(whole.numpy(), sum(brings(rank) for rank in row))
        for dim in (0, 1):
            joined = collective.all_gather(paddle.to_tensor(brings(mesh.rank)), mine, dim)
            assert np.array_equal(joined.numpy(), np.concatenate([brings(rank) for rank in row], dim))
        # 2 elements for each member, in the order of the group
        flat = np.arange(2 * len(row), dtype="float32")
        part, arrival = collective.start_reduce_scatter(paddle.to_tensor(flat * (mesh.rank + 1)), mine)
        if arrival is not None:
            arrival.wait()
        at = row.index(mesh.rank)
        assert part.tolist() == [sum(rank + 1 for rank in row) * value for value in (2 * at, 2 * at + 1)]

    many.run(degrees, work, backend)


AXES = {
    "tensor_group": ("tp",),
    "data_group": ("dp", "sharding"),
    "dp_group": ("dp",),
    "sharding_group": ("sharding",),
    "pipeline_group": ("pp",),
}


@every_mesh
def test_a_ledger_counts_each_sample_once(degrees: Degrees) -> None:
    """Ranks of a tensor parallel group book the same, those in front of a pipeline's end book nothing real, and those
    in its middle nothing at all."""
    asked: set[int] = set()

    def work(mesh: Mesh) -> tuple[float, dict[str, float]]:
        ledger = LossLedger()
        last = mesh.coordinate["pp"] == degrees.pp - 1
        for micro_batch in range(2 if mesh.loads_data else 0):
            loss = float(3 * mesh.data_rank + micro_batch) if last else 1e9
            ledger.add(LossTerms(paddle.to_tensor(loss), 2.0, {"margin": (paddle.to_tensor(loss / 2), 1.0)}))
            ledger.count(tokens=5 + mesh.data_rank)
        ledger.add_requests(stop=mesh.rank in asked)
        return ledger.reduce()

    ranks = degrees.num_data_ranks
    total = float(sum(6 * rank + 1 for rank in range(ranks)))
    metrics = {"loss": total / (4 * ranks), "margin": total / 2 / (2 * ranks)}
    metrics["tokens"] = float(sum(2 * (5 + rank) for rank in range(ranks)))
    for rank, found in enumerate(many.run(degrees, work)):
        known = metrics if Mesh(degrees, rank).loads_data else {"loss": metrics["loss"]}
        assert found == (4.0 * ranks, {**known, "stop": 0.0})
    # a signal that one rank alone gets, whichever it is, reaches all
    for rank in range(degrees.num_ranks):
        asked = {rank}
        for _, found_metrics in many.run(degrees, work):
            assert found_metrics["stop"] == 1


@every_mesh
def test_a_loss_of_no_weight_is_none(degrees: Degrees) -> None:
    def work(mesh: Mesh) -> tuple[float, dict[str, float]]:
        ledger = LossLedger()
        if mesh.loads_data:
            ledger.add(LossTerms(paddle.to_tensor(0.0), 0.0))
        return ledger.reduce()

    assert all(found == (0.0, {}) for found in many.run(degrees, work))


def _started_as_a_rank(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Set the variables of a rank, as a shell may have kept them; the returned list gets the calls to Paddle."""
    calls: list[str] = []
    monkeypatch.setattr(collective.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(collective.dist, "init_parallel_env", lambda: calls.append("init_parallel_env"))
    monkeypatch.setattr(Mesh, "make_groups", lambda self: None)
    monkeypatch.setattr(collective, "_mesh", collective.mesh())
    for name, value in (("PADDLE_TRAINER_ID", "1"), ("PADDLE_TRAINERS_NUM", "2")):
        monkeypatch.setenv(name, value)
    return calls


@pytest.mark.parametrize("missing", ["PADDLE_CURRENT_ENDPOINT", "PADDLE_TRAINER_ENDPOINTS"])
def test_a_rank_without_the_addresses_of_the_others_is_rejected(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    calls = _started_as_a_rank(monkeypatch)
    for name in ("PADDLE_CURRENT_ENDPOINT", "PADDLE_TRAINER_ENDPOINTS"):
        monkeypatch.setenv(name, "127.0.0.1:1")
    monkeypatch.delenv(missing)
    with pytest.raises(UserError, match=rf"^{missing}: is not set .* PADDLE_TRAINERS_NUM is 2; .* Unset PADDLE_TRAIN"):
        collective.start(TWO)
    assert not calls


def test_a_rank_of_another_launcher_says_whom_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = _started_as_a_rank(monkeypatch)
    monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:2")
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "127.0.0.1:1,127.0.0.1:2")
    monkeypatch.delenv("PADDLE_MASTER", raising=False)
    collective.start(TWO)
    outputs = capsys.readouterr().err
    assert calls == ["init_parallel_env"]
    assert "rank 1 of 2, by PADDLE_TRAINER_ID and PADDLE_TRAINERS_NUM, waits for the others at 127.0.0.1:1" in outputs
    monkeypatch.setenv("LLMSUITE_CALLS", "/nowhere")
    monkeypatch.setattr(collective.calls, "start", lambda file: None)
    collective.start(TWO)
    assert not capsys.readouterr().err, "its own launcher has started it"
