"""The charts of a report."""

from __future__ import annotations

CHARTS = ["loss", "learning_rate", "grad_norm", "throughput", "memory", "data_wait", "ranks"]
