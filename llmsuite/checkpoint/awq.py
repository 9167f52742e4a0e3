"""The format of AWQ checkpoints: models with 4 bit matrices (`packed_groups` reads them).

config.json     `quantization_config` {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm",
                "zero_point": true, …}
NAME.qweight    int32, [I, O / 8]: codes of 8 outputs in each number, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the
                lowest bits
NAME.qzeros     int32, [I / group_size, O / 8]: the code of 0, packed as the codes

Weights are rounded to float16. The layout and the rounding are AutoAWQ's (its `utils/packing_utils.py`,
`dequantize_gemm`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.packed_groups import PackedFormat

_SHIFTS = 4 * np.array([0, 4, 1, 5, 2, 6, 3, 7], "uint32")


@dataclasses.dataclass(frozen=True)
class AwqFormat(PackedFormat):
    """AWQ: codes of outputs, interleaved in each number."""

    packed_dim = 1
    has_group_ids = False
    rounds_weights = True

    @property
    def shifts(self) -> np.ndarray:
        return _SHIFTS

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> AwqFormat | None:
        """Return the format that a config.json names; None for a model without AWQ.

        Raises:
            UserError: it is AWQ of another kind.
        """
        found = data.get("quantization_config")
        if not isinstance(found, Mapping) or found.get("quant_method") != "awq":
            return None
        bits = found.get("bits", found.get("w_bit"))
        group = found.get("group_size", found.get("q_group_size"))
        if type(bits) is not int or bits != 4:
            raise UserError(f"config.json: quantization_config.bits is {bits!r}; AWQ is read with 4")
        if type(group) is not int or (group < 1 and group != -1):
            raise UserError(
                f"config.json: quantization_config.group_size is {group!r}; it is a number of inputs, or -1 for all"
            )
        version = found.get("version", "gemm")
        if str(version).lower() != "gemm":
            raise UserError(f"config.json: quantization_config.version is {version!r}; AWQ is read as gemm")
        if found.get("zero_point", True) is not True:
            raise UserError("config.json: quantization_config.zero_point is not true; AWQ is read with zero points")
        return cls(group=group)
