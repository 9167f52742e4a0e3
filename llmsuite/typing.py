"""Types that many rooms share."""

from typing import Any

Tensor = Any
"""A `paddle.Tensor`: Paddle ships no usable types, and this module imports without it."""
