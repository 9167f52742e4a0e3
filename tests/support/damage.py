"""Values and damage that are likely to do harm to what reads them."""

from __future__ import annotations

from hypothesis import strategies as st

_NUMBERS = [0, -1, 1, 2**31, 2**63, 10**18, 10**40, 0.5, -0.0, 1e-40, 1e300, float("inf"), float("nan")]
_TEXTS = ["", "\0", "\ud800", "../../x", "/dev/zero", "/proc/self/mem", "x" * 5000, "{{", "1" * 400, "\x1b[2J", "*"]
_DAMAGES = ["set", "insert", "cut", "drop", "huge"]
values = st.recursive(
    st.none() | st.booleans() | st.sampled_from(_NUMBERS) | st.sampled_from(_TEXTS) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
"""JSON, with what is likely to do harm."""
damages = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.sampled_from(_DAMAGES), st.binary(max_size=9)),
    min_size=1,
    max_size=4,
)
"""Places of a file, from 0 to 1, and what becomes of them."""


def damaged(content: bytes, damage: list[tuple[float, str, bytes]]) -> bytes:
    """A file with some damage."""
    for place, what, bytes_ in damage:
        at = int(place * len(content))
        if what == "cut":
            content = content[:at]
        elif what == "drop":
            content = content[:at] + content[at + len(bytes_) :]
        elif what == "insert":
            content = content[:at] + bytes_ + content[at:]
        else:
            put = b"\xff" * 8 if what == "huge" else bytes_
            content = content[:at] + put + content[at + len(put) :]
    return content
