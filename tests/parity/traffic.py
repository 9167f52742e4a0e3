"""What a rank gives to collectives and sends to other ranks, by operation and shape; see `tests.support.gloo_trace`."""

from __future__ import annotations

import collections

from tests.support.gloo_trace import Messages, install, traced

__all__ = ["Messages", "Traffic", "communicators", "install", "traced"]
Traffic = collections.Counter[tuple[str, tuple[int, ...]]]
"""How often each (operation, shape of what this rank gives)."""


def communicators() -> dict[int, tuple[int, ...]]:
    """The ranks of each communicator that the engine has for this rank, told by sending through all of them.

    Every rank of the run calls it. What Paddle makes for itself, along tp, and the pairs of a pipeline are not in it.
    """
    import paddle
    import paddle.distributed as dist

    from llmsuite.parallel import collective

    mesh = collective.mesh()
    if mesh.degrees.num_ranks == 1:
        return {}
    experts = mesh.expert_mesh
    every = tuple(range(mesh.degrees.num_ranks))
    groups = [mesh.tensor_group, mesh.data_group, mesh.dp_group, mesh.sharding_group, mesh.pipeline_group]
    groups += [mesh.tied_group, mesh.loader_group, experts.expert_group, experts.data_group, experts.dp_group]
    groups += [experts.sharding_group]
    found: dict[int, tuple[int, ...]] = {}
    for group in [None, *(group for group in groups if group is not None)]:
        sent: Messages = collections.Counter()
        with traced(sent):
            dist.all_reduce(paddle.zeros([1]), group=group)
        # what was sent before, to the next pipeline stage, may still be under way
        (communicator,) = {number for number, name, shape, _ in sent if (name, tuple(shape)) == ("all_reduce", (1,))}
        found[communicator] = every if group is None else tuple(group.ranks)
    return found
