"""A server with several adapters."""

from __future__ import annotations

import dataclasses

from tests.support import served_adapters

CONFIG = dataclasses.replace(served_adapters.CONFIG, max_position_embeddings=256)
