"""Spans, counters and histograms of calls and backward passes, by OpenTelemetry.

    from farcall import otel

    otel.instrument()

Needs `pip install "farcall[otel]"`. Nothing else imports this, and no call does anything for it
until `instrument` is called, which concerns this process only. docs/telemetry.md has the details.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from farcall.runtime.calls.graph_breaks import breaks_graphs

try:
    from farcall.otel import calls, passes
    from farcall.otel.recorder import Recorder
    from farcall.otel.replacements import Replacements
except ModuleNotFoundError as missing:
    if str(missing.name).partition(".")[0] != "opentelemetry":
        raise
    raise ModuleNotFoundError(
        'farcall.otel needs OpenTelemetry: pip install "farcall[otel]"', name=missing.name
    ) from None

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

__all__ = ["instrument", "uninstrument"]


def __dir__() -> list[str]:
    return __all__


_changing = threading.Lock()
_replacements = Replacements()


@breaks_graphs
def instrument(
    *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> None:
    """Record the calls and backward passes of this process from now on. Thread-safe.

    Workers that run already are recorded, too. The context of a span travels with each call, by the
    propagators that OpenTelemetry is set to (`OTEL_PROPAGATORS`; W3C Trace Context by default): so
    spans of processes that all call this make one trace. A second call replaces the providers.

    Args:
        tracer_provider: where spans go; None: the global one.
        meter_provider: where counters and histograms go; None: the global one.
    """
    recorder = Recorder(tracer_provider, meter_provider)
    with _changing:
        _replacements.undo()
        calls.instrument(_replacements, recorder)
        passes.instrument(_replacements, recorder)


@breaks_graphs
def uninstrument() -> None:
    """Record nothing that begins from now on: calls cost what they did before. Thread-safe."""
    with _changing:
        _replacements.undo()
