"""Names of `farcall.otel`, the Prometheus text, and imports that only its users pay for."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from urllib.request import urlopen

import pytest
from opentelemetry.semconv._incubating.attributes import rpc_attributes
from opentelemetry.semconv._incubating.metrics import rpc_metrics
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.semconv.schemas import Schemas
from patience import PATIENCE
from prometheus_client.parser import text_string_to_metric_families

from farcall.monitor import AskResult, SilentWorker, metrics
from farcall.otel import recorder
from farcall.runtime.inspection.reports import CallReport, MemberReport, WorkerReport


def test_names_are_those_of_the_conventions() -> None:
    assert rpc_attributes.RPC_SYSTEM_NAME == recorder.SYSTEM
    assert rpc_attributes.RPC_METHOD == recorder.METHOD
    assert rpc_attributes.RPC_METHOD_ORIGINAL == recorder.ASKED_FOR
    assert server_attributes.SERVER_ADDRESS == recorder.ADDRESS
    assert error_attributes.ERROR_TYPE == recorder.ERROR
    assert error_attributes.ErrorTypeValues.OTHER.value == recorder.UNKNOWN
    assert recorder.SCHEMA in {one.value for one in Schemas}
    assert rpc_metrics.RPC_CLIENT_CALL_DURATION == "rpc.client.call.duration"
    assert rpc_metrics.RPC_SERVER_CALL_DURATION == "rpc.server.call.duration"


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_of_it_is_imported_before_it_is_asked_for() -> None:
    program = """
import sys
import farcall, farcall.rpc, farcall.monitor, farcall.cli.status, farcall.groups, farcall.actors
print([name for name in sys.modules if name.startswith(("opentelemetry", "prometheus_client"))])
"""
    assert run(program) == "[]\n"


@pytest.mark.parametrize(
    ("module", "package"),
    [("farcall.otel", "opentelemetry"), ("farcall.monitor.metrics", "prometheus_client")],
)
def test_a_user_without_the_extra_is_told_its_name(module: str, package: str) -> None:
    program = f"""
import sys
sys.modules["{package}"] = None
try:
    import {module}
except ModuleNotFoundError as error:
    print(error)
"""
    assert 'pip install "farcall[otel]"' in run(program)


def report(**more: Any) -> WorkerReport:
    known = {"name": "w0", "id": 0, "incarnation": 1, "host": "box", "pid": 10}
    return WorkerReport(
        **known, versions="farcall 1", age=2.5, memory=100, descriptors=(3, 50), **more
    )


def call(worker: str, state: str, seconds: float | None = 1.0) -> CallReport:
    return CallReport("f", worker, 1, seconds, 60.0, state)


def member(name: str, unsent: int, received: int, lost: str = "") -> MemberReport:
    return MemberReport(name, 1, 2, "box", 11, (), "shm", 0, unsent, True, lost, received=received)


ANSWER = AskResult(
    [
        report(
            role='a "role"',
            members=[member("w1", 7, 12), member("w2", 0, 0, lost="it died")],
            calls=[call("w1", "flies"), call("w1", "flies", 8.0), call("w2", "flies", None)],
            served=[call("w1", "runs"), call("w1", "is queued")],
            running=1,
            max_running=16,
            references={"owned": 4},
        )
    ],
    [SilentWorker(99, "w3", "it does not answer", "sleeps")],
)


def samples_of(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the samples as Prometheus reads them."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_of_an_answer() -> None:
    samples = samples_of(metrics.text(ANSWER))
    w0 = ("worker", "w0")
    expected: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
        ("farcall_up", (w0, ("pid", "10"))): 1,
        ("farcall_up", (("worker", "w3"), ("pid", "99"))): 0,
        ("farcall_age_seconds", (w0,)): 2.5,
        ("farcall_memory_bytes", (w0,)): 100,
        ("farcall_open_fds", (w0,)): 3,
        ("farcall_max_fds", (w0,)): 50,
        ("farcall_functions_running", (w0,)): 1,
        ("farcall_functions_limit", (w0,)): 16,
        ("farcall_short_of_threads", (w0,)): 0,
        ("farcall_oldest_call_seconds", (w0,)): 8,
        ("farcall_calls_in_flight", (w0, ("peer", "w1"))): 2,
        ("farcall_calls_in_flight", (w0, ("peer", "w2"))): 1,
        ("farcall_calls_being_served", (w0, ("state", "runs"))): 1,
        ("farcall_calls_being_served", (w0, ("state", "is queued"))): 1,
        ("farcall_calls_being_served", (w0, ("state", "waits for its future"))): 0,
        ("farcall_unsent_bytes", (w0, ("peer", "w1"))): 7,
        ("farcall_peer_lost", (w0, ("peer", "w1"))): 0,
        ("farcall_peer_lost", (w0, ("peer", "w2"))): 1,
        ("farcall_references", (w0, ("kind", "owned"))): 4,
        ("farcall_calls_received_total", (w0, ("peer", "w1"))): 12,
    }
    known = {(name, frozenset(labels)): value for (name, labels), value in expected.items()}
    [info] = samples.keys() - known.keys()
    assert dict(info[1])["role"] == 'a "role"'
    assert {key: samples[key] for key in known} == known


def test_names_follow_the_rules_of_prometheus() -> None:
    for family in text_string_to_metric_families(metrics.text(ANSWER)):
        assert family.type in {"gauge", "counter"}
        assert family.documentation
        assert all(one.name.endswith("_total") for one in family.samples) == (
            family.type == "counter"
        )


def test_metrics_are_served() -> None:
    asked = []

    def ask() -> AskResult:
        asked.append(1)
        return ANSWER

    server, thread = metrics.serve(0, ask=ask)
    try:
        for _ in range(2):  # each scrape asks anew
            url = f"http://127.0.0.1:{server.server_port}/metrics"
            with urlopen(url, timeout=PATIENCE) as answer:
                assert answer.read().decode() == metrics.text(ANSWER)
        assert len(asked) == 2
    finally:
        server.shutdown()
        thread.join(PATIENCE)
        server.server_close()
