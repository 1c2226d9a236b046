"""Records calls: a span of kind CLIENT at the caller, one of kind SERVER at the callee."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from types import FunctionType
from typing import Any

from opentelemetry.context import attach, detach, get_current
from opentelemetry.trace import SpanKind

from farcall.ids import WorkerInfo
from farcall.otel.recorder import (
    ADDRESS,
    ASKED_FOR,
    FARCALL,
    METHOD,
    PEER,
    SYSTEM,
    UNKNOWN,
    WORKER,
    RecordedSpan,
    Recorder,
    carrier,
    context_from,
)
from farcall.otel.replacements import Replacements
from farcall.runtime import agent as agents
from farcall.runtime.agent import Agent
from farcall.runtime.calls.call_names import method_of
from farcall.runtime.calls.future import Future
from farcall.runtime.calls.requests import Requests
from farcall.runtime.calls.server_call import ServerCall
from farcall.runtime.membership.hosts import host_name
from farcall.serde import Payload, name_of, type_name_of
from farcall.torch_internals import Future as TorchFuture
from farcall.transport.base import Link  # noqa: F401  # msgspec reads the fields of `ServerCall`
from farcall.wire.messages import Buffer, Extras, Failure, OnDevice, Reply

_CLIENT = (SYSTEM, METHOD, ADDRESS)


def instrument(replacements: Replacements, recorder: Recorder) -> None:
    """Have calls recorded."""
    replacements.replace(Agent, "call", partial(_recorded_call, recorder))
    replacements.replace(Agent, "call_async", partial(_recorded_async, recorder))
    replacements.replace(Agent, "remote", partial(_recorded_call, recorder))
    replacements.replace(Requests, "begin", partial(_begin_with_trace, recorder))
    replacements.replace(Future, "_add", _callback_in_context)
    replacements.replace(agents, "ServerCall", lambda _: partial(RecordedCall, recorder=recorder))


# At the caller.


def _begin(
    recorder: Recorder, agent: Agent, to: Any, function: Any, args: Sequence[Any]
) -> RecordedSpan:
    peer = agent.directory.known(to)
    asked = to.name if isinstance(to, WorkerInfo) else str(to)
    attributes = {
        SYSTEM: FARCALL,
        METHOD: _method(function, args),
        ADDRESS: "" if peer is None else host_name(peer.worker.host),
        WORKER: agent.me.name,
        PEER: asked if peer is None else peer.name,
    }
    client = recorder.client
    made = recorder.begin(
        attributes[METHOD], SpanKind.CLIENT, attributes, client.duration, _CLIENT, get_current()
    )
    client.calls.add(1, made.attributes, made.context)
    return made


def _method(function: Any, args: Sequence[Any]) -> str:
    name = name_of(function) or ""
    return method_of(name, args) or name or _name_of_nameless(function)


def _name_of_nameless(function: Any) -> str:
    if type(function) is FunctionType:
        return function.__qualname__
    return type_name_of(function)


def _recorded_call(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """`Agent.call`, or `Agent.remote`: the span of that ends when the request was sent."""

    @wraps(original)
    def call(agent: Agent, to: Any, function: Any, args: Any = (), *rest: Any, **more: Any) -> Any:
        made = _begin(recorder, agent, to, function, args)
        token = attach(made.context)
        try:
            return original(agent, to, function, args, *rest, **more)
        except BaseException as error:
            made.fail(error)
            raise
        finally:
            detach(token)
            made.end()

    return call


def _recorded_async(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """`Agent.call_async`: the span ends with the future."""

    @wraps(original)
    def call(agent: Agent, to: Any, function: Any, args: Any = (), *rest: Any, **more: Any) -> Any:
        made = _begin(recorder, agent, to, function, args)
        token = attach(made.context)
        try:
            future = original(agent, to, function, args, *rest, **more)
        except BaseException as error:
            made.fail(error)
            made.end()
            raise
        finally:
            detach(token)
        # Past our class, which counts a callback as interest in the result.
        TorchFuture.add_done_callback(future, partial(_end_with, made))
        return future

    return call


def _end_with(made: RecordedSpan, future: Any) -> None:
    if future._failed is not None:
        made.fail(future._failed.error())
    made.end()


def _begin_with_trace(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """`Requests.begin`, with what the callee is to know of the current span."""

    @wraps(original)
    def begin(requests: Requests, *call: Any, **more: Any) -> Any:
        known = carrier()
        pending, frame = original(requests, *call, **more)
        if known:
            request = frame.message
            request.extras = request.extras or Extras()
            request.extras.trace = known
        recorder.client.sent.add(_size(frame.body, frame.buffers), {SYSTEM: FARCALL})
        return pending, frame

    return begin


def _size(body: Buffer, buffers: Iterable[Buffer]) -> int:
    """Return the bytes of a value."""
    return len(body) + sum(one.size if isinstance(one, OnDevice) else len(one) for one in buffers)


class _InContext:
    """A callback that runs in the context in which it was added."""

    __slots__ = ("_context", "_run", "callback")

    def __init__(self, run: Callable[[Any], None]) -> None:
        self.callback = getattr(run, "callback", run)  # which `remove_done_callback` looks for
        self._run = run
        self._context = get_current()

    def __call__(self, future: Any) -> None:
        token = attach(self._context)
        try:
            self._run(future)
        finally:
            detach(token)


def _callback_in_context(original: Callable[..., None]) -> Callable[..., None]:
    """`Future._add`: the calls of a callback belong to the trace in which it was added."""

    @wraps(original)
    def add(future: Future[Any], callback: Callable[[Any], None], behind: Any) -> None:
        original(future, _InContext(callback) if get_current() else callback, behind)

    return add


# At the callee.


class RecordedCall(ServerCall, eq=False):
    """A call that is served, with a span from its arrival to its end."""

    recorder: Any = None
    recorded: Any = None

    def start(self) -> None:
        extras, me = self.request.extras, self.serving.status.me
        attributes = {
            SYSTEM: FARCALL,
            ADDRESS: host_name(me.host),
            WORKER: me.name,
            PEER: self.peer.name,
        }
        server = self.recorder.server
        self.recorded = self.recorder.begin(
            self.request.function or FARCALL,
            SpanKind.SERVER,
            attributes,
            server.duration,
            (SYSTEM,),
            context_from({} if extras is None else extras.trace),
        )
        server.calls.add(1, {SYSTEM: FARCALL}, self.recorded.context)
        super().start()

    def run(self) -> None:
        token = attach(self.recorded.context)
        try:
            super().run()
        finally:
            detach(token)

    def _load(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        loaded = super()._load()
        # Only now: calls of functions that don't exist must not fill the tables of the metrics.
        name = self.method or self.request.function or _name_of_nameless(loaded[0])
        self.recorded.rename(name)
        return loaded

    def _answer(self, message: Reply | Failure, payload: Payload) -> None:
        self.recorder.server.sent.add(_size(payload.body, payload.buffers), {SYSTEM: FARCALL})
        super()._answer(message, payload)

    def _fail(self, error: BaseException) -> None:
        self.recorded.fail(error)
        super()._fail(error)

    def _answer_later(self, message: Failure, body: Buffer = b"") -> None:
        self.recorded.fail_with(message.type_name, message.message)
        super()._answer_later(message, body)

    def _end(self) -> None:
        super()._end()
        self._end_span()

    def _no_longer_wanted(self) -> None:
        super()._no_longer_wanted()
        self._end_span()

    def _end_span(self) -> None:
        recorded = self.recorded
        if METHOD not in recorded.attributes:
            recorded.attributes[METHOD] = UNKNOWN
            recorded.span.set_attributes({METHOD: UNKNOWN, ASKED_FOR: self.request.function})
        recorded.end()
