"""Prometheus metrics of a service, with vLLM's names where they mean the same."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)


class Metrics:
    """Metrics of a service, labelled with its model; used on the event loop only."""

    def __init__(self, model: str):
        """Register all metrics, starting at zero."""
        self._registry = CollectorRegistry()
        label = ("model_name",)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"vllm:{name}", about, label, registry=self._registry).labels(model)

        def counter(name: str, about: str) -> Counter:
            return Counter(f"vllm:{name}", about, label, registry=self._registry).labels(model)

        def seconds(name: str, about: str) -> Histogram:
            histogram = Histogram(
                f"vllm:{name}_seconds", about, label, registry=self._registry, buckets=SECONDS
            )
            return histogram.labels(model)

        self._running = gauge("num_requests_running", "Sequences that have a slot.")
        self._waiting = gauge("num_requests_waiting", "Sequences that wait for a slot.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts of answered requests.")
        self.new_tokens = counter("generation_tokens", "Generated tokens.")
        self.first_token = seconds("time_to_first_token", "From a request to its first token.")
        self.next_token = seconds("inter_token_latency", "From a token of a sequence to the next.")
        self.request = seconds("e2e_request_latency", "From a request to the end of its answer.")
        self._done = Counter(
            "vllm:request_success",
            "Sequences that were decoded to their end, or cancelled (abort).",
            (*label, "finished_reason"),
            registry=self._registry,
        )
        self._refused = Counter(
            "skippipe:requests_refused",
            "Requests answered with an error.",
            (*label, "status"),
            registry=self._registry,
        )
        self._model = model

    def count(self, known: int, slots: int) -> None:
        """Set the numbers of running and waiting sequences from that of unfinished ones."""
        self._running.set(min(known, slots))
        self._waiting.set(max(known - slots, 0))

    def done(self, reason: str) -> None:
        """Count a sequence that has ended: `stop`, `length`, or `abort` if it was cancelled."""
        self._done.labels(self._model, reason).inc()

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error."""
        self._refused.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        """Return the metrics in Prometheus's format."""
        return generate_latest(self._registry)
