"""Parses option values with a unit."""

from __future__ import annotations

import re
from typing import Literal

from llmsuite.base.errors import UserError

Unit = Literal["bytes", "bytes/s", "FLOPS"]
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_PREFIXES |= {f"{prefix}i": 1 << 10 * power for power, prefix in enumerate("kmgtp", 1)}
_ENDINGS = {"bytes": "B", "bytes/s": "B/s|Bps", "FLOPS": "FLOPS|FLOP/s|flops|flop/s"}
_EXAMPLES = {"bytes": "80GiB or 500MB", "bytes/s": "400GB/s (bytes, not bits)", "FLOPS": "989TFLOPS"}


def parse_amount(option: str, text: str, unit: Unit) -> float:
    """A number with an SI or binary prefix and an optional unit: 80GiB, 400GB/s, 989TFLOPS, 4e11.

    Raises:
        UserError: it is not a number, or has another unit.
    """
    pattern = rf"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([kKmMgGtTpP]i?|)(?:{_ENDINGS[unit]})?"
    match = re.fullmatch(pattern, text.strip())
    try:
        if match is None:
            raise ValueError
        value = float(match[1]) * _PREFIXES[match[2].lower()]
    except ValueError:
        raise UserError(f"{option}: {text!r} is no amount of {unit}; write it such as {_EXAMPLES[unit]}") from None
    if value <= 0:
        raise UserError(f"{option}: is {text}; it has to be above 0")
    return value
