"""What a device backend decides: place, collectives, environment, precision, fused kernels, memory figures.

A backend is created without Paddle; the methods that need it import it.
"""

from __future__ import annotations

import abc
import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from llmsuite.errors import UserError

if TYPE_CHECKING:
    from llmsuite.devices.ops import Ops

PADDLE_DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

FLASH_ATTENTION = {"causal_mask": "no_mask", "document_mask": "document_ends", "attention": "flash_attention"}
"""Part of a table of `DeviceBackend.kernels`: Paddle's flash attention, with its forms of a mask."""


def selected(variable: str, local_rank: int) -> int:
    """Number of the device that a launcher has selected for a rank, read as Paddle reads it; else the rank's own.

    The ranks 0 to 3 that `paddle.distributed.launch --gpus 4,5,6,7` starts have the devices 4 to 7. Paddle switches to
    them when the ranks meet; what was put on another device before stays there.
    """
    return int(os.environ.get(variable, str(local_rank)).split(",")[0])


class DeviceBackend(abc.ABC):
    """One kind of device. The rest of llmsuite asks it, and never asks for a device by name."""

    name: ClassVar[str]
    collectives: ClassVar[str]
    """Paddle's name of the communication library."""
    precisions: ClassVar[tuple[str, ...]]
    """The values of `engine.precision` and `--precision` it has."""
    training_precisions: ClassVar[tuple[str, ...]] = ()
    """Those it has beside `precisions` for stages that train: all tensors are float32, and products have a form of the
    device's (`Ops.matmul`, in programs `Ops.program_matmul`). Models that only answer do not have them."""
    stored_precisions: ClassVar[tuple[str, ...]] = ()
    """What the matrices of a model that answers on one device may be stored in, beside that: `Ops.stored_product`
    multiplies with them, and all else is float32."""
    install: ClassVar[str]
    """How to get a Paddle for it."""
    visible_devices: ClassVar[tuple[str, ...]] = ()
    """Variables that its runtime reads the numbers of the devices to use from, the first one that is set before the
    others; none where devices have no numbers."""
    forks: ClassVar[bool] = False
    """Whether a rank may be a fork of a process that has imported Paddle and done nothing with it."""

    kernel_module: ClassVar[str] = "llmsuite.devices.ops"
    """The module with the functions that `kernels` names."""
    on_parts_only: ClassVar[frozenset[str]] = frozenset({"rms_norm"})
    """Operations whose kernels take no distributed tensors but each rank's part (`llmsuite.devices.local_parts`): in a
    static program of such tensors plain operations do them."""
    document_mask_bytes: ClassVar[int] = 4
    """Size of what fused attention keeps of a token to know its document."""
    attention_keeps_output: ClassVar[bool] = True
    """Whether fused attention keeps its output for the backward pass."""
    kernels_in_programs: ClassVar[bool] = True
    """Whether Paddle Inference has its kernels too; it has none that are built here."""

    deterministic_flags: ClassVar[Mapping[str, str] | None] = None
    """Variables with which the same steps on the same mesh give the same bits (`engine.deterministic`), set before
    Paddle is imported; None where there are none that do it."""

    gradient_bucket_bytes: ClassVar[int] = 25 << 20  # as PyTorch's and Paddle's data parallel
    """Size of the gradient buckets that are summed over data ranks in one call, unless a recipe sets it; 0 for a call a
    gradient."""
    sends_beside_passes: ClassVar[bool] = True
    """Whether these calls, and sums over tensor parallel ranks, overlap with a backward pass; else each is over when it
    returns."""
    adds_sparse_rows: ClassVar[bool] = False
    """Whether Paddle adds the rows of a sparse gradient to a dense one in place; 3.3.1 does so on some devices only."""
    interleaves: ClassVar[bool] = False
    """Whether ranks of a pipeline may have several chunks of layers (`pipeline_schedule: interleaved`): such ranks send
    before they receive what the other one has sent, so a copy to or from the host must not wait for sends under
    way."""
    pipelines_in_programs: ClassVar[bool] = False
    """Whether the program of a whole step may be a pipeline (`engine.program: step`): its parts run in executors of
    their own, so no operation of one may wait for an event of another."""
    moves_to_host: ClassVar[bool] = True
    """Whether `to_host` leaves room on the device; False where tensors are in host memory already."""

    def kernels(self, precision: str) -> Mapping[str, str]:
        """The table of fused kernels: a field of `llmsuite.devices.ops.Ops` -> a function of `kernel_module`. Imports
        no Paddle."""
        return {}

    def fused(self, precision: str) -> frozenset[str]:
        """The operations that have a fused kernel: what they keep for a backward pass differs. The form of a mask goes
        with the attention kernel and is none of its own. Imports no Paddle."""
        return frozenset(self.kernels(precision)) - {"causal_mask", "document_mask"}

    def ops(self, precision: str) -> Ops:
        """Fused kernels for the precision, plain forms for the rest. Imports Paddle."""
        from llmsuite.devices.ops import Ops

        table = self.kernels(precision)
        module = importlib.import_module(self.kernel_module) if table else None
        return Ops(**{field: getattr(module, function) for field, function in table.items()})

    def program_kernels(self) -> Sequence[Path]:
        """Files that let a predictor of Paddle's own run a program with stored matrices: the sources of its operations,
        and what builds and registers them without llmsuite. Imports no Paddle."""
        return ()

    def configure_predictor(self, config: Any, number: int, num_threads: int) -> None:
        """Let a predictor of Paddle Inference compute on this kind of device; by itself it would on the CPU, without a
        word. Imports Paddle. The README of an exported model has the calls that are made here.

        Args:
            config: a `paddle.inference.Config`; its methods are called, and nothing is read from it.
            number: of the device.
            num_threads: on the host, where a device computes with those.

        Raises:
            UserError: the backend does not say how, and its device is none of Paddle's CustomDevice interface.
        """
        import paddle

        kind, _, _ = paddle.device.get_device().partition(":")  # the current one, see `activate`
        if kind not in paddle.device.get_all_custom_device_type():
            raise UserError(
                f"--device {self.name}: its backend does not say how Paddle Inference computes on it, which would take "
                "the CPU; answer with --engine dynamic, export for another --device, or give the backend a method "
                "`configure_predictor`"
            )
        config.enable_custom_device(kind, number)

    def stores_as_trained(self, precision: str) -> bool:
        """Whether what draws for a model that is trained in a precision has matrices in bf16: the training rounds the
        inputs of products, and a kernel for stored matrices computes as that does. Imports no Paddle."""
        return {"operand", "stored_product"} <= self.kernels(precision).keys()

    def padding_free(self, precision: str) -> bool:
        """Whether its attention skips what a token does not see of its row: then the sequences of a batch cost less as
        documents of one row than as rows with padding, and answers may share a prompt, see `ops.document_spans`.
        Imports no Paddle."""
        return False

    def environment(self, local_ranks: int, answers: bool = False) -> dict[str, str]:
        """Variables a worker needs before it imports Paddle; what the user has set wins. `answers`: whether it only
        draws from a model, one token after the other, and trains nothing."""
        return {}

    def patience(self, stall_seconds: float | None) -> dict[str, str]:
        """Variables that let a rank wait longer for the others than the launcher watches a run that stands still, so
        that the launcher finds out who is to blame; `stall_seconds` is None where nobody watches for that."""
        return {}

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """Variables that differ from rank to rank, for a launcher; they win over what the user has set."""
        return {}

    def variables(self, local_ranks: int, local_rank: int, answers: bool = False) -> dict[str, str]:
        """What a launcher adds to the environment of a rank, or replaces there; `answers` as for `environment`."""
        mine = self.environment(local_ranks, answers)
        return {**{name: os.environ.get(name, mine[name]) for name in mine}, **self.rank_environment(local_rank)}

    def select(self, numbers: Sequence[int]) -> dict[str, str]:
        """Variables that let this machine's ranks have these devices; set before Paddle is imported.

        Raises:
            UserError: one of them is hidden by a variable that the user has set.
        """
        assert self.visible_devices, "resolve refuses device numbers here"
        name = next((name for name in self.visible_devices if name in os.environ), self.visible_devices[0])
        visible = os.environ.get(name, "").split(",") if os.environ.get(name) else None
        if visible is not None and (hidden := [n for n in numbers if str(n) not in visible]):
            raise UserError(f"launch.devices: {hidden[0]} is not among {name}={os.environ[name]}; unset {name}")
        return {name: ",".join(map(str, numbers))}

    def prepare_ranks(self) -> None:  # noqa: B027  (most backends have nothing to do)
        """Called once before several ranks are started.

        Raises:
            UserError: something they need is missing.
        """

    def before_paddle(self) -> None:  # noqa: B027  (most backends have nothing to do)
        """Called in one of several ranks, or in the process it is a fork of, before Paddle is imported."""

    def after_paddle(self) -> None:  # noqa: B027  (most backends have nothing to do)
        """Called in one of several ranks once Paddle is imported."""

    @abc.abstractmethod
    def unavailable(self, num_devices: int) -> str | None:
        """Why this machine cannot run here, or None. Imports Paddle."""

    @abc.abstractmethod
    def activate(self, local_rank: int) -> None:
        """Make this rank's device the current one, before anything is on a device: the one that its launcher has
        selected, see `selected`, or that of its number."""

    @abc.abstractmethod
    def peak_memory_bytes(self) -> int:
        """Highest memory use of this process so far: device memory, or resident memory on cpu."""

    def to_host(self, tensor: Any) -> Any:
        """A tensor in pinned host memory, which the device copies from and to fast; see `moves_to_host`."""
        return tensor.pin_memory()

    def to_device(self, tensor: Any) -> Any:
        """A tensor in the memory of this rank's device; itself when it is there."""
        return tensor.cuda()  # in Paddle 3.3.1 the current device, also where that is an XPU

    def parameter_dtype(self, precision: str) -> str:
        """Dtype of the model's parameters, and so of everything that is computed with them: nothing casts by itself
        (no autocast). What has to be float32 says so where it is computed: sums inside kernels, norms, the rotation,
        gates of experts, log-probabilities and losses. Gradients are added up in float32, and the optimizer updates a
        float32 copy, its master. On the CPU 16 bits mean other things, see `CpuBackend`."""
        return PADDLE_DTYPE[precision]

    def precisions_of(self, trains: bool) -> tuple[str, ...]:
        """The values of `engine.precision` it has for stages that train, or for others."""
        return (*self.precisions, *(self.training_precisions if trains else ()))

    def product_path(self, precision: str) -> str:
        """Whose matrix products a precision gets, and by which instructions where that is a choice. Imports no
        Paddle."""
        return "Paddle's"

    def caution(self, precision: str) -> str | None:
        """What a user of a precision has to know of this machine, or None. Imports no Paddle."""
        return None
