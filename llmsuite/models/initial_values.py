"""Random initial values of parameters, which depend only on (seed, name, index).

So a rank generates just its slice, and every parallel layout starts from the identical model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_WORDS_PER_BLOCK = 4  # Philox4x64 yields four 64-bit words a counter step
_CHUNK = 1 << 20


def initial_values(
    seed: int, name: str, shape: Sequence[int], std: float, index: Sequence[slice] | None = None
) -> np.ndarray:
    """Generate normal values with mean 0 for a parameter or a slice of it, float32.

    Args:
        seed: the recipe's seed.
        name: full parameter name.
        shape: shape of the full parameter.
        std: standard deviation.
        index: one slice (step 1) per dim; None for the full parameter.

    Element i of the flattened parameter is computed from word i // 2 of the Philox stream keyed by
    sha256(seed:name), by the cosine (even i) or sine (odd i) half of a Box-Muller pair.
    """
    bounds = [s.indices(n)[:2] for s, n in zip(index or [slice(None)] * len(shape), shape)]
    extents = [max(0, high - low) for low, high in bounds]
    result = np.empty(extents, dtype="float32")
    if result.size == 0:
        return result
    # the longest contiguous run: the trailing dims that are not sliced, and the range of the dim before them
    first = len(shape) - 1
    while first > 0 and extents[first] == shape[first]:
        first -= 1
    inner = int(np.prod(shape[first + 1 :], dtype="int64"))
    run = extents[first] * inner
    start = bounds[first][0] * inner
    strides = [int(np.prod(shape[d + 1 :], dtype="int64")) for d in range(first)]
    key = _key(seed, name)
    flat = result.reshape(-1, run)
    for row, position in enumerate(np.ndindex(*extents[:first])):
        offset = start + sum((bounds[d][0] + p) * strides[d] for d, p in enumerate(position))
        for at in range(0, run, _CHUNK):
            count = min(_CHUNK, run - at)
            flat[row, at : at + count] = _normals(key, offset + at, count)
    result *= np.float32(std)
    return result


def _key(seed: int, name: str) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], dtype="uint64")


def _normals(key: np.ndarray, start: int, count: int) -> np.ndarray:
    """Return elements `start` to `start + count` of a stream of standard normals, float32."""
    first_word = start // 2
    last_word = (start + count + 1) // 2
    stream = np.random.Philox(key=key)
    stream.advance(first_word // _WORDS_PER_BLOCK)
    skip = first_word % _WORDS_PER_BLOCK
    words = stream.random_raw(last_word - first_word + skip)[skip:]
    # both uniforms from one word, 24 bits each; the half keeps the logarithm away from 0
    uniform = ((words >> np.uint64(40)).astype("float32") + np.float32(0.5)) * np.float32(2**-24)
    angle = (words & np.uint64(0xFFFFFF)).astype("float32") * np.float32(2 * np.pi * 2**-24)
    radius = np.sqrt(np.float32(-2) * np.log(uniform))
    pairs = np.empty(2 * len(words), dtype="float32")
    np.multiply(radius, np.cos(angle), out=pairs[0::2])
    np.multiply(radius, np.sin(angle), out=pairs[1::2])
    return pairs[start - 2 * first_word :][:count]
