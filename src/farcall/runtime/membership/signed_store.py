"""A torch Store whose values are believed as far as they are signed.

A store is a blackboard: a program that reaches it may write, alter, swap, repeat and remove. So a
value is a msgpack array of a body and a signature of (each part behind its u32 length)

    "farcall store 1", the prefix of the group, the number of the board, the key, the body

The number is drawn by the first worker at the board, and stands there under `board`: groups that
have one prefix, at different stores or behind different `PrefixStore`s, don't take each other's
values. A value without a right signature counts as not there, and is named once in the log.

Whatever a store does raises `StoreFailed` and nothing else. Nothing here waits for a key, which a
liar could remove: a value is read by comparing it with one that is never written. Counters and
texts can't be signed; docs/protocol.md says what a lie about them does.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]  # as in stores.py

from farcall.log import get_logger
from farcall.plain import encode_msgpack
from farcall.runtime.membership.signing import Signer, signed_parts

_log = get_logger("farcall")

MAX_VALUE = 1 << 20  # bytes of a value that is looked at
MAX_COUNT = 1 << 31
MOST_NAMED = 32  # keys that are named in the log
MOST_TRIES = 64  # to write a value before others do: no worker is that unlucky

_LABEL = b"farcall store 1"
_NOTHING = b"?"  # no value is this
_BOARD = "board"
_BOARD_NUMBER_LENGTH = 16

T = TypeVar("T")
_Result = TypeVar("_Result")


class StoreFailed(RuntimeError):
    """The store is gone, or does what no store does. The message says what."""


class StoredValue(NamedTuple, Generic[T]):
    """The contents of a key.

    Attributes:
        raw: as it is in the store; empty if there is nothing.
        value: if there is one that was signed by a member.
        claim: if there is one that was not: it may be of a worker with another credential.
        objection: why there is no value, if there is anything.
    """

    raw: bytes
    value: T | None
    claim: T | None = None
    objection: str = ""


class ValueKind(Generic[T]):
    """A type of values: how they become bytes, who signs them, and which are possible.

    Args:
        type_: of the values.
        signatory: returns the name of the worker that alone may have signed a value.
        is_possible: tells values that are out of bounds.
    """

    def __init__(
        self,
        type_: type[T],
        signatory: Callable[[T], str],
        is_possible: Callable[[T], bool] = lambda _: True,
    ) -> None:
        self._decoder = msgspec.msgpack.Decoder(type_)
        self.signatory = signatory
        self._is_possible = is_possible

    def decode(self, body: bytes) -> T | None:
        """Return the value, or None if it is no possible one."""
        try:
            value: T = self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        return value if self._is_possible(value) else None


class _Sealed(msgspec.Struct, array_like=True, frozen=True):
    body: bytes
    signature: bytes


_decode_sealed = msgspec.msgpack.Decoder(_Sealed).decode


class SignedStore:
    """The keys of one group at a store. Thread-safe, as far as the store is.

    Args:
        store: where they are, with the prefix.
        prefix: part of the signed bytes.
        signer: signs values that are written, and checks those that are read.
    """

    def __init__(self, store: Store, prefix: str, signer: Signer) -> None:
        self._store = store
        self._prefix = prefix
        self._signer = signer
        self._lock = threading.Lock()  # guards what follows
        self._board = b""  # its number; empty while that is not known
        self._mine = secrets.token_hex(_BOARD_NUMBER_LENGTH).encode()  # if it has none
        self._named: set[str] = set()

    @property
    def store(self) -> Store:
        """The prefixed store in which the keys are."""
        return self._store

    def at(self, store: Store) -> SignedStore:
        """Return the same, by another client of a store that may have lost everything.

        Args:
            store: with the prefix.
        """
        anew = SignedStore(store, self._prefix, self._signer)
        anew._mine = self._board or self._mine
        return anew

    # Values.

    def read(self, key: str, kind: ValueKind[T]) -> StoredValue[T]:
        """Return what a key holds."""
        return self._found(key, kind, self._swap(key, _NOTHING, _NOTHING))

    def write(self, key: str, expected: bytes, kind: ValueKind[T], value: T) -> StoredValue[T]:
        """Put a value in the place of the expected one; return the one that the key holds then.

        Args:
            expected: as in `StoredValue.raw`.
        """
        return self._found(key, kind, self._swap(key, expected, self._sealed(key, value)))

    def settle(self, key: str, kind: ValueKind[T], value: T) -> T:
        """Put a value where there is none; return the one that is there then."""
        expected = b""
        for _ in range(MOST_TRIES):
            found = self.write(key, expected, kind, value)
            if found.value is not None:
                return found.value
            expected = found.raw
        raise StoreFailed("it does not keep written values")

    def put(self, key: str, value: object) -> None:
        """Put a value in the place of whatever is there."""
        sealed = self._sealed(key, value)
        self._ask(lambda: self._store.set(key, sealed))  # type: ignore[arg-type]  # takes bytes

    def are_there(self, keys: Sequence[str]) -> bool:
        """Return whether all keys hold something, signed or not. Cheap."""
        return self._ask(lambda: bool(self._store.check(list(keys))))

    # Values without a signature.

    def text(self, key: str) -> str:
        """Return the text that a key holds; "" if there is none."""
        return self._swap(key, _NOTHING, _NOTHING)[:MAX_VALUE].decode(errors="replace")

    def put_text(self, key: str, text: str) -> None:
        """Put a text in the place of whatever is there."""
        self._ask(lambda: self._store.set(key, text))

    def counted(self, key: str) -> int | None:
        """Return what a counter stands at, without touching it; None if it is no counter."""
        text = self.text(key) or "0"
        is_count = text.isascii() and text.isdecimal() and len(text) < len(str(MAX_COUNT))
        return int(text) if is_count else None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return what it stands at then.

        Raises:
            StoreFailed: it is no counter, or does not count.
        """
        # First, since torch's TCPStore closes the connection when it is to add to anything else.
        before = self.counted(key)
        if before is None:
            raise StoreFailed(f"its counter {self._prefix}/{key} is no number")
        after = self._ask(lambda: self._store.add(key, amount))
        if type(after) is not int or not before + amount <= after < MAX_COUNT:
            raise StoreFailed(f"its counter {self._prefix}/{key} does not count")
        return after

    # How a value is found good.

    def _bound(self, key: str, body: bytes) -> bytes:
        return signed_parts(_LABEL, self._prefix.encode(), self._number(), key.encode(), body)

    def _sealed(self, key: str, value: object) -> bytes:
        body = encode_msgpack(value)
        return encode_msgpack(_Sealed(body, self._signer.sign(self._bound(key, body))))

    def _found(self, key: str, kind: ValueKind[T], raw: bytes) -> StoredValue[T]:
        if not raw:
            return StoredValue(raw, None)
        sealed = None
        if len(raw) <= MAX_VALUE:
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                sealed = _decode_sealed(raw)
        value = None if sealed is None else kind.decode(sealed.body)
        objection: str | None = "it is no value of a worker's"
        if sealed is not None and value is not None:
            bound, name = self._bound(key, sealed.body), kind.signatory(value)
            objection = self._signer.objection(bound, sealed.signature, name)
        if objection is None:
            return StoredValue(raw, value)
        self._name(key, objection)
        return StoredValue(raw, None, value, objection)

    def _name(self, key: str, objection: str) -> None:
        with self._lock:
            if key in self._named or len(self._named) >= MOST_NAMED:
                return
            self._named.add(key)
            is_last = len(self._named) == MOST_NAMED
        _log.warning(
            "the store holds something at %s/%s that no worker of this group has signed so: it is "
            "ignored, since %s%s",
            self._prefix,
            key,
            objection,
            "; further keys are not named" if is_last else "",
        )

    def _number(self) -> bytes:
        expected = b""
        for _ in range(MOST_TRIES):
            if self._board:
                return self._board
            found = self._swap(_BOARD, expected, self._mine)
            if len(found) == len(self._mine) and found.isalnum():
                with self._lock:
                    self._board = self._board or found
            expected = found
        raise StoreFailed("it does not keep written values")

    # The store.

    def _swap(self, key: str, expected: bytes, wanted: bytes) -> bytes:
        """Compare and set; return what the key holds, empty for nothing."""
        found = self._ask(
            lambda: self._store.compare_set(key, expected, wanted)  # type: ignore[arg-type]
        )
        if not isinstance(found, bytes) or found == _NOTHING:
            return b""
        return found

    def _ask(self, operation: Callable[[], _Result]) -> _Result:
        try:
            return operation()
        except StoreFailed:
            raise
        except Exception as error:  # torch's stores raise what they like of a value
            lines = str(error).splitlines() or [type(error).__name__]
            raise StoreFailed(lines[0]) from error
