"""The format of GPTQ checkpoints: models with 4 or 8 bit matrices (`packed_groups` reads them).

config.json     `quantization_config` {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": true, …}
NAME.qweight    int32, [I * bits / 32, O]: codes of consecutive inputs, the first one in the lowest bits
NAME.qzeros     int32, [groups, O * bits / 32]: the code of 0 of consecutive outputs, minus 1 (not where
                `checkpoint_format` is gptq_v2)
NAME.g_idx      int32, [I]: the group of each input; without it, group_size inputs follow each other

The layout is AutoGPTQ's (its `nn_modules/qlinear/qlinear_cuda_old.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.packed_groups import PackedFormat


@dataclasses.dataclass(frozen=True)
class GptqFormat(PackedFormat):
    """GPTQ: codes of consecutive inputs."""

    group: int = 64
    offset: int = 1

    packed_dim = 0
    has_group_ids = True
    rounds_weights = False

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> GptqFormat | None:
        """Return the format that a config.json names; None for a model without GPTQ.

        Raises:
            UserError: it is GPTQ of another kind.
        """
        found = data.get("quantization_config")
        if not isinstance(found, Mapping) or found.get("quant_method") != "gptq":
            return None
        bits, group, version = (found.get(key) for key in ("bits", "group_size", "checkpoint_format"))
        if type(bits) is not int or bits not in (4, 8):
            raise UserError(f"config.json: quantization_config.bits is {bits!r}; GPTQ is read with 4 or 8")
        if type(group) is not int or (group < 1 and group != -1):
            raise UserError(
                f"config.json: quantization_config.group_size is {group!r}; it is a number of inputs, or -1 for all"
            )
        if version not in (None, "gptq", "gptq_v2"):
            raise UserError(
                f"config.json: quantization_config.checkpoint_format is {version!r}; GPTQ is read as gptq or gptq_v2"
            )
        return cls(bits, group, 0 if version == "gptq_v2" else 1)

    def to_hf(self) -> dict[str, Any]:
        """Return the `quantization_config` of a config.json."""
        return {
            "bits": self.bits,
            "checkpoint_format": "gptq" if self.offset else "gptq_v2",
            "desc_act": False,
            "group_size": self.group,
            "lm_head": False,
            "quant_method": "gptq",
            "sym": True,
        }


def packed(codes: np.ndarray, form: GptqFormat) -> np.ndarray:
    """Pack codes [n * per_word, m] into stored numbers [n, m] int32."""
    words = codes.astype("uint32").reshape(-1, form.per_word, codes.shape[1]) << form.shifts[:, None]
    return np.asarray(np.bitwise_or.reduce(words, 1).view("int32"))
