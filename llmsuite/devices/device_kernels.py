"""Kernels that plugins add to a device: how a plugin describes them, and those that are registered. Needs no Paddle."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar


class DeviceKernels(abc.ABC):
    """Kernels of a plugin for a device of another plugin, or of llmsuite.

    They take precedence over the kernels of the device itself. What they do not compute stays as it is: on a machine
    that they do not support, `kernels` returns an empty table.
    """

    name: str
    """Name in messages, one word."""
    help: str
    """Description in a few words."""
    device: str
    """Name of the `DeviceSpec`."""
    module: str
    """Name of the module with the functions that `kernels` names; imported after `load`."""
    api: int = 1
    """Version of the plugin contract that they need."""

    local_only: ClassVar[frozenset[str]] = frozenset()
    """Operations whose kernels take each rank's local shard, not distributed tensors (`llmsuite.devices.local_parts`):
    static programs of distributed tensors use plain operations instead."""
    document_mask_bytes: ClassVar[int] = 4
    """Size in bytes per token of the document mask that `attention` saves."""
    attention_keeps_output: ClassVar[bool] = True
    """True where `attention` saves its output for the backward pass."""
    is_padding_free: ClassVar[bool] = False
    """True where `attention` skips the tokens of a row that a token does not see: then a batch costs less as documents
    of one row than as rows with padding, and answers may share a prompt (`masks.document_spans`)."""
    in_programs: ClassVar[bool] = False
    """True where Paddle Inference has the kernels too; it does not have those that a plugin builds."""
    weight_only_precisions: ClassVar[tuple[str, ...]] = ()
    """Precisions for inference on one device that are formats of the weights only. `PackedOps.pack` packs such weights,
    `PackedOps.packed_matmul` multiplies by them, and all other tensors are float32."""

    @abc.abstractmethod
    def kernels(self, precision: str) -> Mapping[str, str]:
        """The table of kernels on this machine: an operation -> a function of `module`. Imports no Paddle.

        Operations are the fields of `llmsuite.devices.ops.Ops`, of its groups, and of `OptimizerOps`. Those of
        `PackedOps` come together.
        """

    def build(self) -> None:  # noqa: B027  (kernels of Paddle need no build)
        """Build all kernels, once, before several ranks are started. What cannot be built is not an error: a warning is
        printed, and `kernels` leaves it out from then on."""

    def load(self, precision: str) -> None:  # noqa: B027  (kernels of Paddle are there)
        """Register the kernels of a precision with Paddle, and build them if necessary; as for `build`, failures are no
        errors. Called in every process before `module` is imported, possibly several times."""

    def matmul_backend(self, precision: str) -> str:
        """Description of the library, and where there is a choice the instructions, that compute the matrix products of
        a precision for which `kernels` has `matmul`. Imports no Paddle."""
        return f"those of {self.name}"

    def precision_warning(self, precision: str) -> str | None:
        """Warning for users of such a precision on this machine, or None. Imports no Paddle."""
        return None

    def packed_bytes(self, precision: str, num_inputs: int, num_outputs: int) -> int:
        """Size in bytes of a packed matrix [I, O], for `llmsuite plan`. Imports no Paddle."""
        raise NotImplementedError(f"{type(self).__name__} has packed weights, and does not define packed_bytes")

    def program_files(self) -> Sequence[Path]:
        """Files with which a predictor of Paddle alone runs a program with packed weights: the sources of the custom
        operations, and a script `program_kernels.py` whose function `register` builds and registers them without
        llmsuite. Empty where there are no packed weights in programs. Imports no Paddle."""
        return ()

    def load_for_programs(self) -> bool:
        """Register the operations of such programs with Paddle; False if they cannot be built here."""
        return True


DEVICE_KERNELS: dict[str, DeviceKernels] = {}
"""The kernels of plugins by name. The registry of plugins fills it: a backend has to know its kernels everywhere in a
process, also where there is no registry."""


def kernels_for(device: str) -> list[DeviceKernels]:
    """The kernels of plugins for a device, in the order of registration."""
    return [kernels for kernels in DEVICE_KERNELS.values() if kernels.device == device]
