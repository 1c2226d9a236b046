"""How a call's exception travels: `Failure` and the pickled exception, both ways.

Sending never fails: what can't be pickled is left out, bit by bit, down to the text that
`Failure` carries. On arrival the exception has the remote traceback as its cause, and tells
the worker it came from. Stateless; safe from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from farcall.errors import RemoteError
from farcall.serde.exceptions import (
    RemoteTraceback,
    Stripped,
    has_own_reduction,
    message_of,
    parts_of,
    set_attribute,
    traceback_of,
    type_name_of,
)
from farcall.serde.pickling import Dumped
from farcall.serde.serializer import Body, Serializer
from farcall.serde.tensors import DeviceMap
from farcall.wire.messages import Failure


def dump_failure(
    serializer: Serializer,
    error: BaseException,
    *,
    by_value: bool = False,
    device_map: DeviceMap | None = None,
) -> tuple[Failure, Dumped]:
    """The message for an exception, and its pickle (empty if there is none). Never raises.

    `by_value` and `device_map` are as for `Serializer.dump`.
    """
    options = {"by_value": by_value, "device_map": device_map}
    failure = Failure(type_name_of(error), message_of(error), traceback_of(error))
    dumped = _attempt(serializer, error, options)
    if dumped is None:
        with suppress(Exception):
            dumped = _attempt(serializer, _strip(serializer, error, options), options)
    return failure, dumped or Dumped(b"")


def _attempt(serializer: Serializer, value: Any, options: dict[str, Any]) -> Dumped | None:
    try:
        return serializer.dump(value, **options)
    except KeyboardInterrupt:
        raise
    except BaseException:
        # A user's __reduce__ may raise anything, and the caller waits for an answer.
        return None


def _strip(serializer: Serializer, error: BaseException, options: dict[str, Any]) -> Any:
    """The exception without the attributes and with the repr of the args that can't be sent."""
    if has_own_reduction(type(error)):
        return error
    cls, args, state = parts_of(error)

    def stripped(value: Any) -> Any:
        if _attempt(serializer, value, options) is not None:
            return value
        if isinstance(value, BaseException):
            # A member of an exception group: the group is nothing without it.
            return _strip(serializer, value, options)
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(stripped(item) for item in value)
        return _repr(value)

    kept = {
        name: value
        for name, value in state.items()
        if _attempt(serializer, value, options) is not None
    }
    return Stripped(cls, tuple(stripped(value) for value in args), kept)


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def load_failure(
    serializer: Serializer,
    failure: Failure,
    body: Body,
    buffers: Sequence[Any] = (),
    *,
    worker: str,
    references: Sequence[Any] = (),
) -> BaseException:
    """The exception to raise for a `Failure` that came from `worker`. Never raises itself.

    It has `remote_worker` and `remote_traceback` (unless its type has no room for them) and a
    `RemoteTraceback` as its cause. `RemoteError` if it can't be rebuilt here. An exception that
    went through several workers keeps the name of the first, where it was raised.
    """
    loaded: Any = None
    if len(body):
        with suppress(Exception):
            loaded = serializer.load(body, buffers, references=references)
    error: BaseException
    if isinstance(loaded, BaseException):
        error = loaded
    else:
        error = RemoteError(failure.type_name, failure.message, worker, failure.traceback)
    if not isinstance(vars(error).get("remote_worker"), str):
        set_attribute(error, "remote_worker", worker)
    set_attribute(error, "remote_traceback", failure.traceback)
    text = f'\n"""on worker {worker!r}\n{failure.traceback.rstrip()}\n"""'
    set_attribute(error, "__cause__", RemoteTraceback(text))
    return error
