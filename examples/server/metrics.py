"""The metrics that `/metrics` serves to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


class Metrics(Collector):
    """Counters of a server, and the state of its model at each scrape.

    Args:
        model: a MultiLoRAModel with a store.
        requests: its manager.
    """

    def __init__(self, model: Any, requests: Any) -> None:
        self._model, self._requests = model, requests
        self.registry = CollectorRegistry()
        by = {"labelnames": ["adapter"], "registry": self.registry}
        self.prompt_tokens = Counter("lora_prompt_tokens", "Tokens of prompts", **by)
        self.tokens = Counter("lora_generated_tokens", "Tokens of answers", **by)
        self.waits = Histogram(
            "lora_wait_seconds",
            "Until a request has its adapter in a slot",
            registry=self.registry,
        )
        self.registry.register(self)

    def collect(self) -> Iterator[Any]:
        """Yield the state of the pool and of the requests."""
        resident = GaugeMetricFamily("lora_resident", "Adapters in slots", labels=["adapter"])
        for name in self._model.adapters:
            resident.add_metric([name], 1)
        yield resident
        store, slots = self._model.store, self._model.pool.slots
        yield CounterMetricFamily("lora_loads", "Adapters brought into a slot", store.swaps)
        yield CounterMetricFamily("lora_disk_reads", "Adapters read from disk", store.disk_reads)
        yield CounterMetricFamily("lora_evictions", "Adapters that lost a slot", slots.evictions)
        yield GaugeMetricFamily("lora_waiting", "Requests without a slot", self._requests.waiting)
        up = self._requests.is_running()
        yield GaugeMetricFamily("lora_up", "Whether the model's thread runs", int(up))
