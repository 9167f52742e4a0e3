"""A fake-quantised layer that is cut is the whole one: of equal inputs no value is rounded otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.multi.conftest import Runner

NUM_RANKS = 2


def main() -> int:
    """What each rank does."""
    import paddle
    import paddle.distributed as dist

    from llmsuite.models.qat import FakeQuantLinear, observing
    from llmsuite.parallel import collective
    from llmsuite.parallel.tensor import local_value

    dist.init_parallel_env()
    mesh = dist.ProcessMesh([0, 1], dim_names=["tp"])
    whole = [dist.Replicate()]
    random = np.random.default_rng(0)  # the same on both
    x, weight, upstream = (random.normal(size=size).astype("float32") for size in ([2, 6, 8], [8, 4], [2, 6, 4]))
    weight[5] *= 7.0  # the largest weights lie on the second rank where inputs are cut
    x[1, 4, 6] = 9.0
    scale = 6.0 / 127  # so some are cut off

    def run(of_x: Any, of_weight: Any) -> list[np.ndarray]:
        linear = paddle.nn.Linear(8, 4, bias_attr=False)
        linear.weight.set_value(weight)
        given = paddle.to_tensor(x)
        if of_weight is not None:
            given = dist.shard_tensor(given, mesh, [of_x])
            linear.weight = dist.shard_tensor(linear.weight, mesh, [of_weight])
        given.stop_gradient = False
        layer = FakeQuantLinear(linear, rounds_weight=True)
        layer.input_scale = scale
        layer.local_part = local_value
        with observing([layer]):
            y = layer(given)
        largest = collective.max_over_run([float(layer.largest)])
        assert not y.is_dist() or of_x.is_replicated() or y.placements[0].is_partial(), "something was gathered"
        y = dist.reshard(y, mesh, whole) if y.is_dist() else y
        (y * paddle.to_tensor(upstream)).sum().backward()
        gradients = [
            (dist.reshard(g, mesh, whole)._local_value() if g.is_dist() else g).numpy()
            for g in (given.grad, layer.weight.grad)
        ]
        return [local_value(y).numpy(), *gradients, np.array(largest)]

    expected = run(None, None)
    assert (expected[1] == 0).any(), "nothing was cut off, so nothing was tested"
    cuts = {"outputs": (dist.Replicate(), dist.Shard(1)), "inputs": (dist.Shard(2), dist.Shard(0))}
    for name, (of_x, of_weight) in cuts.items():
        for what, found, wanted in zip(("output", "of x", "of weight", "largest"), run(of_x, of_weight), expected):
            far = np.abs(found - wanted).max() / np.abs(wanted).max()
            assert far <= 1e-6, f"cut by {name}: {what} differs by {far:.1e}"
    assert expected[3] == [9.0]
    return 0


def test_a_cut_layer_is_the_whole_one(runner: Runner) -> None:
    code, output = runner.launch(NUM_RANKS, "tests.multi.test_qat_layer")
    assert code == 0, output
