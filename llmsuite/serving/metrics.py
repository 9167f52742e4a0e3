"""Metrics of a server, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("llmsuite_requests", "Answered requests", ["path", "status"], registry=registry)
        self.prompt_tokens = Counter("llmsuite_prompt_tokens", "Tokens of prompts", registry=registry)
        self.prefix_hits = Counter(
            "llmsuite_prefix_hits", "Answers to prompts that were cached in part", registry=registry
        )
        self.prefix_tokens = Counter(
            "llmsuite_prefix_tokens", "Tokens of prompts that were not computed again", registry=registry
        )
        self.prefix_bytes = Gauge("llmsuite_prefix_bytes", "Size of the prefix cache", registry=registry)
        self.generated_tokens = Counter("llmsuite_generated_tokens", "Tokens of answers", registry=registry)
        self.passes = Counter("llmsuite_passes", "Passes of the model", registry=registry)
        self.running = Gauge("llmsuite_answers_running", "Answers in the batch", registry=registry)
        self.waiting = Gauge("llmsuite_answers_waiting", "Answers that wait in the queue", registry=registry)
        self.first_token = Histogram(
            "llmsuite_first_text_seconds", "From request to first text", buckets=_SECONDS, registry=registry
        )
        self.longest_gap = Histogram(
            "llmsuite_longest_gap_seconds",
            "Between two tokens of an answer, at most",
            buckets=_SECONDS,
            registry=registry,
        )
        self.duration = Histogram(
            "llmsuite_request_seconds", "From request to last text", buckets=_SECONDS, registry=registry
        )

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
