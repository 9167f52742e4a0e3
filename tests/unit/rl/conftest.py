"""What tests of rewards share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.reward_case import Making


@pytest.fixture
def make() -> Iterator[Making]:
    """Makes rewards, whose processes end with the test."""
    making = Making()
    yield making
    for rewards in making.made:
        rewards.close()
