"""What the server counts, in Prometheus' text format: https://prometheus.io/docs/instrumenting/exposition_formats/

Times are taken where tokens arrive from the engine, before anything is rendered for a client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from a3b_gguf.planner.check import found_sizes
from a3b_server.generation import Drawn, Generation
from a3b_server.messages import Facts, Finished, Snapshot, Submit

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAP_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
STARTS = ("continued", "copied", "restored", "loaded")


class Metrics:
    """Owns a registry, so that two servers in one process do not share their numbers.

    planned: predicted bytes by (kind, device); they stand beside what the engine says it took.
    """

    def __init__(self, planned: Iterable[tuple[str, str, int]] = ()) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("a3b_requests", "Requests that the engine has taken, by how they ended", "end")
        self.refusals = self._counter("a3b_refusals", "Requests that were refused, by rule or by error code", "rule")
        self.prompt_tokens = self._counter("a3b_prompt_tokens", "Tokens of prompts", "source")
        self.generated_tokens = self._counter("a3b_generated_tokens", "Tokens that were generated")
        self.drafted_tokens = self._counter("a3b_drafted_tokens", "Tokens that were guessed ahead")
        self.accepted_tokens = self._counter("a3b_accepted_tokens", "Tokens that were guessed ahead and right")
        first, gap = "From taking a request to its first token", "Between two tokens of a request"
        self.first_token = Histogram("a3b_first_token_seconds", first, buckets=FIRST_TOKEN_SECONDS, registry=self.registry)
        self.gap = Histogram("a3b_token_gap_seconds", gap, buckets=GAP_SECONDS, registry=self.registry)
        self._up = self._gauge("a3b_engine_up", "1 while the engine answers")
        self._restarts = self._gauge("a3b_engine_restarts", "How often the engine was started again")
        self._in_flight = self._gauge("a3b_requests_in_flight", "Requests that are served or wait")
        self._waiting = self._gauge("a3b_requests_waiting", "Requests that wait for a slot")
        self._slots = self._gauge("a3b_slots", "Slots by what they do", "state")
        self._cache_tokens = self._gauge("a3b_cache_tokens", "Tokens that the cache holds")
        self._cache_room = self._gauge("a3b_cache_tokens_most", "Tokens that the cache can hold")
        self._checkpoints = self._gauge("a3b_checkpoints", "Checkpoints of recurrent states", "what")
        self._texts = self._gauge("a3b_kept_texts", "Texts that are kept without a slot, in RAM or on disk")
        self._starts = self._gauge("a3b_prompt_starts", "Prompts that went on from what the cache held", "kind")
        self._memory = self._gauge("a3b_memory_bytes", "Memory by kind and device, predicted and real", "source", "kind", "device")
        self._clip = self._gauge("a3b_activations", "Activations that were watched, since the engine was loaded", "what")
        self._beyond = self._gauge("a3b_activations_beyond", "Activations beyond the calibrated range", "layer", "site")
        for kind, device, n_bytes in planned:
            self._memory.labels("predicted", kind, device).set(n_bytes)

    def generation(self, request: Submit, cancel: Callable[[str], None]) -> Generation:
        """A Generation that is counted: what a Supervisor is given to make them."""
        return MeteredGeneration(request, cancel, self)

    def embedded(self, n_tokens: int) -> None:
        """A request whose texts of so many tokens became vectors."""
        self.requests.labels("embedded").inc()
        self.prompt_tokens.labels("read").inc(n_tokens)

    def refused(self, rules: Iterable[str]) -> None:
        """One refusal, which may be for several rules."""
        for rule in rules:
            self.refusals.labels(rule).inc()

    def text(self, state: str, n_restarts: int, n_in_flight: int, facts: Facts | None, snapshot: Snapshot | None) -> bytes:
        """Everything that was counted, and the engine as it is now. snapshot: None while there is no engine to ask."""
        self._up.set(state in ("ready", "busy"))
        self._restarts.set(n_restarts)
        self._in_flight.set(n_in_flight)
        if facts is not None:
            self._cache_room.set(facts.n_ctx)
            self._take_memory(facts)
        if snapshot is not None:
            self._take(snapshot)
        return generate_latest(self.registry)

    def _take_memory(self, facts: Facts) -> None:
        for (kind, device), n_bytes in found_sizes(facts.buffers).items():  # under the names of the plan
            self._memory.labels("real", kind, device).set(n_bytes)
        if facts.rss_bytes:
            self._memory.labels("real", "process", "RAM").set(facts.rss_bytes)  # once it was loaded

    def _take(self, snapshot: Snapshot) -> None:
        for state in ("idle", "waiting", "reading", "writing"):
            self._slots.labels(state).set(sum(slot.state == state for slot in snapshot.slots))
        self._waiting.set(snapshot.n_waiting)
        self._cache_tokens.set(sum(slot.n_tokens for slot in snapshot.slots))
        held, most = snapshot.checkpoints
        self._checkpoints.labels("held").set(held)
        self._checkpoints.labels("most").set(most)
        self._texts.set(snapshot.n_texts)
        if snapshot.clip is not None:
            for what in ("n_watched", "n_beyond", "n_clamped", "worst"):
                self._clip.labels(what.removeprefix("n_")).set(getattr(snapshot.clip, what))
            self._clip.labels("failed").set(bool(snapshot.clip.failure))
            for (layer, site), number in snapshot.clip.by_site.items():
                self._beyond.labels(str(layer), site).set(number)
        counts = snapshot.counts
        for kind, number in zip(STARTS, (counts.n_continued, counts.n_copied, counts.n_restored, counts.n_loaded), strict=True):
            self._starts.labels(kind).set(number)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)


class MeteredGeneration(Generation):
    """Counts what arrives for one request."""

    def __init__(self, request: Submit, cancel: Callable[[str], None], metrics: Metrics) -> None:
        super().__init__(request, cancel)
        self._metrics, self._last, self._begun = metrics, time.perf_counter(), False

    def put(self, item: Drawn | Finished | Exception) -> None:
        metrics = self._metrics
        if isinstance(item, Drawn):
            now = time.perf_counter()
            (metrics.gap if self._begun else metrics.first_token).observe(now - self._last)
            self._last, self._begun = now, True
        elif isinstance(item, Finished):
            metrics.requests.labels(item.reason).inc()
            metrics.prompt_tokens.labels("cached").inc(item.n_cached)
            metrics.prompt_tokens.labels("read").inc(item.n_prompt - item.n_cached)
            metrics.generated_tokens.inc(item.n_generated)
            metrics.drafted_tokens.inc(item.n_drafted)
            metrics.accepted_tokens.inc(item.n_accepted)
        else:
            metrics.requests.labels("failed").inc()
        super().put(item)
