"""What --enable-metrics shows of routed experts, in SGLang's Prometheus style."""

from __future__ import annotations

from collections.abc import Mapping


class DeliveryMetrics:
    """Of the answering process.

    Args:
        labels: names and values of the manager's own metrics.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        # Only now: prometheus_client reads PROMETHEUS_MULTIPROC_DIR when it is imported.
        from prometheus_client import Counter, Gauge, Histogram

        names = list(labels)
        self._rows = Counter(
            "sglang:routed_experts_rows_total",
            "Rows of routed experts returned to clients, one a token.",
            names,
        ).labels(**labels)
        self._bytes = Counter(
            "sglang:routed_experts_bytes_total",
            "Bytes of routed experts returned to clients, as encoded.",
            names,
        ).labels(**labels)
        self._in_flight = Gauge(
            "sglang:routed_experts_bytes_in_flight",
            "Bytes of routed experts held for clients that have not read them yet.",
            names,
            multiprocess_mode="livesum",
        ).labels(**labels)
        self._seconds = Histogram(
            "sglang:routed_experts_delivery_seconds",
            "From a request's end in the scheduler to its rows being ready for the response.",
            names,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
        ).labels(**labels)

    def handed_over(self, num_rows: int, num_bytes: int, seconds: float) -> None:
        """One request's rows are ready for its response."""
        self._rows.inc(num_rows)
        self._bytes.inc(num_bytes)
        self._seconds.observe(seconds)

    def in_flight(self, num_bytes: int) -> None:
        """`num_bytes` are on their way out now."""
        self._in_flight.set(num_bytes)


def report_memory(labels: Mapping[str, str], store_bytes: int, shared_bytes: int) -> None:
    """Of the scheduler, once its store is allocated.

    Args:
        labels: of the scheduler's own metrics.
        store_bytes: size of the host store.
        shared_bytes: size of the shared memory through which rows are handed over.
    """
    gauges = _memory_gauges(tuple(labels))
    for gauge, value in zip(gauges, (store_bytes, shared_bytes)):
        gauge.labels(**labels).set(value)


def _memory_gauges(names: tuple[str, ...]):
    if not _GAUGES:
        from prometheus_client import Gauge

        for name, what in (
            ("host_store_bytes", "Size of the host store of routed experts."),
            ("shared_memory_bytes", "Shared memory through which routed experts are handed over."),
        ):
            _GAUGES.append(
                Gauge(f"sglang:routed_experts_{name}", what, names, multiprocess_mode="mostrecent")
            )
    return _GAUGES


_GAUGES: list = []
