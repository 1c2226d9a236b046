"""The names of the objects that live on this worker: `remote(name=)`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import msgspec

from farcall.errors import DuplicateName
from farcall.ids import RefId
from farcall.runtime.references.values import ValueSlot


class _Named(msgspec.Struct, eq=False):
    ref: RefId
    is_sure: bool = False  # all others were asked
    rival: str = ""  # the worker that wants the name too, and gets it


class Names:
    """The objects with names, of one agent. Thread-safe.

    A name is taken here first, and then all other workers are asked whether they have it. Of two
    workers that take a name at the same time at least one asks the other when that has taken it;
    the one with the smaller id gets it. A name is free when its object is dropped or killed, or
    could not be made.

    Args:
        my_id: of this worker.
        values: the objects that live here.

    Attributes:
        on_killed: called when a user has killed an object that lives here.
    """

    def __init__(self, my_id: int, values: Mapping[RefId, ValueSlot]) -> None:
        self._my_id = my_id
        self._values = values
        self._lock = threading.Lock()
        self._named: dict[str, _Named] = {}
        self.on_killed: Callable[[RefId], object] = lambda _: None

    def _in_use(self, name: str) -> _Named | None:
        named = self._named.get(name)
        if named is None:
            return None
        slot = self._values.get(named.ref)
        if slot is not None and not slot.is_failed and not named.rival:
            return named
        del self._named[name]
        return None

    def take(self, name: str, ref: RefId) -> None:
        """Take a name for an object that is about to be made.

        Raises:
            DuplicateName: another object of this worker has it.
        """
        with self._lock:
            if self._in_use(name) is not None:
                raise DuplicateName(f"the name {name!r} is in use by an object of this worker")
            self._named[name] = _Named(ref)

    def confirm(self, name: str, ref: RefId) -> None:
        """Keep a name that no other worker has.

        Raises:
            DuplicateName: another worker has taken it meanwhile.
        """
        with self._lock:
            named = self._named.get(name)
            if named is None or named.ref != ref or named.rival:
                rival = "" if named is None else f": {named.rival!r} has taken it at the same time"
                raise DuplicateName(f"the name {name!r} is in use{rival}")
            named.is_sure = True

    def give_up(self, name: str, ref: RefId) -> None:
        """Free a name that was taken in vain."""
        with self._lock:
            named = self._named.get(name)
            if named is not None and named.ref == ref:
                del self._named[name]

    def is_free(self, name: str, rival: str, rival_id: int) -> bool:
        """Return whether a name is free for another worker, which has taken it."""
        with self._lock:
            named = self._in_use(name)
            if named is None:
                return True
            if named.is_sure or self._my_id < rival_id:
                return False
            named.rival = rival
            return True

    def find(self, name: str) -> RefId | None:
        """Return the object that has a name here, made or about to be made."""
        with self._lock:
            named = self._in_use(name)
            return named.ref if named is not None and named.is_sure else None
