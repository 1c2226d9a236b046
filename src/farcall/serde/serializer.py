"""Objects to bytes and back: what an agent is given to serialize with.

`dump` gives a pickle and the large buffers that stay out of it; `load` takes them as they arrived.
Between the two, buffers are only passed on: the ones from `dump` are the sender's own memory, the
ones given to `load` become the memory of the tensors in the result.

A serializer has no state that shows: every method may run on any thread, at any
depth of nesting, since pickling runs user code. No method holds a lock.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from farcall.errors import FarcallError, FunctionNotFound, SerializationError
from farcall.serde.exceptions import (
    MAX_CHAIN,
    RemoteTraceback,
    message_of,
    set_cause,
    type_name_of,
)
from farcall.serde.functions import SPAWNED_MAIN, Functions
from farcall.serde.interrupts import is_interrupt
from farcall.serde.loading import Arriving, Attach, arriving
from farcall.serde.pickling import (
    PROTOCOL,
    REUSED_BYTES,
    ByValuePickler,
    Check,
    FastPickler,
    OutOfBand,
    Payload,
    Reducer,
)
from farcall.serde.plain import accelerator
from farcall.serde.strict.only import Only
from farcall.serde.strict.reader import Reader
from farcall.serde.strict.writer import Writer
from farcall.serde.tensors import DeviceMap
from farcall.serde.tracebacks import cause_of
from farcall.serde.unpickling import MainUnpickler, names_what_is_absent

Body = bytes | bytearray | memoryview
Around = Callable[[Callable[[], Any]], Any]

# Searched by a regular expression because memoryview has no substring search.
_NAMES_MAIN = re.compile(rb"__(?:mp_)?main__")
_SPAWNED_MAIN = SPAWNED_MAIN.encode()
_NAMES_SPAWNED_MAIN = re.compile(_SPAWNED_MAIN)


_MAX_IDLE_PICKLERS = 8
UNSENDABLE = "can't be sent: "
# The arguments of most small calls.
NOTHING = Payload(pickle.dumps(None, PROTOCOL))
NO_ARGUMENTS = Payload(pickle.dumps(((), {}), PROTOCOL))


class Serializer:
    """Pickles what leaves and unpickles what arrives; or, where a policy says so, does without.

    Args:
        reference: objects of exactly this type stay out of the pickles, in `Payload.references`.
        check: is called with each of them first; `dump` raises its errors.
        reducers: of types that are pickled in a way of their own when they are sent: type ->
            reducer, as in `copyreg.dispatch_table`. The table may grow later.

    Attributes:
        functions: those that were found by name.
        plain: what takes plain values past the picklers, or None.
    """

    __slots__ = (
        "_check",
        "_idle",
        "_reducers",
        "_reference",
        "functions",
        "plain",
    )

    def __init__(
        self,
        *,
        reference: type | None = None,
        check: Check | None = None,
        reducers: Mapping[type, Reducer] | None = None,
    ) -> None:
        self.functions = Functions()
        self.plain = accelerator(reference, check)
        self._reference = reference
        self._check = check
        self._reducers = {} if reducers is None else reducers
        # Idle picklers. `list.pop` is atomic, so a popped pickler has exactly one owner.
        self._idle: list[FastPickler] = []

    def dump(
        self,
        value: Any,
        *,
        by_value: bool = False,
        device_map: DeviceMap | None = None,
        strict: bool = False,
    ) -> Payload:
        """Pickle `value`, or write it in the strict format.

        Args:
            value: any object that pickle or, if allowed, cloudpickle takes.
            by_value: the peer runs another `__main__`: definitions of ours go by value.
            device_map: where tensors of a device other than the CPU go to on the peer.
            strict: the peer has a policy.

        Raises:
            SerializationError: something in it can't be sent; the cause says what.
        """
        if strict:
            return self._dump_strict(value, device_map)
        if value is None:
            return NOTHING
        if self.plain is not None:
            plain = self.plain.dump(value)
            if plain is not None:
                return Payload(plain) if type(plain) is bytes else Payload(*plain)
        try:
            pickler = self._idle.pop()
        except IndexError:
            pickler = FastPickler(self._reference, self._check, self._reducers)
        try:
            payload = pickler.dump(value, device_map)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            # Objects without a name raise one of these, and so do many that nothing can pickle.
            if issubclass(type(error), FarcallError):
                raise _unpicklable(error)  # noqa: B904  # it sets the cause
            return self._dump_by_value(value, by_value, device_map)
        except Exception as error:
            raise _unpicklable(error)  # noqa: B904  # it sets the cause
        body = payload.body
        if len(body) <= REUSED_BYTES and len(self._idle) < _MAX_IDLE_PICKLERS:
            self._idle.append(pickler)
        if by_value and _NAMES_MAIN.search(body):
            return self._dump_by_value(value, by_value, device_map)
        return payload

    def _dump_by_value(
        self, value: Any, main_by_value: bool, device_map: DeviceMap | None
    ) -> Payload:
        out_of_band = OutOfBand(self._check)
        out_of_band.device_map = device_map

        def dump(value: Any) -> bytes:
            stream = io.BytesIO()
            ByValuePickler(
                stream, out_of_band, self._reference, main_by_value, self._reducers
            ).dump(value)
            return stream.getvalue()

        try:
            return out_of_band.collect(dump, value)
        except Exception as error:
            raise _unpicklable(error)  # noqa: B904  # it sets the cause

    def _dump_strict(self, value: Any, device_map: DeviceMap | None) -> Payload:
        writer = Writer(self._reference, self._check, device_map)
        try:
            body = writer.write(value)
        except Exception as error:
            raise _unpicklable(error)  # noqa: B904  # it sets the cause
        return Payload(body, writer.buffers, writer.tensors, writer.references)

    def load(
        self,
        body: Body,
        buffers: Sequence[Any] = (),
        *,
        references: Sequence[Any] = (),
        attach: Attach | None = None,
        around: Around | None = None,
        only: Only | None = None,
    ) -> Any:
        """Return the object that `dump` was given.

        Args:
            body: the bytes.
            buffers: the out-of-band buffers in order; writable ones become tensors' memory, as does
                the memory of those that are `OnDevice`.
            references: what `load_reference` returns, by index.
            attach: is called with each arriving tensor that is to require grad, in order, and
                gives it a history in place. Without it they are leaves.
            around: is called with the rest of the work when code of the user may run, and returns
                its result. Its errors count as raised by that code.
            only: what the sender may send, in the strict format; None: any pickle.

        Raises:
            FunctionNotFound: the message names a module or attribute that does not exist here.
            Refused: `only` forbids something in it.
            SerializationError: any other failure, SystemExit too; its cause says what.
            KeyboardInterrupt: the user pressed Ctrl-C meanwhile, in the main thread.
        """
        try:
            if self.plain is not None and only is None:
                value = self.plain.load(body, buffers, references, attach)
                if value is not NotImplemented:
                    return value
            if around is None:
                return self._read(body, buffers, references, attach, only)
            return around(partial(self._read, body, buffers, references, attach, only))
        except FarcallError:
            raise
        except BaseException as error:
            # `sys.exit()` in a `__setstate__` would end the thread that reads a peer's message.
            if is_interrupt(error):
                raise
            raise _unloadable(error) from error

    def _read(
        self,
        body: Body,
        buffers: Sequence[Any],
        references: Sequence[Any],
        attach: Attach | None,
        only: Only | None,
    ) -> Any:
        token = None
        if references or attach is not None or arriving.get() is not None:
            token = arriving.set(Arriving(references, attach))  # not that of a load around this one
        try:
            if only is not None:
                return Reader(only, body, buffers).read()
            if SPAWNED_MAIN not in sys.modules and _names_spawned_main(body):
                return MainUnpickler(io.BytesIO(body), buffers=buffers).load()
            return pickle.loads(body, buffers=buffers) if buffers else pickle.loads(body)
        finally:
            if token is not None:
                arriving.reset(token)

    def explain_unpicklable(
        self,
        function: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        error: BaseException,
        **options: Any,
    ) -> SerializationError:
        """Return an error that names the first argument which can't be sent.

        Args:
            function: name of the function that was to be called, for the message.
            args: positional arguments of the call; the message counts them from 0.
            kwargs: keyword arguments of the call.
            error: what `dump` raised for all of them together; stands in when each alone passes.
            options: those of `dump`.
        """
        labelled = [(f"argument {index}", value) for index, value in enumerate(args)]
        labelled += [(f"keyword argument {name!r}", value) for name, value in kwargs.items()]
        for label, value in labelled:
            try:
                self.dump(value, **options)
            except SerializationError as found:
                what = f"{label} ({type(value).__name__}) of {function} {UNSENDABLE}"
                explained = SerializationError(what + reason_of(found))
                set_cause(explained, _cause_or_itself(found))
                return explained
        explained = SerializationError(f"the call of {function} {UNSENDABLE}{reason_of(error)}")
        set_cause(explained, _cause_or_itself(error))
        return explained


def _cause_or_itself(error: BaseException) -> BaseException:
    cause = cause_of(error)
    return error if cause is None else cause


def _names_spawned_main(body: Body) -> bool:
    if type(body) is bytes:
        return _SPAWNED_MAIN in body
    return _NAMES_SPAWNED_MAIN.search(body) is not None


# What Python says of objects that no pickler takes, and what to do about it.
_REMEDIES = {
    "cannot pickle 'coroutine' object": "an `async def` does not run on another worker: call "
    "`asyncio.run` in a function of its own, or return a future (functions.async_execution)",
    "cannot pickle 'generator' object": "send a list of its items",
    "cannot pickle 'async_generator' object": "send a list of its items",
}


def reason_of(error: BaseException) -> str:
    """Return why something can't be sent, for a text that says already that it can't.

    The value that can't be sent is often inside of another one, which then can't be sent either.
    """
    for _ in range(MAX_CHAIN):
        cause = cause_of(error)
        if not issubclass(type(error), SerializationError) or cause is None:
            break
        if issubclass(type(cause), RemoteTraceback):
            break  # it came from another worker: what it says is all that there is
        error = cause
    text = message_of(error)
    if issubclass(type(error), SerializationError):
        text = text.rpartition(UNSENDABLE)[2]
    while text.startswith(UNSENDABLE):
        text = text.removeprefix(UNSENDABLE)
    if text in _REMEDIES:
        text = f"{text}; {_REMEDIES[text]}"
    return text or type_name_of(error)


def _unpicklable(error: Exception) -> Exception:
    """Return the error to be raised, with its cause. No error is its own cause: that is a cycle."""
    # Our own errors (a tensor on the wrong device) say it better than a wrapper would.
    repeats = type(error) is SerializationError and message_of(error).count(UNSENDABLE) > 1
    if issubclass(type(error), FarcallError) and not repeats:
        return error
    explained = SerializationError(UNSENDABLE + reason_of(error))
    set_cause(explained, error)
    return explained


def _unloadable(error: BaseException) -> SerializationError:
    text = message_of(error)
    if names_what_is_absent(error):
        return FunctionNotFound(
            f"the message names what this worker does not have: {text}; "
            f"functions and classes of the caller must be importable on the callee too "
            "(the RPC pickler does not serialize function code)"
        )
    said = f": {text}" if text else ""
    return SerializationError(f"can't rebuild what arrived: {type_name_of(error)}{said}")
