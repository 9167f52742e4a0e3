"""Models with one kind of Paddle's annotations each, and their stage."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from tests.support.annotated_page import FILES

_FAMILY = """
    def build(config, ops):
        return Model()

    return build
"""
STYLES: dict[str, tuple[int, str]] = {
    # what is placed is thrown away: every rank computes all rows with whole matrices
    "rows, placed in vain": (
        2,
        """
        mesh = dist.ProcessMesh([0, 1], dim_names=["x"])

        class Model(paddle.nn.Layer):
            def __init__(self):
                super(Model, self).__init__()
                self.w0 = self.create_parameter(shape=[16, 32])
                self.w1 = self.create_parameter(shape=[32, 16])

            def forward(self, x):
                dist.shard_tensor(x, mesh, [dist.Shard(0)])
                return paddle.matmul(paddle.matmul(x, self.w0), self.w1)
        """,
    ),
    "rows": (
        2,
        """
        mesh = dist.ProcessMesh([0, 1], dim_names=["x"])

        class Model(paddle.nn.Layer):
            def __init__(self):
                super().__init__()
                self.w0 = self.create_parameter(shape=[16, 32])
                self.w1 = self.create_parameter(shape=[32, 16])

            def forward(self, x):
                x = dist.shard_tensor(x, mesh, [dist.Shard(0)])
                return paddle.matmul(paddle.matmul(x, self.w0), self.w1)
        """,
    ),
    "matrices": (
        2,
        """
        mesh = dist.ProcessMesh([0, 1], dim_names=["x"])

        class Model(paddle.nn.Layer):
            def __init__(self):
                super().__init__()
                self.w0 = dist.shard_tensor(self.create_parameter(shape=[16, 32]), mesh, [dist.Shard(1)])
                self.w1 = dist.shard_tensor(self.create_parameter(shape=[32, 16]), mesh, [dist.Shard(0)])

            def forward(self, x):
                return paddle.matmul(paddle.matmul(x, self.w0), self.w1)
        """,
    ),
    "a pipeline": (
        4,
        """
        mesh0 = dist.ProcessMesh([0, 1], dim_names=["x"])
        mesh1 = dist.ProcessMesh([2, 3], dim_names=["x"])

        class Model(paddle.nn.Layer):
            def __init__(self):
                super().__init__()
                self.w0 = dist.shard_tensor(self.create_parameter(shape=[16, 32]), mesh0, [dist.Replicate()])
                self.w1 = dist.shard_tensor(self.create_parameter(shape=[32, 16]), mesh1, [dist.Replicate()])

            def forward(self, x):
                y = dist.reshard(paddle.matmul(x, self.w0), mesh1, [dist.Replicate()])
                return paddle.matmul(y, self.w1)
        """,
    ),
    "layers of Paddle, by shard_layer": (
        2,
        """
        mesh = dist.ProcessMesh([0, 1], dim_names=["x"])

        class Model(paddle.nn.Layer):
            def __init__(self):
                super().__init__()
                self.w0 = paddle.nn.Linear(16, 32)
                self.w1 = paddle.nn.Linear(32, 16)

            def forward(self, x):
                return self.w1(paddle.nn.functional.gelu(self.w0(x)))

        def place(name, layer, mesh):
            if isinstance(layer, paddle.nn.Linear):
                dim = 1 if name == "w0" else 0
                layer.weight = dist.shard_tensor(layer.weight, mesh, [dist.Shard(dim)])
                bias = dist.Shard(0) if name == "w0" else dist.Replicate()
                layer.bias = dist.shard_tensor(layer.bias, mesh, [bias])

        whole = Model
        Model = lambda: dist.shard_layer(whole(), mesh, place)
        """,
    ),
    "an irregular mesh": (
        6,
        """
        mesh = dist.ProcessMesh([[2, 4, 5], [0, 1, 3]], dim_names=["x", "y"])

        class Model(paddle.nn.Layer):
            def __init__(self):
                super().__init__()
                self.w0 = dist.shard_tensor(self.create_parameter(shape=[16, 36]), mesh, [dist.Shard(0), dist.Shard(1)])
                self.w1 = dist.shard_tensor(self.create_parameter(shape=[36, 16]), mesh, [dist.Shard(1), dist.Shard(0)])

            def forward(self, x):
                return paddle.matmul(paddle.matmul(x, self.w0), self.w1)
        """,
    ),
}


def plugin(path: Path, model: str, names: str = '["w0", "w1"]') -> Path:
    """The plugin of the page with another model."""
    head = "def network():\n    import paddle\n    import paddle.distributed as dist\n\n"
    body = textwrap.indent(textwrap.dedent(model).strip("\n"), "    ")
    text = re.sub(
        r"def network\(\):\n.*?    return Mlp\n",
        lambda _: head + body + "\n" + _FAMILY,
        FILES["annotated_mlp.py"],
        flags=re.DOTALL,
    )
    path.write_text(text.replace('["w0", "w1"]', names))
    return path


def alone(model: str) -> str:
    """The same model without a word about meshes, for one process."""
    model = model.replace("dist.shard_layer(whole(), mesh, place)", "whole()")
    model = re.sub(r"dist\.shard_tensor\((.*), mesh\d?, \[.*\]\)", r"\1", model)
    return re.sub(r"dist\.reshard\((.*), mesh\d, \[.*\]\)", r"\1", model)
