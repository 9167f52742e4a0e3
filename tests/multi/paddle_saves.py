"""A program of one rank: Paddle's own `dist.save_state_dict` of the tiny Llama, for `llmsuite merge` to read.

python -m tests.multi.paddle_saves DIRECTORY, on 4 ranks. Below DIRECTORY it makes
    plain/          tensors cut over 4 ranks
    nested/         {"model": …, "optimizer": …} in dist_ckpt, cut over 2 x 2 ranks
    flat/           each parameter in bfloat16, flattened and cut over 2 ranks of 4, as sharding stage 1 does
and the other way round it loads what `llmsuite convert --layout distcp` has written into
    ours/           into tensors cut over 2 x 2 ranks; loaded.R.npz is what rank R holds of each
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.start import start_paddle


def main(directory: Path) -> None:
    start_paddle(CpuBackend(), 4, join=True)
    import numpy as np
    import paddle
    import paddle.distributed as dist
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

    from llmsuite.models.dense_plan import PLAN
    from tests.support import tiny_llama

    paddle.set_device("cpu")
    dist.init_parallel_env()
    values = {tiny_llama.to_paddlenlp(name): (name, value) for name, value in tiny_llama.values().items()}

    line = dist.ProcessMesh([0, 1, 2, 3], dim_names=["tp"])
    square = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "tp"])
    plain = {}
    model = {}
    optimizer = {}
    flat = {}
    for theirs, (name, value) in values.items():
        tensor = paddle.to_tensor(value)
        dim = PLAN.dim(name)
        # no multiple of 4, such as the 19 rows of the embedding: the last block is smaller
        plain[theirs] = dist.shard_tensor(tensor, line, [dist.Shard(value.ndim - 1)])
        cut = dist.Replicate() if dim is None else dist.Shard(dim)
        model[theirs] = dist.shard_tensor(tensor, square, [dist.Replicate(), cut])
        optimizer[f"{theirs}_moment1_0"] = dist.shard_tensor(tensor, square, [dist.Shard(0), dist.Replicate()])
        half = (value.size + 1) // 2
        mine = slice(0, half) if dist.get_rank() % 2 == 0 else slice(half, value.size)
        flat[theirs] = ShardedWeight(
            key=theirs,
            local_tensor=paddle.to_tensor(value.reshape(-1)[mine]).astype("bfloat16"),
            local_shape=tuple(value.shape),
            global_shape=tuple(value.shape),
            global_offset=(0,) * value.ndim,
            is_flattened=True,
            flattened_range=mine,
        )
    paddle.Tensor.cuda = lambda self: self  # Paddle 3.3.1 sends what it loads from GPUs only: let this CPU be one
    loaded = {f"model.{theirs}": paddle.zeros_like(tensor) for theirs, tensor in model.items()}
    dist.load_state_dict(loaded, str(directory / "ours"))
    np.savez(directory / f"loaded.{dist.get_rank()}.npz", **{key: t._local_value() for key, t in loaded.items()})
    dist.save_state_dict(plain, str(directory / "plain"))
    dist.save_state_dict({"model": model, "optimizer": optimizer}, str(directory / "nested" / "dist_ckpt"))
    dist.save_state_dict(flat, str(directory / "flat"))
    if dist.get_rank() == 0:
        for name in ("plain", "nested", "flat"):
            (directory / name / "config.json").write_text(json.dumps(tiny_llama.CONFIG.to_hf()))
            np.savez(directory / name / "expected.npz", **tiny_llama.values())
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # Gloo does not survive the end of an interpreter
