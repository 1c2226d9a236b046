"""`farcall.otel`: spans that join over workers, counters and histograms."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind, StatusCode
from patience import PATIENCE

import farcall
from behaviour.helpers import Gate
from behaviour.unmet import Store
from farcall import autograd, otel, rpc
from farcall.autograd.passes import Pass
from farcall.autograd.runner import Runner
from farcall.errors import PeerLost, Refused, RpcTimeout
from farcall.runtime import agent as agents_module
from farcall.runtime.agent import Agent
from farcall.runtime.calls.future import Future
from farcall.runtime.calls.requests import Requests

pytestmark = pytest.mark.parametrize("transport", ["socket"])
CLIENT, SERVER, INTERNAL, CONSUMER = (
    SpanKind.CLIENT,
    SpanKind.SERVER,
    SpanKind.INTERNAL,
    SpanKind.CONSUMER,
)


class Spans(SpanProcessor):
    """The spans that have ended."""

    def __init__(self) -> None:
        self._ended: list[ReadableSpan] = []
        self._changed = threading.Condition()
        self.provider = TracerProvider()
        self.provider.add_span_processor(self)
        self.tracer = self.provider.get_tracer("test")

    def on_end(self, span: ReadableSpan) -> None:
        with self._changed:
            self._ended.append(span)
            self._changed.notify_all()

    def of(self, kind: SpanKind, name: str, count: int = 1) -> list[ReadableSpan]:
        """Return so many spans of this kind and name, when they have ended."""

        def found() -> list[ReadableSpan]:
            return [one for one in self._ended if (one.kind, one.name) == (kind, name)]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, PATIENCE), self.names()
            assert len(found()) == count
            return found()

    def names(self) -> list[str]:
        return [f"{one.kind.name} {one.name}" for one in self._ended]


@pytest.fixture
def spans() -> Iterator[Spans]:
    spans = Spans()
    otel.instrument(tracer_provider=spans.provider)
    yield spans
    otel.uninstrument()


def id_of(span: Any) -> tuple[int, int]:
    context = span.get_span_context()
    return context.trace_id, context.span_id


def is_child(child: ReadableSpan, parent: Any) -> bool:
    above = child.parent
    return above is not None and (above.trace_id, above.span_id) == id_of(parent)


def both(spans: Spans, name: str) -> tuple[ReadableSpan, ReadableSpan]:
    """Return the two spans of the only call of this name, which belong together."""
    [client], [server] = spans.of(CLIENT, name), spans.of(SERVER, name)
    assert is_child(server, client)
    return client, server


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


ADD = "_operator:add"
HERE = "behaviour.test_telemetry:"
WAIT = "behaviour.helpers:Gate.wait"


def add_at(worker: str) -> int:
    result: int = rpc.rpc_sync(worker, operator.add, args=(1, 2))
    return result


def fail() -> None:
    raise ValueError("no")


@rpc.functions.async_execution
def add_later(worker: str) -> Any:
    future = rpc.rpc_async(worker, operator.add, args=(1, 2))
    return future.then(lambda done: rpc.rpc_sync(worker, operator.mul, args=(done.wait(), 2)))


class Buffer:
    def __init__(self) -> None:
        self.size = 3

    def sample(self, count: int) -> int:
        return count


# Calls.


def test_a_call_has_a_span_at_each_end(pair: list[Agent], spans: Spans) -> None:
    assert add_at("w1") == 3
    client, server = both(spans, ADD)
    assert client.parent is None
    common = {"rpc.system.name": "farcall", "rpc.method": ADD, "server.address": "here"}
    assert attributes_of(client) == {**common, "farcall.worker": "w0", "farcall.peer": "w1"}
    assert attributes_of(server) == {**common, "farcall.worker": "w1", "farcall.peer": "w0"}
    assert [one.status.status_code for one in (client, server)] == [StatusCode.UNSET] * 2
    assert client.start_time is not None
    assert server.start_time is not None
    assert client.start_time <= server.start_time


def test_a_nested_call_belongs_to_the_call_that_makes_it(trio: list[Agent], spans: Spans) -> None:
    with spans.tracer.start_as_current_span("mine") as mine:
        rpc.rpc_sync("w1", add_at, args=("w2",))
    client, server = both(spans, f"{HERE}add_at")
    nested, _ = both(spans, ADD)
    assert is_child(client, mine)
    assert is_child(nested, server)
    assert attributes_of(nested)["farcall.worker"] == "w1"


def handle_of_buffer() -> Any:
    return farcall.spawn("w1", Buffer)


async def awaited(buffer: Any) -> int:
    result: int = await buffer.size
    return result


WAYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rpc_sync": (lambda _: rpc.rpc_sync("w1", operator.add, args=(1, 2)), ADD),
    "rpc_async": (lambda _: rpc.rpc_async("w1", operator.add, args=(1, 2)).wait(), ADD),
    "remote": (lambda _: rpc.remote("w1", operator.add, args=(1, 2)), ADD),
    "by id": (lambda _: rpc.rpc_sync(1, operator.add, args=(1, 2)), ADD),
    "to itself": (lambda _: rpc.rpc_sync("w0", operator.add, args=(1, 2)), ADD),
    "by value": (lambda _: rpc.rpc_sync("w1", lambda: 3), "<lambda>.<locals>.<lambda>"),
    "method": (lambda buffer: buffer.rpc_sync().sample(3), "sample"),
    "asynchronous method": (lambda buffer: buffer.rpc_async().sample(3).wait(), "sample"),
    "remote method": (lambda buffer: buffer.remote().sample(3), "sample"),
    "to_here": (lambda buffer: buffer.to_here(), "farcall.rref:fetch"),
    "actor": (lambda buffer: buffer.sample(3).wait(), "sample"),
    "synchronous actor": (lambda buffer: buffer.sample.sync(3), "sample"),
    "awaited attribute": (
        lambda buffer: asyncio.run(awaited(buffer)),
        "farcall.objects:read_attribute",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_call_joins_the_trace(pair: list[Agent], spans: Spans, way: str) -> None:
    call, name = WAYS[way]
    with spans.tracer.start_as_current_span("mine") as mine:
        buffer = handle_of_buffer()
        call(buffer)
    client, server = both(spans, name)
    assert is_child(client, mine)
    assert attributes_of(client)["farcall.peer"] == attributes_of(server)["farcall.worker"]
    assert attributes_of(server)["rpc.method"] == name
    made, _ = both(spans, f"{HERE}Buffer")
    assert is_child(made, mine)


def test_tasks_of_asyncio_have_traces_of_their_own(pair: list[Agent], spans: Spans) -> None:
    async def call(number: int) -> None:
        with spans.tracer.start_as_current_span(f"task {number}"):
            assert await rpc.rpc_async("w1", operator.add, args=(number, 1)) == number + 1

    async def program() -> None:
        await asyncio.gather(*(call(number) for number in range(3)))

    asyncio.run(program())
    tasks = {id_of(spans.of(INTERNAL, f"task {number}")[0]) for number in range(3)}
    clients = spans.of(CLIENT, ADD, 3)
    servers = spans.of(SERVER, ADD, 3)
    assert {(one.parent.trace_id, one.parent.span_id) for one in clients if one.parent} == tasks
    assert {one.parent.span_id for one in servers if one.parent} == {
        id_of(one)[1] for one in clients
    }


def test_a_call_whose_function_returns_a_future_lasts_until_that_is_done(
    trio: list[Agent], spans: Spans
) -> None:
    assert rpc.rpc_sync("w1", add_later, args=("w2",)) == 6
    _, server = both(spans, f"{HERE}add_later")
    for name in (ADD, "_operator:mul"):  # the second one is made in a callback
        client, _ = both(spans, name)
        assert is_child(client, server)
        assert (client.end_time or 0) <= (server.end_time or 0)


def test_a_callback_that_is_taken_back_is_still_found(pair: list[Agent], spans: Spans) -> None:
    future: Future[int] = Future()
    with spans.tracer.start_as_current_span("mine"):
        future.add_done_callback(print)
    assert future.remove_done_callback(print) == 1


def test_a_call_that_waits_for_the_store_joins_the_trace(
    start: Callable[..., list[Agent]], spans: Spans
) -> None:
    store = Store()
    agents = start(2, find=store.find)
    store.part(agents[0], agents[1].me)
    with spans.tracer.start_as_current_span("mine") as mine:
        future = rpc.rpc_async("w1", operator.add, args=(1, 2))
        rref = rpc.remote("w1", operator.mul, args=(1, 2))
    store.answers.set()
    assert (future.wait(), rref.to_here()) == (3, 2)
    for name in (ADD, "_operator:mul"):
        client, _ = both(spans, name)
        assert is_child(client, mine)


# Errors.


@pytest.mark.parametrize("way", ["sync", "async", "remote"])
def test_an_error_is_recorded_at_both_ends(pair: list[Agent], spans: Spans, way: str) -> None:
    if way == "remote":
        rpc.remote("w1", fail)
    else:
        with pytest.raises(ValueError, match="no"):
            rpc.rpc_sync("w1", fail) if way == "sync" else rpc.rpc_async("w1", fail).wait()
    ends = both(spans, f"{HERE}fail")
    for span in ends[1:] if way == "remote" else ends:
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "ValueError: no"
        assert attributes_of(span)["error.type"] == "ValueError"
        [event] = span.events
        said = dict(event.attributes or {})
        assert (event.name, said["exception.type"]) == ("exception", "ValueError")
        assert "in fail" in str(said["exception.stacktrace"])


def test_a_call_that_takes_too_long(pair: list[Agent], spans: Spans, gate: Gate) -> None:
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("w1", Gate.wait, args=(gate,), timeout=0.1)
    gate.open()
    [client] = spans.of(CLIENT, WAIT)
    assert attributes_of(client)["error.type"] == "farcall.errors.RpcTimeout"


def test_a_call_to_a_worker_that_leaves(pair: list[Agent], spans: Spans, gate: Gate) -> None:
    future = rpc.rpc_async("w1", Gate.wait, args=(gate,))
    gate.wait_for_arrivals()
    pair[1].close(patience=0)
    gate.open()
    with pytest.raises(PeerLost):
        future.wait()
    [client] = spans.of(CLIENT, WAIT)
    assert attributes_of(client)["error.type"] == "farcall.errors.PeerLost"


def test_a_worker_with_a_policy_takes_part(start: Callable[..., list[Agent]], spans: Spans) -> None:
    """Count a refused name as no method of the worker: others can't fill its metrics with names."""
    start(2, policies={"w1": rpc.Only([operator.add])})
    assert add_at("w1") == 3
    both(spans, ADD)
    with pytest.raises(Refused):
        rpc.rpc_sync("w1", operator.mul, args=(1, 2))
    client, server = both(spans, "_operator:mul")
    assert attributes_of(client)["rpc.method"] == "_operator:mul"
    assert attributes_of(server)["rpc.method"] == "_OTHER"
    assert attributes_of(server)["rpc.method_original"] == "_operator:mul"
    assert attributes_of(server)["error.type"] == "farcall.errors.Refused"


# Backward passes.


def twice(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def backward(trio: list[Agent], function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with autograd.context() as context:
        leaf = torch.ones(2, requires_grad=True) * 2
        first = rpc.rpc_sync("w1", twice, args=(leaf,))
        second = rpc.rpc_sync("w2", function, args=(first,))
        third = rpc.rpc_sync("w2", twice, args=(leaf,))  # shares a node with the first
        autograd.backward(context, [(second + third).sum()])


def test_a_backward_pass_is_one_trace(trio: list[Agent], spans: Spans) -> None:
    with spans.tracer.start_as_current_span("mine") as mine:
        backward(trio, twice)
    [root] = spans.of(INTERNAL, "farcall.backward")
    assert is_child(root, mine)
    parts = spans.of(CONSUMER, "farcall.gradients", 6)  # w0, w1 and w2 send three each way
    together = spans.of(INTERNAL, "farcall.gradients")  # of the two that share a node
    assert all(is_child(one, root) for one in [*parts, *together])
    assert {attributes_of(one)["farcall.worker"] for one in parts} == {"w0", "w1", "w2"}


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient")


def fails_backward(value: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Fails.apply(value)  # type: ignore[no-untyped-call]
    return result


def test_a_backward_pass_that_fails_says_where(trio: list[Agent], spans: Spans) -> None:
    with pytest.raises(ValueError, match="no gradient"):
        backward(trio, fails_backward)
    [root] = spans.of(INTERNAL, "farcall.backward")
    assert attributes_of(root)["error.type"] == "ValueError"
    failed = [
        attributes_of(one)["farcall.worker"]
        for one in spans._ended
        if one.kind is CONSUMER and attributes_of(one).get("error.type") == "ValueError"
    ]
    assert failed[0] == "w2"


# Metrics.


def points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_calls_are_counted_and_timed(pair: list[Agent]) -> None:
    spans, reader = Spans(), InMemoryMetricReader()
    provider = MeterProvider([reader])
    otel.instrument(tracer_provider=spans.provider, meter_provider=provider)
    try:
        add_at("w1")
        with suppress(ValueError):
            rpc.rpc_sync("w1", fail)
        rpc.rpc_sync("w1", torch.neg, args=(torch.ones(10_000),))
        both(spans, ADD)
        both(spans, f"{HERE}fail")
        spans.of(SERVER, "torch:neg")
    finally:
        otel.uninstrument()
    found = points(reader)
    for side in ("client", "server"):
        durations = {
            (one.attributes["rpc.method"], one.attributes.get("error.type")): one
            for one in found[f"rpc.{side}.call.duration"]
        }
        assert durations.keys() == {
            (ADD, None),
            (f"{HERE}fail", "ValueError"),
            ("torch:neg", None),
        }
        assert all(one.count == 1 and one.sum > 0 for one in durations.values())
        assert sum(one.value for one in found[f"farcall.{side}.calls"]) == 3
        [sent] = found[f"farcall.{side}.sent"]
        assert 40_000 < sent.value < 50_000
    assert all("farcall.peer" not in one.attributes for one in found["rpc.client.call.duration"])


def test_a_span_that_is_not_sampled_does_not_matter(pair: list[Agent]) -> None:
    otel.instrument()  # there is no SDK behind the global providers
    try:
        assert add_at("w1") == 3
        assert trace.get_current_span() is trace.INVALID_SPAN
    finally:
        otel.uninstrument()


# On and off.

REPLACED = [
    *((Agent, name) for name in ("call", "call_async", "remote")),
    (Requests, "begin"),
    (Future, "_add"),
    (agents_module, "ServerCall"),
    *((Runner, name) for name in ("backward", "new_options", "_deliver")),
    *((Pass, name) for name in ("_run_shared", "fail")),
]


def test_replaced_functions_are_put_back(pair: list[Agent], spans: Spans) -> None:
    replaced = [getattr(owner, name) for owner, name in REPLACED]
    otel.uninstrument()
    originals = [getattr(owner, name) for owner, name in REPLACED]
    assert all(one is not other for one, other in zip(replaced, originals, strict=True))
    add_at("w1")
    assert spans.names() == []
    otel.uninstrument()  # once more has no effect
    otel.instrument(tracer_provider=spans.provider)
    otel.instrument(tracer_provider=spans.provider)  # takes the place of the first
    add_at("w1")
    both(spans, ADD)
    otel.uninstrument()
    assert originals == [getattr(owner, name) for owner, name in REPLACED]


def test_a_call_that_is_being_served_when_it_is_turned_off_still_ends(
    pair: list[Agent], spans: Spans, gate: Gate
) -> None:
    future = rpc.rpc_async("w1", Gate.wait, args=(gate,))
    gate.wait_for_arrivals()
    otel.uninstrument()
    gate.open()
    future.wait()
    assert all(span.end_time for span in both(spans, WAIT))
