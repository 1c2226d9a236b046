"""Workers' reports as metrics of Prometheus. Needs `pip install "farcall[otel]"`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from wsgiref.simple_server import WSGIServer

try:
    from prometheus_client import CollectorRegistry, generate_latest, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as missing:
    if str(missing.name).partition(".")[0] != "prometheus_client":
        raise
    raise ModuleNotFoundError(
        'farcall.monitor.metrics needs prometheus_client: pip install "farcall[otel]"',
        name=missing.name,
    ) from None

from farcall.monitor.asking import AskResult, ask_all
from farcall.runtime.inspection.reports import WorkerReport

_STATES = ("runs", "is queued", "waits for its future")  # of calls that are served
_Sample = tuple[list[str], float]


def text(answer: AskResult) -> str:
    """Return the state of workers in the text format of Prometheus.

    Args:
        answer: of `ask_all`.
    """
    return generate_latest(registry(lambda: answer)).decode()


def registry(ask: Callable[[], AskResult] = ask_all) -> CollectorRegistry:
    """Return what `prometheus_client.start_http_server` and others serve metrics from.

    Args:
        ask: called for each scrape, in its thread.
    """
    made = CollectorRegistry()
    made.register(_Workers(ask))
    return made


def serve(
    port: int, host: str = "127.0.0.1", ask: Callable[[], AskResult] = ask_all
) -> tuple[WSGIServer, threading.Thread]:
    """Serve the metrics at http://host:port/metrics, by a thread that is a daemon.

    Args:
        port: 0 for any; the server's `server_port` says which.
        ask: see `registry`.

    Returns:
        The server, which `shutdown` ends, and its thread.

    Raises:
        OSError: the address can't be listened on.
    """
    return start_http_server(port, host, registry(ask))


class _Workers(Collector):
    """The metrics of workers, made anew for each scrape."""

    def __init__(self, ask: Callable[[], AskResult]) -> None:
        self._ask = ask

    def describe(self) -> Iterable[Metric]:
        """Return nothing: so no worker is asked before the first scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Ask all workers, and yield what they say."""
        answer = self._ask()
        yield _gauge(
            "farcall_up",
            "Whether a worker that was found has answered.",
            ("worker", "pid"),
            [
                *(([one.name, str(one.pid)], 1.0) for one in answer.reports),
                *(([one.name, str(one.pid)], 0.0) for one in answer.silent),
            ],
        )
        yield _gauge(
            "farcall_worker_info",
            "The names, versions and state of a worker; always 1.",
            ("worker", "rank", "role", "host", "pid", "state", "versions"),
            [(_info(one), 1.0) for one in answer.reports],
        )
        for name, text, of in _OF_WORKERS:
            samples = [([one.name], float(of(one))) for one in answer.reports]
            yield _gauge(name, text, ("worker",), samples)
        for name, text, label, several in _OF_PARTS:
            samples = [
                ([one.name, key], float(value))
                for one in answer.reports
                for key, value in several(one)
            ]
            yield _gauge(name, text, ("worker", label), samples)
        received = CounterMetricFamily(
            "farcall_calls_received", "Calls that have come from a peer.", labels=("worker", "peer")
        )
        for one in answer.reports:
            for member in one.members:
                if not member.loss_cause:
                    received.add_metric([one.name, member.name], member.received)
        yield received


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: Iterable[_Sample]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _info(one: WorkerReport) -> list[str]:
    return [one.name, str(one.id), one.role, one.host, str(one.pid), one.state, one.versions]


def _oldest(one: WorkerReport) -> float:
    return max((call.seconds for call in one.calls if call.seconds is not None), default=0.0)


_OF_WORKERS: list[tuple[str, str, Callable[[WorkerReport], float]]] = [
    ("farcall_age_seconds", "Time since the worker began.", lambda one: one.age),
    ("farcall_memory_bytes", "Resident memory of the process.", lambda one: one.memory),
    ("farcall_open_fds", "Descriptors that are open.", lambda one: one.descriptors[0]),
    ("farcall_max_fds", "Descriptors that may be open.", lambda one: one.descriptors[1]),
    ("farcall_functions_running", "Functions that run.", lambda one: one.running),
    ("farcall_functions_limit", "Functions that may run at once.", lambda one: one.max_running),
    (
        "farcall_short_of_threads",
        "Whether functions are held back for want of threads.",
        lambda one: bool(one.shortage),
    ),
    ("farcall_oldest_call_seconds", "Age of the oldest call without an outcome.", _oldest),
]


def _in_flight(one: WorkerReport) -> Iterable[tuple[str, float]]:
    return Counter(call.worker for call in one.calls).items()


def _being_served(one: WorkerReport) -> Iterable[tuple[str, float]]:
    counts = Counter(call.state for call in one.served)
    return [(state, counts[state]) for state in _STATES]


def _unsent(one: WorkerReport) -> Iterable[tuple[str, float]]:
    return [(member.name, member.unsent) for member in one.members if not member.loss_cause]


def _peer_lost(one: WorkerReport) -> Iterable[tuple[str, float]]:
    return [(member.name, bool(member.loss_cause)) for member in one.members]


_OF_PARTS: list[tuple[str, str, str, Callable[[WorkerReport], Iterable[tuple[str, float]]]]] = [
    ("farcall_calls_in_flight", "Calls made that have no outcome.", "peer", _in_flight),
    (
        "farcall_calls_being_served",
        "Calls that are not answered.",
        "state",
        _being_served,
    ),
    ("farcall_unsent_bytes", "Bytes that wait until a worker reads.", "peer", _unsent),
    ("farcall_peer_lost", "Whether a worker is lost to this one.", "peer", _peer_lost),
    (
        "farcall_references",
        "Sizes of the tables of references.",
        "kind",
        lambda one: one.references.items(),
    ),
]
