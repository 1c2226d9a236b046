"""The way of a call's exception: `Failure` and the pickled exception, both ways.

Sending never fails: what can't be pickled is left out, bit by bit, down to the text that
`Failure` carries. On arrival the exception has the remote frames in its traceback, the remote
traceback as a cause, and tells the worker it came from. An error that is no `Exception`, such as
`SystemExit`, would end the caller past every `except Exception`; it arrives as `RemoteError`.
Stateless; safe from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from farcall.errors import Cancelled, RemoteError, RpcTimeout
from farcall.plain import plain_text
from farcall.serde.exceptions import (
    MAX_CHAIN,
    RemoteTraceback,
    Stripped,
    earlier_than,
    get_attribute,
    has_own_reduction,
    message_of,
    notes_of,
    parts_of,
    repr_of,
    set_attribute,
    set_cause,
    set_context,
    split_state,
    type_name_of,
)
from farcall.serde.pickling import Payload
from farcall.serde.serializer import Body, Serializer
from farcall.serde.strict.only import Only
from farcall.serde.tracebacks import (
    MAX_TEXT,
    clipped,
    encodable,
    frames_of,
    shows_everything,
    text_of,
    traceback_from,
    traceback_of_exception,
)
from farcall.wire.messages import Failure

# The object whose attribute was missing goes along if it takes no more than this.
MAX_OBJECT_BYTES = 16 << 10
MAX_PICKLE = 64 << 10  # bytes that the pickle of one cause may take
NOTE_CHARACTERS = 16  # what a note counts beside its text
# Errors that farcall itself sends as a text alone, where it has no pickler.
_AS_TEXT = {type_name_of(one("")): one for one in (Cancelled, RpcTimeout)}


def dump_failure(
    serializer: Serializer,
    error: BaseException,
    **options: Any,
) -> tuple[Failure, Payload]:
    """Return the message for an exception, and its bytes (empty if there are none). Never raises.

    The options are those of `Serializer.dump`.
    """
    failure = text_failure(error, message_of(error))
    failure.frames = tuple(frames_of(traceback_of_exception(error)))
    failure.notes = tuple(_notes_that_fit(error))
    with suppress(BaseException):
        failure.earlier = tuple(
            (
                is_cause,
                type_name_of(one),
                clipped(message_of(one), MAX_TEXT // MAX_CHAIN),
                tuple(frames_of(traceback_of_exception(one))),
                _small_pickle(serializer, one, options),
            )
            for is_cause, one in earlier_than(error)
        )
    return failure, _dump(serializer, error, options) or Payload(b"")


def text_failure(error: BaseException, message: str) -> Failure:
    """Return the message for an exception of which nothing but text is sent. Never raises.

    Args:
        error: the exception.
        message: what stands for its `str`; clipped to `MAX_TEXT` characters.
    """
    return Failure(type_name_of(error), clipped(message, MAX_TEXT), text_of(error))


def _notes_that_fit(error: BaseException) -> Iterator[str]:
    """Yield the notes that are strings, clipped to `MAX_TEXT` characters in all."""
    notes = [note for note in notes_of(error) if issubclass(type(note), str)]
    room = MAX_TEXT
    for index, note in enumerate(map(plain_text, notes)):
        if room <= 0:
            yield f"... [{len(notes) - index} notes left out] ..."
            return
        yield encodable(clipped(note, room))
        room -= len(note) + NOTE_CHARACTERS


def _dump(serializer: Serializer, error: BaseException, options: dict[str, Any]) -> Payload | None:
    """Pickle as much of an exception as can be; None if its type can't be."""
    payload = None
    if not _has_large_object(serializer, error, options):
        payload = _attempt(serializer, error, options)
    if payload is None:
        with suppress(BaseException):
            payload = _attempt(serializer, _strip(serializer, error, options), options)
    return payload


def _small_pickle(serializer: Serializer, error: BaseException, options: dict[str, Any]) -> bytes:
    """Return a pickle that stands alone, or nothing."""
    payload = _dump(serializer, error, options)
    if payload is None or payload.buffers or payload.references or len(payload.body) > MAX_PICKLE:
        return b""
    return payload.body


def _has_large_object(serializer: Serializer, error: Any, options: dict[str, Any]) -> bool:
    """Return whether it is an AttributeError that would take a whole model, say, along."""
    if not issubclass(type(error), AttributeError):
        return False
    missing_in = vars(AttributeError)["obj"].__get__(error)
    return missing_in is not None and not _is_small(serializer, missing_in, options)


def _is_small(serializer: Serializer, value: Any, options: dict[str, Any]) -> bool:
    payload = _attempt(serializer, value, options)
    if payload is None:
        return False
    size = len(payload.body) + sum(memoryview(one).nbytes for one in payload.buffers)
    return size <= MAX_OBJECT_BYTES


def _attempt(serializer: Serializer, value: Any, options: dict[str, Any]) -> Payload | None:
    try:
        return serializer.dump(value, **options)
    except BaseException:
        # A user's __reduce__ may raise anything, and the caller waits for an answer.
        return None


def _strip(serializer: Serializer, error: BaseException, options: dict[str, Any]) -> Any:
    """Return the exception with attributes that can be sent, and the `repr` of other args."""
    if has_own_reduction(type(error)):
        return error
    cls, args, state = parts_of(error)

    def stripped(value: Any) -> Any:
        if _attempt(serializer, value, options) is not None:
            return value
        if issubclass(type(value), BaseException):
            # A member of an exception group: the group is nothing without it.
            return _strip(serializer, value, options)
        if type(value) in (list, tuple):
            return type(value)(stripped(item) for item in value)
        return repr_of(value)

    kept = {
        name: value
        for name, value in state.items()
        if (_is_small if name == "obj" else _can_be_sent)(serializer, value, options)
    }
    return Stripped(cls, tuple(stripped(value) for value in args), *split_state(error, kept))


def _can_be_sent(serializer: Serializer, value: Any, options: dict[str, Any]) -> bool:
    return _attempt(serializer, value, options) is not None


def load_failure(
    serializer: Serializer,
    failure: Failure,
    body: Body,
    buffers: Sequence[Any] = (),
    *,
    worker: str,
    references: Sequence[Any] = (),
    only: Only | None = None,
) -> BaseException:
    """Return the exception to raise for a `Failure` that came from `worker`. Raises a Ctrl-C only.

    It has `remote_worker` and `remote_traceback` (unless its type has no room for them), the remote
    frames in its traceback, and its causes and contexts. The first of these, or the exception
    itself, has a `RemoteTraceback` as its cause. It is a `RemoteError` if it can't be rebuilt here
    or is no `Exception`. An exception that went through several workers keeps the name of the
    first, where it was raised.
    """
    loaded: Any = None
    if len(body):
        with suppress(Exception):  # a Ctrl-C goes on
            loaded = serializer.load(body, buffers, references=references, only=only)
    error: BaseException
    if issubclass(type(loaded), Exception):
        error = loaded
    elif not len(body) and failure.type_name in _AS_TEXT:
        error = _AS_TEXT[failure.type_name](failure.message)
    else:
        error = RemoteError(failure.type_name, failure.message, worker, failure.traceback)
    if not isinstance(get_attribute(error, "remote_worker"), str):
        set_attribute(error, "remote_worker", worker)
    set_attribute(error, "remote_traceback", failure.traceback)
    if failure.notes and not notes_of(error):
        set_attribute(error, "__notes__", list(failure.notes))
    frames = traceback_from(failure.frames, reads_source=only is None)
    BaseException.with_traceback(error, frames)
    first = _with_earlier(serializer, error, failure, worker, only)
    # Under a policy a peer names no file that is read here. Its own text has its lines of code.
    is_shown = frames is None or only is not None or shows_everything()
    header = f"on worker {worker!r}"
    set_cause(first, RemoteTraceback(failure.traceback, header, shows_text=is_shown))
    return error


def _with_earlier(
    serializer: Serializer,
    error: BaseException,
    failure: Failure,
    worker: str,
    only: Only | None,
) -> BaseException:
    """Give an exception its causes and contexts: the first of them, or the exception itself."""
    for is_cause, type_name, message, frames, body in failure.earlier[:MAX_CHAIN]:
        earlier: Any = None
        if body:
            with suppress(Exception):
                earlier = serializer.load(body, only=only)
        if not issubclass(type(earlier), BaseException):
            earlier = RemoteError(type_name, message, worker, "")
        shown = traceback_from(frames, reads_source=only is None)
        BaseException.with_traceback(earlier, shown)
        if is_cause:
            set_cause(error, earlier)
        else:
            set_context(error, earlier)
        error = earlier
    return error


def as_exception(error: BaseException, worker: str) -> BaseException:
    """Return the error, or the RemoteError that stands for it if it is no `Exception`.

    For an error that a function raised on this worker, `worker`, and that is raised again here in
    some other thread, which it would end.
    """
    if issubclass(type(error), Exception):
        return error
    stands = RemoteError(type_name_of(error), message_of(error), worker, text_of(error))
    return BaseException.with_traceback(stands, traceback_of_exception(error))
