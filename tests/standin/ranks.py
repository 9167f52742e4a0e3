"""Checks on two processes that stand in for GPUs: each ends with an error where a wait, a cast or a copy is missing.

    python -m tests.tools.launched 2 LOGS tests.standin.ranks FILE [NUMBER...]

runs the checks of these removals (else all), then takes each away, and leaves what came of it in FILE.RANK, as JSON.
All ranks get on to the next one together: what a removal does is the same on each, or nobody answers, which ends after
a while.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.standin.table import OF_RANKS

NUM_RANKS = 2
PATIENCE = 20.0
LATENESS = 0.1


def main(file: str, *numbers: str) -> int:
    """What each rank does."""
    from llmsuite.contract.schema.degrees import Degrees
    from llmsuite.parallel import collective
    from tests.standin import StandIn, late
    from tests.standin.removals import tell

    late.PATIENCE = PATIENCE
    late.LATENESS = LATENESS
    StandIn().activate(collective.local_rank())
    collective.start(Degrees(1, 2, 1, 1))
    tell(Path(f"{file}.{collective.rank()}"), CHECKS, OF_RANKS, numbers, on_any_rank)
    return 0


def on_any_rank(own: str | None) -> str | None:
    from llmsuite.parallel import collective

    of_all = collective.sum_over_run([0.0 if own is None else 1.0])
    return own if own is not None else "another rank has noticed" if of_all[0] else None


def open_channels(ring: bool = False) -> Any:
    from llmsuite.contract.schema.degrees import Degrees
    from llmsuite.parallel import collective
    from llmsuite.parallel.mesh import Mesh
    from llmsuite.parallel.p2p import P2PChannels

    return P2PChannels(Mesh(Degrees(2, 1, 1, 1), collective.rank()), ring)


def exchanged(channels: Any, value: float) -> Any:
    """What comes of a message of this value that is sent from rank 0 to rank 1 and, on rank 0, back."""
    import paddle

    from llmsuite.parallel import collective

    if collective.rank() == 0:
        sent = paddle.full([3, 4], value, "bfloat16")
        channels.send(sent, forward=True)
        sent.zero_()  # its memory is somebody else's now
        return channels.receive([3, 4], "bfloat16", forward=False)
    found = channels.receive([3, 4], "bfloat16", forward=True)
    channels.send(found, forward=False)
    return found


def messages() -> None:
    """Numbers come as they were sent, and no send is kept that is over."""
    import time

    channels = open_channels()
    for value in (1.0, 2.0, 3.0):
        found = exchanged(channels, value)
        assert bool((found == value).all()), found
        time.sleep(5 * LATENESS)
    (group,) = {g.process_group for g in channels._groups.values() if g is not None} - {None} - _without_sends(channels)
    assert len(group.not_waited_for) <= 1, "a record of each send is kept"


def _without_sends(channels: Any) -> set[Any]:
    return {g.process_group for g in channels._groups.values() if g is not None and not g.process_group.not_waited_for}


def channels() -> None:
    """A step of an interleaved pipeline ends, with an odd number of micro-batches."""
    import paddle

    from llmsuite.parallel import collective, edges
    from llmsuite.parallel.schedule import order

    ring = open_channels(ring=True)
    rank = collective.rank()
    num_chunks = 2
    for action in order("interleaved", rank, 2, 5, num_chunks):
        part = action.chunk * 2 + rank
        num_parts = 2 * num_chunks
        if (source := edges.source(part, num_parts, action.forward)) is not None:
            found = ring.receive([1], "float32", action.forward).item()
            assert found == 100 * source + action.micro_batch
        if edges.target(part, num_parts, action.forward) is not None:
            ring.send(paddle.to_tensor([100.0 * part + action.micro_batch]), action.forward)


def _wrong_sums(dp: int, sharding: int, stage: int) -> list[Any]:
    """What is wrong in the gradients of bfloat16 parameters, of two micro-batches of each rank, in one bucket or in
    several."""
    import paddle
    from paddle.base.framework import EagerParamBase

    from llmsuite.contract.schema.degrees import Degrees
    from llmsuite.parallel import collective
    from llmsuite.parallel.buckets import assign_buckets
    from llmsuite.parallel.sharding import ParameterShard

    mesh = collective.start(Degrees(1, dp, sharding, 1))
    random = np.random.default_rng(0)
    shapes = {"a": [6, 4], "b": [8], "c": [2, 2]}
    wrong = []
    for limit in (0, 1 << 20):
        shards = {}
        for name, shape in shapes.items():
            parameter = EagerParamBase(shape=shape, dtype="bfloat16", name=f"{name}-{limit}-{stage}-{random.random()}")
            parameter._set_impl(paddle.ones(shape, "bfloat16"))
            shards[name] = ParameterShard(name, parameter, mesh, None, stage)
        assign_buckets(list(shards.values()), lambda name: False, limit)
        drawn = random.standard_normal([2, 2, 36]).astype("float32")  # micro-batch, rank
        rounded = paddle.to_tensor(drawn).astype("bfloat16").astype("float32").numpy()
        for number in range(2):
            loss = paddle.zeros([])
            at = 0
            for shard in shards.values():
                shard.gather()
                shard.is_last_pass = number == 1
                size = int(np.prod(shard.shape))
                factor = paddle.to_tensor(drawn[number, mesh.rank, at : at + size]).reshape(shard.shape)
                loss = loss + (shard.parameter * factor.astype("bfloat16")).astype("float32").sum()
                at += size
            loss.backward()
        at = 0
        for name, shard in shards.items():
            size = int(np.prod(shard.shape))
            own = shard.finish_gradient()
            assert own is not None
            assert own.dtype == paddle.float32, own.dtype
            expected = rounded[:, :, at : at + size].sum((0, 1))
            whole = shard.gather_shard(own).numpy().reshape(-1)
            if not np.abs(whole - expected).max() < (0.1 if stage < 2 else 1e-5):
                wrong.append((name, limit, whole - expected))
            at += size
    return wrong


def sums() -> None:
    """Over data ranks, once a step."""
    wrong = _wrong_sums(2, 1, 0) + _wrong_sums(1, 2, 1)
    # after the last call: a rank that stops earlier would leave the other one waiting
    assert not wrong, wrong


def scattered_sums() -> None:
    """Over sharding ranks, after each backward pass."""
    wrong = _wrong_sums(1, 2, 2)
    assert not wrong, wrong


def busy() -> None:
    """To wait for a call that goes on beside other work is no work; and where a rank hangs in it, that is recorded."""
    import os
    import time

    import paddle

    from llmsuite.contract.schema.degrees import Degrees
    from llmsuite.launch import calls
    from llmsuite.parallel import collective

    mesh = collective.start(Degrees(1, 2, 1, 1))
    log = Path(os.environ[calls.ENVIRONMENT]) / f"{mesh.rank}.calls"
    late = 1.0
    for begin in (collective.start_all_reduce, _begin_scatter, _begin_gather):
        tensor = paddle.ones([4])
        collective.barrier()
        if mesh.rank == 1:
            time.sleep(late)
        waited = calls.waited()
        started = time.perf_counter()
        arrival = begin(tensor, mesh.data_group)
        begun = time.perf_counter() - started
        arrival.wait()
        (*_, last) = calls.read(log)
        assert last.what.startswith("wait for"), last
        if mesh.rank == 0:
            assert begun < late / 2 < calls.waited() - waited, (begun, calls.waited() - waited)


def _begin_scatter(tensor: Any, group: Any) -> Any:
    from llmsuite.parallel import collective

    return collective.start_reduce_scatter(tensor, group)[1]


def _begin_gather(tensor: Any, group: Any) -> Any:
    from llmsuite.parallel import collective

    return types.SimpleNamespace(wait=collective.start_all_gather(tensor, group))


def gathered() -> None:
    """A parameter of stage 3 arrives while the rank computes, and has arrived before it is freed."""
    import paddle
    from paddle.base.framework import EagerParamBase

    from llmsuite.contract.schema.degrees import Degrees
    from llmsuite.parallel import collective
    from llmsuite.parallel.sharding import ParameterShard

    mesh = collective.start(Degrees(1, 1, 2, 1))
    values = np.arange(24, dtype="float32").reshape(6, 4)
    parameter = EagerParamBase(shape=[6, 4], dtype="float32", name="gathered")
    parameter._set_impl(paddle.to_tensor(values))
    shard = ParameterShard("gathered", parameter, mesh, None, 3)
    shard.start_gather()
    product = paddle.ones([64, 64]) @ paddle.ones([64, 64])
    shard.gather()
    found = (parameter * 2).numpy()
    shard.free()
    shard.start_gather()
    shard.free()
    again = paddle.full([6, 4], 7.0) + product[:6, :4]  # may get the memory
    # after the last call: a rank that stops earlier would leave the other one waiting
    assert np.array_equal(found, 2 * values), found
    assert np.array_equal(again.numpy(), np.full([6, 4], 71.0, "float32")), again


def transposed() -> None:
    """What is sent may lie in memory in another order."""
    import paddle

    from llmsuite.contract.schema.degrees import Degrees
    from llmsuite.parallel import collective

    mesh = collective.start(Degrees(2, 1, 1, 1))
    # one for each: `contiguous` and `numpy` of Paddle 3.3.1 give the tensor itself other memory
    first, second = (paddle.arange(6, dtype="float32").reshape([2, 3]).t() for _ in range(2))
    for found in (
        collective.all_gather(first, mesh.pipeline_group)[3:],
        collective.broadcast_from_stage(second if mesh.rank == 0 else None, [3, 2], "float32", 0),
    ):
        assert np.array_equal(found.numpy(), np.arange(6).reshape(2, 3).T), found


def _as_one(recipe: str, parallel: str, *words: str, name: str | None = None, documents: bool = False) -> None:
    """A model on two ranks has the loss that it has on one, and a parameter that is not cut its gradient."""
    from llmsuite.parallel import collective
    from tests.standin.passes import STARTS, built, nll, plan

    both = plan(recipe, f"--parallel={parallel}", *words, num_ranks=2)
    losses = []
    norms = []
    for run, mesh in ((plan(recipe, "--parallel={}", *words), None), (both, collective.start(both.parallel.degrees))):
        model = built(run, mesh)
        for shard in model.shards:
            shard.is_last_pass = True
        of_tokens = nll(model.part, STARTS if documents else None)
        of_tokens.mean().backward()
        losses.append(of_tokens.numpy())
        found = {shard.name: shard.finish_gradient() for shard in model.shards}
        if name is not None:
            assert found[name] is not None
            # both data ranks have the same tokens
            norms.append(found[name].numpy() / (run.parallel.degrees.num_data_ranks))
    error = np.abs(losses[1] - losses[0]).mean() / losses[0].mean()
    assert error < 20 * 2**-9, f"the loss is off by {error:.1e}"
    if norms:
        far = np.linalg.norm(norms[1] - norms[0]) / np.linalg.norm(norms[0])
        assert far < 40 * 2**-9, f"a gradient is off by {far:.1e}"


_NORM = "model.layers.0.input_layernorm.weight"


def tensor_parallel() -> None:
    _as_one("llama/sft", '{"tensor_parallel_degree": 2}', name=_NORM)


def documents() -> None:
    """Of several in a row, each rank has the mask for its heads."""
    _as_one("qwen/sft", '{"tensor_parallel_degree": 2}', name=_NORM, documents=True)


def sequence_parallel() -> None:
    _as_one("llama/sft", '{"tensor_parallel_degree": 2, "sequence_parallel": true}', name=_NORM)


def adapters() -> None:
    """On matrices that are cut either way."""
    _as_one("llama/lora", '{"tensor_parallel_degree": 2}', "--lora.method=dora")


def experts() -> None:
    """Rows go to the rank that has their expert, and come back."""
    _as_one("qwen_moe/sft", '{"expert_parallel_degree": 2}', name=_NORM)


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        messages,
        channels,
        sums,
        scattered_sums,
        gathered,
        busy,
        transposed,
        tensor_parallel,
        documents,
        sequence_parallel,
        adapters,
        experts,
    )
}
