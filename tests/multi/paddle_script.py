"""What people write with Paddle's auto-parallel, for one launch of eight processes; each writes what it has found."""

import json
import sys
from pathlib import Path

import llmsuite.devices.cpu_ranks  # noqa: F401  # isort: skip  (it stands before Paddle's import)

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle.io import BatchSampler, DataLoader, Dataset

WHOLE = dist.Replicate()
CUT = dist.Shard
ALL = dist.ProcessMesh(list(range(8)), dim_names=["x"])
HALVES = [dist.ProcessMesh(ranks, dim_names=["x"]) for ranks in ([0, 1, 2, 3], [4, 5, 6, 7])]
SQUARES = [dist.ProcessMesh(ranks, dim_names=["x", "y"]) for ranks in ([[0, 1], [2, 3]], [[4, 5], [6, 7]])]

CASES = {  # meshes, placements of the two matrices and of what goes to the next mesh, whether rows are cut, sharding
    "one": (None, None, None, False, None),
    "dp": ([ALL], ([WHOLE], [WHOLE]), None, True, None),
    "dp, stage 1": ([ALL], ([WHOLE], [WHOLE]), None, True, dist.ShardingStage1),
    "dp, stage 2": ([ALL], ([WHOLE], [WHOLE]), None, True, dist.ShardingStage2),
    "dp, stage 3": ([ALL], ([WHOLE], [WHOLE]), None, True, dist.ShardingStage3),
    "tp": ([ALL], ([CUT(1)], [CUT(0)]), None, False, None),
    "pp": (HALVES, ([WHOLE], [WHOLE]), [WHOLE], False, None),
    "3d": (SQUARES, ([WHOLE, CUT(1)], [WHOLE, CUT(0)]), [CUT(0), CUT(2)], True, None),
}


class Rows(Dataset):
    def __init__(self):
        draw = np.random.default_rng(0).uniform
        self.x, self.y = (draw(size=[24, 4, 16]).astype("float32") for _ in range(2))

    def __getitem__(self, index):
        return self.x[index], self.y[index]

    def __len__(self):
        return len(self.x)


class Mlp(paddle.nn.Layer):
    def __init__(self, meshes, placements, hop):
        super().__init__()
        self.w0, self.w1 = self.create_parameter([16, 32]), self.create_parameter([32, 16])
        self.meshes = meshes
        self.hop = hop
        if meshes is not None:
            self.w0 = dist.shard_tensor(self.w0, meshes[0], placements[0])
            self.w1 = dist.shard_tensor(self.w1, meshes[-1], placements[1])

    def forward(self, x):
        y = F.relu(paddle.matmul(x, self.w0))
        if self.hop is not None:
            y = dist.reshard(y, self.meshes[-1], self.hop)
        return paddle.matmul(y, self.w1)


def train(case, optimizer, in_program, directory):
    """Losses of three steps, of the rows of this rank; None where it has none."""
    meshes, placements, hop, rows_are_cut, stage = CASES[case]
    paddle.seed(0)
    model = Mlp(meshes, placements, hop)
    rows = Rows()
    squares = paddle.nn.MSELoss()
    loader = DataLoader(rows, batch_sampler=BatchSampler(rows, batch_size=8))
    optimizer = optimizer(model.parameters())
    if meshes is not None:
        loader = dist.shard_dataloader(loader, meshes=meshes, shard_dims="x" if rows_are_cut else None)
        optimizer = dist.shard_optimizer(optimizer, stage and stage("x", meshes[0]))
    if in_program:
        program = dist.to_static(model, loader, squares, optimizer)
        program.train()
    losses = []
    for x, y in loader if meshes is None else loader():
        if in_program:
            loss = program(x, y)
        else:
            loss = squares(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            loss = loss._local_value() if loss.is_dist() else loss
        losses.append(float(loss) if loss is not None and np.size(loss) else None)
    if case == "3d" and not in_program:
        dist.save_state_dict(model.state_dict(), str(directory / "checkpoint"))
    if case == "one" and dist.get_rank() == 0:
        np.savez(directory / f"{type(optimizer).__name__}.npz", w0=model.w0.numpy(), w1=model.w1.numpy())
    return losses


def sgd(parameters):
    return paddle.optimizer.SGD(learning_rate=0.5, parameters=parameters)


def adamw(parameters):
    return paddle.optimizer.AdamW(learning_rate=0.01, epsilon=1e-4, parameters=parameters)


def load(case, directory):
    """The matrices that "3d" has saved, on the mesh of another case."""
    model = Mlp(*CASES[case][:3])
    dist.load_state_dict(model.state_dict(), str(directory / "checkpoint"))
    return {name: dist.unshard_dtensor(value).tolist() for name, value in model.state_dict().items()}


def local(tensor):
    """The part of this rank; None where it has none."""
    return tensor._local_value().tolist() if dist.get_rank() in tensor.process_mesh.process_ids else None


def main(directory):
    found = {}
    for case, (meshes, *_, stage) in CASES.items():
        optimizer = sgd if stage is None else adamw
        modes = [False] if meshes is None else [False, True]
        found[case] = [train(case, optimizer, mode, directory) for mode in modes]
    found["one by adamw"] = [train("one", adamw, False, directory)]
    found["loaded"] = load("tp", directory)

    irregular = dist.ProcessMesh([[2, 4, 5], [0, 1, 3]], dim_names=["x", "y"])
    table = paddle.to_tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]])
    found["placed"] = local(dist.shard_tensor(table, irregular, [CUT(0), CUT(1)]))
    there, here = (dist.ProcessMesh(ranks, dim_names=["x"]) for ranks in ([0, 1], [2, 3]))
    pair = dist.shard_tensor(paddle.to_tensor([[1, 2, 3], [4, 5, 6]]), there, [WHOLE])
    found["moved"] = local(dist.reshard(pair, here, [CUT(0)]))
    (directory / f"{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
