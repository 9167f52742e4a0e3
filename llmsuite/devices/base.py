"""What a device backend decides: place, collectives, environment, precision, fused ops, memory figures.

A backend is created without Paddle; the methods that need it import it.
"""

from __future__ import annotations

import abc
import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from llmsuite.devices.ops import Ops


class DeviceBackend(abc.ABC):
    """One kind of device. The rest of llmsuite asks it, and nothing else asks for a device by name."""

    name: ClassVar[str]
    collectives: ClassVar[str]
    """Paddle's name of the communication library."""
    precisions: ClassVar[tuple[str, ...]]
    """What `engine.precision` may be here."""
    install: ClassVar[str]
    """How to get a Paddle for it."""
    forks: ClassVar[bool] = False
    """Whether a rank may be a fork of a process that has imported Paddle and done nothing with it."""

    fuses_alike_only: ClassVar[bool] = False
    """Whether its kernels take distributed tensors only where all of an operation lie alike, and none in a program; the
    rest is done by plain operations."""
    gradient_bucket_bytes: ClassVar[int] = 25 << 20  # as PyTorch's and Paddle's data parallel
    """How much of the gradients is added up over data ranks in one call, unless a recipe says; 0: each by itself."""
    sends_beside_passes: ClassVar[bool] = True
    """Whether these calls, and sums over tensor parallel ranks, go on while a backward pass computes; else each is over
    when it returns."""
    kernels_in_programs: ClassVar[bool] = True
    """Whether Paddle Inference has the kernels of `ops` too: not those that are built here."""

    def fused(self, precision: str) -> frozenset[str]:
        """The operations that `ops` gives a fused kernel for, by their names in `llmsuite.devices.ops.Ops`: what they
        keep for a backward pass differs. Imports no Paddle."""
        return frozenset()

    def padding_free(self, precision: str) -> bool:
        """Whether its attention goes past what a token does not see of its row: then the sequences of a batch cost less
        as documents of one row than as rows with padding, and answers may share a prompt, see `ops.document_spans`.
        Imports no Paddle."""
        return False

    def environment(self, local_ranks: int) -> dict[str, str]:
        """Variables a worker needs before it imports Paddle; what the user has set wins."""
        return {}

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """Variables that differ from rank to rank, for a launcher."""
        return {}

    def prepare_ranks(self) -> None:  # noqa: B027  (most backends have nothing to do)
        """Called once before several ranks are started. Raises UserError when something they need is missing."""

    def before_paddle(self) -> None:  # noqa: B027  (most backends have nothing to do)
        """Called in a rank of several, or in the process that it is a fork of, before Paddle is imported."""

    def after_paddle(self) -> None:  # noqa: B027  (most backends have nothing to do)
        """Called in a rank of several once Paddle is imported."""

    @abc.abstractmethod
    def unavailable(self, num_devices: int) -> str | None:
        """Why this machine cannot run here, or None. Imports Paddle."""

    @abc.abstractmethod
    def activate(self, local_rank: int) -> None:
        """Make this rank's device the current one."""

    @abc.abstractmethod
    def ops(self, precision: str) -> Ops:
        """Fused kernels for the precision, plain forms for the rest."""

    @abc.abstractmethod
    def peak_memory_bytes(self) -> int:
        """Highest memory use of this process so far: device memory, or resident memory on cpu."""

    def to_host(self, tensor: Any) -> Any:
        """A tensor in host memory, in pages the device copies from and to fast."""
        return tensor.pin_memory()

    def to_device(self, tensor: Any) -> Any:
        """A tensor in the memory of this rank's device; itself when it is there."""
        return tensor.cuda()  # of Paddle 3.3.1: the current device, an XPU as well

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        """Context of a forward pass. With O2 the parameters have the low precision, sums and norms stay float32."""
        if precision == "fp32":
            return contextlib.nullcontext()
        import paddle

        return paddle.amp.auto_cast(level="O2", dtype=PADDLE_DTYPE[precision])

    def parameter_dtype(self, precision: str) -> str:
        """Dtype the model's parameters are stored in; masters of the optimizer are float32 in any case."""
        return PADDLE_DTYPE[precision]


PADDLE_DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
