"""The gate of an object's methods: order and number of calls at once (`remote(concurrency=)`)."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Collection
from itertools import count
from typing import Protocol


class MethodCall(Protocol):
    """The record of a call of a method. See `server_call.ServerCall`."""

    def take_turn(self) -> None:
        """Run in another thread: the turn of the call has come."""


class MethodGate:
    """Lets at most some calls of an object's methods run at once, in the order of their arrival.

    A call that waits has no thread. Its place in the line is that of its arrival, and it begins
    when it is first and its references may be used. A call that comes from a running one, directly
    or through other workers, begins at once: the running one may wait for it.

    Thread-safe.

    Args:
        most: how many calls run at once, beside those that they make themselves.
    """

    __slots__ = ("_is_open", "_line", "_lock", "_most", "_numbers", "_running")

    def __init__(self, most: float) -> None:
        self._lock = threading.Lock()
        self._most = most
        self._is_open = False
        self._line: dict[MethodCall, bool] = {}  # whether each is admitted; in order of arrival
        self._running: dict[MethodCall, int] = {}  # the number of each one's turn
        # Others name turns by number. No member shall guess one, and so pass the line.
        self._numbers = count(secrets.randbits(48))

    def arrive(self, call: MethodCall, held: Collection[int] = ()) -> None:
        """Give a call its place in the line.

        Args:
            held: the turns at this object of the calls that it comes from.
        """
        with self._lock:
            if held and any(turn in held for turn in self._running.values()):
                self._running[call] = next(self._numbers)
            else:
                self._line[call] = False

    def admit(self, call: MethodCall) -> bool:
        """Hear that a call may run. Returns whether its turn has come: then the caller runs it."""
        with self._lock:
            if call in self._running:
                return True
            self._line[call] = True
        begun = self._begin()
        for other in begun:
            if other is not call:
                other.take_turn()
        return call in begun

    def turn(self, call: MethodCall) -> int:
        """Return the number of the turn of a call that runs."""
        return self._running.get(call, 0)

    def leave(self, call: MethodCall) -> None:
        """Give the turn of a call to the next. No effect if it has none."""
        with self._lock:
            self._running.pop(call, None)
        self._go_on()

    def give_up(self, call: MethodCall) -> bool | None:
        """Take a call out of the line; None if it is not there, else whether it was admitted."""
        with self._lock:
            was_admitted = self._line.pop(call, None)
        self._go_on()
        return was_admitted

    def open(self, _: object = None) -> None:
        """Let calls begin: the object is made."""
        with self._lock:
            self._is_open = True
        self._go_on()

    def end(self) -> None:
        """Let all calls find out that the object is gone."""
        with self._lock:
            self._most = math.inf
        self.open()

    def _go_on(self) -> None:
        for call in self._begin():
            call.take_turn()

    def _begin(self) -> list[MethodCall]:
        """Give turns to the first in the line."""
        begun: list[MethodCall] = []
        with self._lock:
            while self._line and self._is_open and len(self._running) < self._most:
                call, is_admitted = next(iter(self._line.items()))
                if not is_admitted:
                    break
                del self._line[call]
                self._running[call] = next(self._numbers)
                begun.append(call)
        return begun
