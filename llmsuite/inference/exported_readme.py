"""The README of an exported model: code to run it with Paddle's predictor, without llmsuite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmsuite.devices.base import DeviceBackend
from llmsuite.inference.export_manifest import KERNELS, ExportManifest

_TEXT = """\
# A model as a program of Paddle Inference

Written by `llmsuite export`; `llmsuite generate DIR --engine static` and `llmsuite serve DIR --engine static` answer
with it, `llmsuite verify DIR` compares it with the model it was made of. A predictor of Paddle's own needs no llmsuite:

```python
{kernels}import numpy as np
import paddle
from paddle.inference import Config, create_predictor

config = Config("model.json", "model.pdiparams")
{calls}
predictor = create_predictor(config)

ids, padding = np.array([[5, 6, 7]]), np.array([0])  # [B, L], and the number of padding tokens on the left of each row
shapes = {shapes}  # of the cache: no positions yet
cache = [paddle.zeros([len(ids), *shape], "{dtype}") for shape in shapes]
logits, *cache = predictor.run([paddle.to_tensor(ids), paddle.to_tensor(padding), *cache])
token = logits.argmax(-1, keepdim=True)  # [B, V] to [B, 1], the next input; the cache has L more positions
ends = np.isin(token.numpy(), {ends})  # [B, 1]: True where it ends the answer
cache = [tensor.clone() for tensor in cache]  # else the next run may write over what it reads
```

On AMD processors MKL takes its slowest path unless MKL_DEBUG_CPU_TYPE is set before Paddle is imported: 7 where
/proc/cpuinfo shows avx512f, cd, bw, dq and vl, else 5. KMP_BLOCKTIME=0 keeps threads from spinning between operations.
"""
_KERNELS = """\
import sys

sys.path.insert(0, "{directory}")
import program_kernels

program_kernels.register()  # the operations that multiply with its matrices: built by g++, once a machine

"""


class _RecordedConfig:
    """A stand-in for `paddle.inference.Config` that records its calls as lines of Python."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values: self.lines.append(f"config.{name}({', '.join(map(repr, values))})")


def predictor_calls(backend: DeviceBackend) -> str:
    """Lines of Python that configure a predictor for the first device of a backend, with two threads of the host.

    Raises:
        UserError: the backend does not support predictors.
    """
    config = _RecordedConfig()
    backend.configure_predictor(config, 0, 2)
    comment = f"# to compute on {backend.name}; without these calls a predictor computes on the CPU, with its defaults"
    return "\n".join([comment, *config.lines])


def readme(exported: ExportManifest, ends: Sequence[int], backend: DeviceBackend) -> str:
    """The README of an exported model of one rank, for the device that it was exported for. `ends` are the tokens that
    end an answer."""
    kernels = _KERNELS.format(directory=KERNELS) if exported.has_kernels else ""
    shapes = exported.cache_shapes
    is_uniform = all(shape == shapes[0] for shape in shapes)
    shown = f"[{shapes[0]}] * {len(shapes)}" if is_uniform else str(shapes)
    calls = predictor_calls(backend)
    return _TEXT.format(kernels=kernels, shapes=shown, dtype=exported.dtype, ends=list(ends), calls=calls)
