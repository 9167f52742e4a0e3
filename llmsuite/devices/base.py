"""Base class of device backends: device, collectives, environment, precisions, fused kernels, memory figures.

A backend is created without Paddle; the methods that need Paddle import it.
"""

from __future__ import annotations

import abc
import copy
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from llmsuite.base.errors import UserError
from llmsuite.devices.device_kernels import DeviceKernels, kernels_for

if TYPE_CHECKING:
    from typing_extensions import Self

    from llmsuite.devices.ops import Ops
    from llmsuite.devices.optimizer_ops import OptimizerOps

PADDLE_DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

FLASH_ATTENTION = {"causal_mask": "no_mask", "document_mask": "document_ends", "attention": "flash_attention"}
"""Part of a table of `DeviceBackend.kernels`: Paddle's flash attention, with its forms of a mask."""


def selected(variable: str, local_rank: int) -> int:
    """Index of the device that a launcher has selected for a rank, parsed as Paddle does; else the local rank.

    The ranks 0 to 3 that `paddle.distributed.launch --gpus 4,5,6,7` starts have the devices 4 to 7. Paddle switches to
    them when the process group is initialised; tensors created on another device before stay there.
    """
    return int(os.environ.get(variable, str(local_rank)).split(",")[0])


class DeviceBackend(abc.ABC):
    """One kind of device. The rest of llmsuite depends on this interface only, never on the name of a device."""

    name: ClassVar[str]
    collectives: ClassVar[str]
    """Paddle's name of the communication library."""
    precisions: ClassVar[tuple[str, ...]]
    """Supported values of `engine.precision` and `--precision`."""
    training_precisions: ClassVar[tuple[str, ...]] = ()
    """Further values for stages that train: all tensors are float32, and matrix products use the device's own kernels
    (`MatmulOps.matmul`, in programs `MatmulOps.program_matmul`). Inference does not support them."""
    install: ClassVar[str]
    """Command that installs Paddle for the device."""
    visible_devices: ClassVar[tuple[str, ...]] = ()
    """Environment variables from which its runtime reads the indices of the devices to use, in the order of precedence;
    empty where devices have no indices."""
    forks: ClassVar[bool] = False
    """True where a rank may be a fork of a process that has imported Paddle but not used it."""

    kernel_module: ClassVar[str] = "llmsuite.devices.paddle_kernels"
    """Name of the module with the functions that `kernels` names."""
    local_only_kernels: ClassVar[frozenset[str]] = frozenset({"rms_norm"})
    """Operations whose kernels take each rank's local shard, not distributed tensors (`llmsuite.devices.local_parts`):
    static programs of distributed tensors use plain operations instead."""
    document_mask_bytes: ClassVar[int] = 4
    """Size in bytes per token of the document mask that fused attention saves."""
    attention_keeps_output: ClassVar[bool] = True
    """True where fused attention saves its output for the backward pass."""
    kernels_in_programs: ClassVar[bool] = True
    """True where Paddle Inference has the fused kernels too; it does not have those that llmsuite builds."""

    deterministic_flags: ClassVar[Mapping[str, str] | None] = None
    """Environment variables that make the same steps on the same mesh bitwise reproducible (`engine.deterministic`),
    set before Paddle is imported; None where the device has no such mode."""

    gradient_bucket_bytes: ClassVar[int] = 25 << 20  # as PyTorch's and Paddle's data parallel
    """Default size of the gradient buckets that are all-reduced over data ranks in one call; 0 for one call per
    gradient."""
    overlaps_communication: ClassVar[bool] = True
    """True where these calls, and all-reduces over tensor parallel ranks, overlap with a backward pass; False where a
    call blocks until it is done."""
    adds_sparse_gradients: ClassVar[bool] = False
    """True where Paddle adds the rows of a sparse gradient to a dense one in place; Paddle 3.3.1 does so on some
    devices only."""
    supports_interleaving: ClassVar[bool] = False
    """True where pipeline ranks may have several chunks of layers (`pipeline_schedule: interleaved`): such ranks send
    before they receive from the same peer, so a copy to or from the host must not wait for unfinished sends."""
    supports_step_pipelines: ClassVar[bool] = False
    """True where the static program of a full step may be a pipeline (`engine.program: step`). Paddle 3.3.1 lets
    operations of such programs wait for events, which it records on GPUs only."""
    runs_job_plans: ClassVar[bool] = True
    """True where one executor runs all jobs of such a program, in Paddle's order: jobs on several streams wait for
    events of each other, which an executor only finds among its own. False where each job has an executor of its own,
    which takes less host memory, see `llmsuite.parallel.program.jobs`."""
    accumulates_distributed_gradients: ClassVar[bool] = True
    """True where Paddle adds a second gradient of a distributed tensor to the first one, as tensor parallelism in
    float32 needs; with 16-bit parameters the engine adds gradients itself."""
    runs_step_programs: ClassVar[bool] = True
    """True where Paddle runs the static program of a full step (`engine.program: step`)."""
    profiler_target: ClassVar[str | None] = None
    """Name of the device in `paddle.profiler.ProfilerTarget`: a trace has its kernels and the calls of the host.
    None where a trace has the calls of the host only, as with a custom device whose plug-in has no profiler: asked for
    one, Paddle 3.3.1 raises NotImplementedError. A plug-in that has one is "CUSTOM_DEVICE"."""
    can_offload: ClassVar[bool] = True
    """True where `to_host` frees device memory; False where tensors are already in host memory."""

    has_values: ClassVar[bool] = True
    """False where kernels compute nothing and ranks run without each other, for `llmsuite rehearse`: no weights are
    read, and no step is judged by its loss."""

    _added_kernels: Sequence[DeviceKernels] | None = None
    """None: those that plugins have registered."""

    def kernels(self, precision: str) -> Mapping[str, str]:
        """The table of the device's own kernels: an operation -> a function of `kernel_module`. Imports no Paddle.

        Operations are the fields of `llmsuite.devices.ops.Ops`, of its groups, and of `OptimizerOps`. Those of
        `PackedOps` come together. Plugins may add kernels, see `llmsuite.devices.device_kernels`.
        """
        return {}

    @property
    def added_kernels(self) -> Sequence[DeviceKernels]:
        """The kernels that plugins add to this device."""
        return kernels_for(self.name) if self._added_kernels is None else self._added_kernels

    def with_kernels(self, *kernels: DeviceKernels) -> Self:
        """A copy of this backend that has these added kernels, whatever plugins have registered."""
        changed = copy.copy(self)
        changed._added_kernels = kernels
        return changed

    def kernels_of(self, operation: str, precision: str) -> DeviceKernels | None:
        """The added kernels that compute an operation; None where the device itself does."""
        return next((added for added in self.added_kernels if operation in added.kernels(precision)), None)

    def fused(self, precision: str) -> frozenset[str]:
        """The operations with a fused kernel, which saves other tensors for the backward pass than plain operations do.
        Masks are not counted: their form belongs to the attention kernel. Imports no Paddle."""
        operations = {*self.kernels(precision)}
        for added in self.added_kernels:
            operations |= added.kernels(precision).keys()
        return frozenset(operations) - {"causal_mask", "document_mask"}

    def ops(self, precision: str) -> Ops:
        """Operations for a precision: fused kernels where there are some, else plain ones. Imports Paddle."""
        from llmsuite.devices.kernel_table import ops_of

        return ops_of(self.loaded_kernels(precision))

    def program_ops(self, precision: str) -> Ops:
        """`ops` without the kernels that Paddle Inference does not have. Imports Paddle."""
        from llmsuite.devices.kernel_table import ops_of

        return ops_of(self._loaded(precision, in_programs=True))

    def optimizer_ops(self, precision: str) -> OptimizerOps:
        """Operations of the optimizer for a precision, as `ops`. Imports Paddle."""
        from llmsuite.devices.kernel_table import optimizer_ops_of

        return optimizer_ops_of(self.loaded_kernels(precision))

    def loaded_kernels(self, precision: str) -> dict[str, Callable[..., Any]]:
        """The functions of the device's own kernels and of those that plugins add, by operation. Imports Paddle.

        Raises:
            UserError: two plugins have a kernel for the same operation.
        """
        return self._loaded(precision, in_programs=False)

    def _loaded(self, precision: str, in_programs: bool) -> dict[str, Callable[..., Any]]:
        """`loaded_kernels`; with `in_programs` only those that Paddle Inference has too."""
        loaded: dict[str, Callable[..., Any]] = {}
        if self.kernels_in_programs or not in_programs:
            loaded = _functions(self.kernel_module, self.kernels(precision))
        owners: dict[str, str] = {}
        for added in self.added_kernels:
            if in_programs and not added.in_programs:
                continue
            added.load(precision)  # if it fails, its table is smaller afterwards
            table = added.kernels(precision)
            if twice := next((operation for operation in table if operation in owners), None):
                raise UserError(
                    f"device {self.name}: the kernels {owners[twice]} and {added.name} both compute {twice}; uninstall "
                    "one of the plugins, or name those to use in LLMSUITE_PLUGINS"
                )
            owners |= dict.fromkeys(table, added.name)
            loaded |= _functions(added.module, table)
        return loaded

    def kernel_modules(self) -> set[str]:
        """Names of the modules with the functions of kernels."""
        return {self.kernel_module, *(added.module for added in self.added_kernels)}

    def build_kernels(self) -> None:
        """Build the kernels that plugins add, once, before several ranks are started."""
        for added in self.added_kernels:
            added.build()

    @property
    def operations_of_local_shards(self) -> frozenset[str]:
        """`local_only_kernels` of the device and of the kernels that plugins add."""
        return self.local_only_kernels.union(*(added.local_only for added in self.added_kernels))

    def mask_bytes(self, precision: str) -> int:
        """Size in bytes per token of the document mask that the attention of a precision saves. Imports no Paddle."""
        added = self.kernels_of("attention", precision)
        return self.document_mask_bytes if added is None else added.document_mask_bytes

    def keeps_attention_output(self, precision: str) -> bool:
        """True where the attention of a precision saves its output for the backward pass. Imports no Paddle."""
        added = self.kernels_of("attention", precision)
        return self.attention_keeps_output if added is None else added.attention_keeps_output

    @property
    def weight_only_precisions(self) -> tuple[str, ...]:
        """Further values for inference on one device: formats of the weights only, see
        `DeviceKernels.weight_only_precisions`."""
        found = (precision for added in self.added_kernels for precision in added.weight_only_precisions)
        return tuple(dict.fromkeys(found))

    def program_kernels(self) -> DeviceKernels | None:
        """The added kernels with which a predictor runs a program with packed weights; None where no program has
        them."""
        return next((added for added in self.added_kernels if added.program_files()), None)

    def configure_predictor(self, config: Any, number: int, num_threads: int) -> None:
        """Make a predictor of Paddle Inference compute on this kind of device; by default it silently uses the CPU.
        Imports Paddle. The README of an exported model lists the calls that are made here.

        Args:
            config: a `paddle.inference.Config`; its methods are called, and nothing is read from it.
            number: index of the device.
            num_threads: number of threads on the host, for devices that compute with them.

        Raises:
            UserError: the backend does not define this method, and its device is not one of Paddle's CustomDevice
                interface.
        """
        import paddle

        kind, _, _ = paddle.device.get_device().partition(":")  # the current one, see `activate`
        if kind not in paddle.device.get_all_custom_device_type():
            raise UserError(
                f"--device {self.name}: its backend does not define how Paddle Inference computes on it, which would "
                "use the CPU; generate with --engine dynamic, export for another --device, or give the backend a "
                "method `configure_predictor`"
            )
        config.enable_custom_device(kind, number)

    def has_bf16_rollout_weights(self, precision: str) -> bool:
        """True if the rollout copy of a model that is trained in a precision has weights in bf16: training rounds the
        inputs of products, and a kernel for packed weights computes the same. Imports no Paddle."""
        return {"round_activation", "packed_matmul"} <= self.fused(precision)

    def padding_free(self, precision: str) -> bool:
        """True if attention skips the tokens of a row that a token does not see, see `DeviceKernels.is_padding_free`.
        Imports no Paddle."""
        added = self.kernels_of("attention", precision)
        return added is not None and added.is_padding_free

    def environment(self, local_ranks: int, inference_only: bool = False) -> dict[str, str]:
        """Environment variables that a worker needs before it imports Paddle; those that the user has set take
        precedence. `inference_only`: the worker only generates, token by token, and trains nothing."""
        return {}

    def timeout_variables(self, stall_seconds: float | None) -> dict[str, str]:
        """Environment variables that make the timeout of collectives longer than the launcher's for a stalled run, so
        that the launcher can find the rank that causes the stall; `stall_seconds` is the launcher's timeout, None where
        there is none."""
        return {}

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """Environment variables that differ between ranks, for a launcher; they override those that the user has
        set."""
        return {}

    def variables(self, local_ranks: int, local_rank: int, inference_only: bool = False) -> dict[str, str]:
        """Environment variables that a launcher sets for a rank; `inference_only` as for `environment`."""
        mine = self.environment(local_ranks, inference_only)
        return {**{name: os.environ.get(name, mine[name]) for name in mine}, **self.rank_environment(local_rank)}

    def select(self, numbers: Sequence[int]) -> dict[str, str]:
        """Environment variables that give the ranks of this machine these devices; set before Paddle is imported.

        Raises:
            UserError: a variable that the user has set hides one of them.
        """
        assert self.visible_devices, "resolve refuses device numbers here"
        name = next((name for name in self.visible_devices if name in os.environ), self.visible_devices[0])
        visible = os.environ.get(name, "").split(",") if os.environ.get(name) else None
        hidden = [] if visible is None else [number for number in numbers if str(number) not in visible]
        if hidden:
            raise UserError(f"launch.devices: {hidden[0]} is not among {name}={os.environ[name]}; unset {name}")
        return {name: ",".join(map(str, numbers))}

    def prepare_ranks(self) -> None:
        """Prepare the machine, once, before several ranks are started: at least `build_kernels`.

        Raises:
            UserError: something that the ranks need is missing.
        """
        self.build_kernels()

    def before_paddle(self) -> None:  # noqa: B027  (most backends have nothing to do)
        """Hook before Paddle is imported, in one of several ranks or in the process that forks them."""

    def after_paddle(self) -> None:  # noqa: B027  (most backends have nothing to do)
        """Hook after Paddle is imported, in one of several ranks."""

    @abc.abstractmethod
    def unavailable(self, num_devices: int) -> str | None:
        """The reason why this machine cannot run on `num_devices` devices; None where it can. Imports Paddle."""

    @abc.abstractmethod
    def activate(self, local_rank: int) -> None:
        """Make this rank's device the current one, before any tensor is on a device: the device that its launcher has
        selected (see `selected`), else the one with the index of its local rank."""

    def check_precision(self, precision: str) -> None:  # noqa: B027  (most devices have all that they name)
        """Raise UserError if the current device cannot compute in a precision of `precisions`, which some devices say
        only when they are there. Called after `activate`."""

    @abc.abstractmethod
    def peak_memory_bytes(self) -> int:
        """Highest memory use of this process so far: device memory, or resident memory on cpu."""

    def device_name(self) -> str | None:
        """Name of this rank's device as its driver reports it, such as "NVIDIA H200"; None where that is unknown."""
        return None

    def to_host(self, tensor: Any) -> Any:
        """A copy of a tensor in pinned host memory, which makes copies to and from the device fast; see
        `can_offload`."""
        return tensor.pin_memory()

    def to_device(self, tensor: Any) -> Any:
        """A copy of a tensor in the memory of this rank's device; the tensor itself if it is already there."""
        return tensor.cuda()  # in Paddle 3.3.1 this is the current device, also where that is an XPU

    def parameter_dtype(self, precision: str) -> str:
        """Dtype of the model's parameters, and so of all activations: there is no autocast. Computations that need
        float32 cast explicitly: sums inside kernels, norms, the rotation, gates of experts, log-probabilities and
        losses. Gradients are accumulated in float32, and the optimizer updates float32 master weights. On the CPU bf16
        means something else, see `CpuBackend`."""
        return PADDLE_DTYPE[precision]

    def precisions_of(self, trains: bool) -> tuple[str, ...]:
        """Supported values of `engine.precision` for stages that train, or for others."""
        return (*self.precisions, *self.training_precisions) if trains else self.precisions

    def matmul_backend(self, precision: str) -> str:
        """Description of the library, and where there is a choice the instructions, that compute the matrix products of
        a precision. Imports no Paddle."""
        added = self.kernels_of("matmul", precision)
        return self.own_matmul_backend(precision) if added is None else added.matmul_backend(precision)

    def own_matmul_backend(self, precision: str) -> str:
        """`matmul_backend` of the products that the device itself computes."""
        return "Paddle's"

    def precision_warning(self, precision: str) -> str | None:
        """Warning for users of a precision on this machine, or None. Imports no Paddle."""
        added = self.kernels_of("matmul", precision)
        return self.own_precision_warning(precision) if added is None else added.precision_warning(precision)

    def own_precision_warning(self, precision: str) -> str | None:
        """`precision_warning` of the products that the device itself computes."""
        return None


def _functions(module: str, table: Mapping[str, str]) -> dict[str, Callable[..., Any]]:
    """The functions of a module that a table of kernels names, by operation."""
    if not table:
        return {}
    imported = importlib.import_module(module)
    return {operation: getattr(imported, function) for operation, function in table.items()}
