"""Records backward passes: a span at the root, and one for each part of a pass elsewhere.

All workers are told of the span at the root, so it is the parent of all others: a part may run in
any thread, and begin when the gradients of several workers are there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from opentelemetry.context import attach, detach, get_current, get_value, set_value
from opentelemetry.trace import SpanKind

from farcall.autograd.handlers import PassOptions
from farcall.autograd.passes import Pass
from farcall.autograd.runner import Runner
from farcall.otel.recorder import PEER, WORKER, RecordedSpan, Recorder, carrier, context_from
from farcall.otel.replacements import Replacements
from farcall.runtime.membership.peers import Peer
from farcall.wire.frames import Frame

ROOT = "farcall.backward"
PART = "farcall.gradients"
_KEY = "farcall-part-of-pass"


def instrument(replacements: Replacements, recorder: Recorder) -> None:
    """Have backward passes recorded."""
    replacements.replace(Runner, "backward", partial(_recorded_root, recorder))
    replacements.replace(Runner, "new_options", _with_trace)
    replacements.replace(Runner, "_deliver", partial(_recorded_arrival, recorder))
    replacements.replace(Pass, "_run_shared", partial(_recorded_run, recorder))
    replacements.replace(Pass, "fail", _with_error)


def _within(recorded: RecordedSpan, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function inside a span."""
    token = attach(set_value(_KEY, recorded, recorded.context))
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        recorded.fail(error)
        raise
    finally:
        detach(token)
        recorded.end()


def _recorded_root(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def backward(runner: Runner, *args: Any, **kwargs: Any) -> None:
        attributes = {WORKER: runner.agent.me.name}
        began = recorder.begin(
            ROOT, SpanKind.INTERNAL, attributes, recorder.backward, context=get_current()
        )
        _within(began, original, runner, *args, **kwargs)

    return backward


def _with_trace(original: Callable[..., PassOptions]) -> Callable[..., PassOptions]:
    @wraps(original)
    def new_options(runner: Runner, *args: Any, **kwargs: Any) -> PassOptions:
        return original(runner, *args, **kwargs)._replace(trace=carrier())

    return new_options


def _recorded_arrival(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def deliver(runner: Runner, peer: Peer, frame: Frame) -> None:
        attributes = {WORKER: runner.agent.me.name, PEER: peer.name}
        context = context_from(frame.message.trace)  # type: ignore[attr-defined]
        began = recorder.begin(PART, SpanKind.CONSUMER, attributes, context=context)
        _within(began, original, runner, peer, frame)

    return deliver


def _recorded_run(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def run_shared(run: Pass, *args: Any) -> None:
        attributes = {WORKER: run._agent.me.name}
        context = context_from(run.options.trace)
        began = recorder.begin(PART, SpanKind.INTERNAL, attributes, context=context)
        _within(began, original, run, *args)

    return run_shared


def _with_error(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def fail(run: Pass, error: BaseException) -> None:
        part = get_value(_KEY)
        if isinstance(part, RecordedSpan):
            part.fail(error)
        original(run, error)

    return fail
