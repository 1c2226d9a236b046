"""Recorded spans and metrics: names by OpenTelemetry's conventions for RPC.

The conventions are those of https://opentelemetry.io/docs/specs/semconv/rpc/. Things
without a name there have one that begins with "farcall.".
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import Counter, Histogram, MeterProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider

from farcall.errors import RemoteError
from farcall.serde import message_of, text_of, type_name_of
from farcall.version import VERSION

SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
SYSTEM, METHOD, ASKED_FOR = "rpc.system.name", "rpc.method", "rpc.method_original"
ADDRESS, ERROR = "server.address", "error.type"
WORKER, PEER = "farcall.worker", "farcall.peer"
UNKNOWN = "_OTHER"  # a method that the callee does not have
FARCALL = "farcall"

# Seconds: those of the conventions, and shorter ones, since a small call takes some 10 us.
SHORT = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3)
BOUNDARIES = (*SHORT, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)


class Instruments(NamedTuple):
    """The instruments that count one side of calls."""

    duration: Histogram
    calls: Counter
    sent: Counter


class RecordedSpan:
    """A span, and the duration that is recorded when it ends. Used by one thread at a time.

    Attributes:
        span: of OpenTelemetry.
        attributes: of the duration, which are fewer than the span's.
        context: in which the span is the current one.
    """

    __slots__ = ("_began", "_duration", "_is_ended", "attributes", "context", "span")

    def __init__(
        self, span: Span, context: Context, duration: Histogram | None, attributes: dict[str, Any]
    ) -> None:
        self.span = span
        self.attributes = attributes
        self.context = trace.set_span_in_context(span, context)
        self._duration = duration
        self._is_ended = False
        self._began = time.perf_counter()

    def rename(self, method: str) -> None:
        """Set the name of the called function, when that is known."""
        self.attributes[METHOD] = method
        self.span.update_name(method)
        self.span.set_attribute(METHOD, method)

    def fail(self, error: BaseException) -> None:
        """Say that it failed with an error; of several the first one counts."""
        name = error.type_name if isinstance(error, RemoteError) else type_name_of(error)
        self.fail_with(name, message_of(error), text_of(error))

    def fail_with(self, type_name: str, message: str, stack: str = "") -> None:
        """Fail as `fail` does, with an error that is known by its parts."""
        if ERROR in self.attributes or self._is_ended:
            return
        self.attributes[ERROR] = type_name
        if self.span.is_recording():
            event = {"exception.type": type_name, "exception.message": message}
            if stack:
                event["exception.stacktrace"] = stack
            self.span.add_event("exception", event)
            self.span.set_attribute(ERROR, type_name)
            self.span.set_status(Status(StatusCode.ERROR, f"{type_name}: {message}"))

    def end(self) -> None:
        """End the span. No effect the second time."""
        if not self._is_ended:
            self._is_ended = True
            if self._duration is not None:
                seconds = time.perf_counter() - self._began
                self._duration.record(seconds, self.attributes, self.context)
            self.span.end()


class Recorder:
    """Begins spans, and has the instruments. Thread-safe.

    Args:
        tracer_provider, meter_provider: see `farcall.otel.instrument`.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None
    ) -> None:
        self._tracer = trace.get_tracer(FARCALL, VERSION, tracer_provider, SCHEMA)
        meter = metrics.get_meter(FARCALL, VERSION, meter_provider, SCHEMA)

        def duration(name: str, of: str) -> Histogram:
            return meter.create_histogram(
                name, "s", of, explicit_bucket_boundaries_advisory=BOUNDARIES
            )

        self.client = Instruments(
            duration("rpc.client.call.duration", "Duration of calls that were made here."),
            meter.create_counter("farcall.client.calls", "{call}", "Calls that were begun here."),
            meter.create_counter("farcall.client.sent", "By", "Bytes of arguments that were sent."),
        )
        self.server = Instruments(
            duration("rpc.server.call.duration", "Duration of calls that were served here."),
            meter.create_counter("farcall.server.calls", "{call}", "Calls that arrived here."),
            meter.create_counter("farcall.server.sent", "By", "Bytes of results that were sent."),
        )
        self.backward = duration("farcall.backward.duration", "Duration of backward passes.")

    def begin(
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, str],
        duration: Histogram | None = None,
        keys: tuple[str, ...] = (),
        context: Context | None = None,
    ) -> RecordedSpan:
        """Begin a span.

        Args:
            attributes: of the span.
            duration: what its duration is recorded by.
            keys: of those attributes that the duration has, too.
            context: of the parent; None: the current one.
        """
        span = self._tracer.start_span(name, context, kind, attributes)
        measured = {key: attributes[key] for key in keys}
        return RecordedSpan(span, context or Context(), duration, measured)


def context_from(carrier: Mapping[str, str]) -> Context:
    """Return the context of a span elsewhere; an empty one if nothing was said of it."""
    return propagate.extract(carrier, Context()) if carrier else Context()


def carrier() -> dict[str, str]:
    """Return what others are to know of the current span."""
    known: dict[str, str] = {}
    propagate.inject(known)
    return known
