"""The checks and removals of `tests.standin.alone` on the device `sim`.

    python -m tests.device.launched 1 LOGS FILE tests.device.alone

leaves what came of them in FILE, as JSON.
"""

from __future__ import annotations

# a kernel that refuses its inputs is an error at the call
ENVIRONMENT = {"SIM_SYNC": "1", "LLMSUITE_TEST_DEVICE": "sim"}

NOT_FOUND = (
    # Paddle's cross entropy of 16-bit logits is float32 here, and the same as that of the float32 logits
    'cross_entropy(self.logits(hidden).astype("float32")',
    'logits = self.logits(hidden).astype("float32")\n        is_match',
)
"""Texts of removals that only the stand-in's checks notice."""


def main(file: str) -> int:
    """What the process does."""
    from tests.standin import alone  # imports Paddle

    return alone.main(file)
