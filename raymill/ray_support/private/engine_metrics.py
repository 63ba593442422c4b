"""vLLM's engine metrics: sends them to Ray in batches, because vLLM records a dozen values in each step.

With a single stream, Ray's own way took a sixth of a replica's CPU time.
"""

import asyncio

from vllm.v1.metrics.ray_wrappers import (
    RayCounterWrapper,
    RayGaugeWrapper,
    RayHistogramWrapper,
    RayPrometheusStatLogger,
)

INTERVAL_S = 0.1


class MetricBatch:
    """Values that vLLM has recorded and Ray does not have yet. All of them are recorded in one event loop's thread."""

    def __init__(self) -> None:
        self._gauges: dict[BatchedGauge, float] = {}
        self._counters: dict[BatchedCounter, float] = {}
        self._observed: list[tuple[BatchedHistogram, float]] = []
        self._is_scheduled = False

    def set(self, gauge: "BatchedGauge", value: float) -> None:
        self._gauges[gauge] = value
        self._schedule()

    def increase(self, counter: "BatchedCounter", value: float) -> None:
        self._counters[counter] = self._counters.get(counter, 0) + value
        self._schedule()

    def observe(self, histogram: "BatchedHistogram", value: float) -> None:
        self._observed.append((histogram, value))
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(INTERVAL_S, self._send)

    def _send(self) -> None:
        gauges, counters, observed = self._gauges, self._counters, self._observed
        self._gauges, self._counters, self._observed, self._is_scheduled = {}, {}, [], False
        for gauge, value in gauges.items():
            gauge.metric.set(value, tags=gauge._tags)
        for counter, value in counters.items():
            counter.metric.inc(value, tags=counter._tags)
        for histogram, value in observed:
            histogram.metric.observe(value, tags=histogram._tags)


BATCH = MetricBatch()


class BatchedGauge(RayGaugeWrapper):
    """A gauge. Ray gets its last value."""

    def set(self, value: float) -> None:
        BATCH.set(self, value)


class BatchedCounter(RayCounterWrapper):
    """A counter. Ray gets the sum of its increments."""

    def inc(self, value: float = 1.0) -> None:
        if value:
            BATCH.increase(self, value)


class BatchedHistogram(RayHistogramWrapper):
    """A histogram. Ray gets each of its values."""

    def observe(self, value: float) -> None:
        BATCH.observe(self, value)


def install() -> None:
    """Batch the metrics of engines that this process creates in an event loop.

    Relies on `_gauge_cls`, `_counter_cls` and `_histogram_cls` of vllm.v1.metrics.ray_wrappers.RayPrometheusStatLogger,
    which Ray Serve LLM passes to vLLM, and on `metric` and `_tags` of the wrappers (vLLM 0.29).
    """
    RayPrometheusStatLogger._gauge_cls = BatchedGauge
    RayPrometheusStatLogger._counter_cls = BatchedCounter
    RayPrometheusStatLogger._histogram_cls = BatchedHistogram
