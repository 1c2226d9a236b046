"""Things that handlers and tests of one process share, in the behaviour tests.

All workers of these tests live in one process, so a test and the functions it calls remotely can
meet at events. Arguments of such a function are pickled, though; a `Here` arrives as itself.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from patience import PATIENCE

from farcall import rpc
from farcall.runtime.agent import Agent

_numbers = itertools.count()
_here: weakref.WeakValueDictionary[int, Here] = weakref.WeakValueDictionary()


class Here:
    """Arrives as the very same object, since sender and receiver are one process."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        _here[self.number] = self

    def __reduce__(self) -> Any:
        return _find, (self.number,)


def _find(number: int) -> Here:
    return _here[number]


class Gate(Here):
    """A gate at which handlers wait until the test lets them go on."""

    def __init__(self) -> None:
        super().__init__()
        self._opened = threading.Event()
        self._arrivals = threading.Condition()
        self.inside = 0
        self.most_inside = 0
        self.arrived = 0
        self.passed = 0

    def wait(self) -> int:
        """Wait at the gate, as a handler; return how many arrived before this one."""
        with self._arrivals:
            number = self.arrived
            self.arrived += 1
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
            self._arrivals.notify_all()
        assert self._opened.wait(PATIENCE), "the gate was not opened"
        with self._arrivals:
            self.inside -= 1
            self.passed += 1
            self._arrivals.notify_all()
        return number

    def wait_for_arrivals(self, count: int = 1) -> None:
        with self._arrivals:
            assert self._arrivals.wait_for(lambda: self.arrived >= count, PATIENCE), self.arrived

    def wait_for_passed(self, count: int = 1) -> None:
        with self._arrivals:
            assert self._arrivals.wait_for(lambda: self.passed >= count, PATIENCE), self.passed

    def announce(self) -> None:
        """Announce, as a handler, that one is here, without waiting."""
        with self._arrivals:
            self.arrived += 1
            self._arrivals.notify_all()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self) -> None:
        self._opened.set()


class Box(Here):
    """Holds things that handlers leave for the test."""

    def __init__(self) -> None:
        super().__init__()
        self._filled = threading.Condition()
        self.things: list[Any] = []

    def put(self, thing: Any) -> None:
        with self._filled:
            self.things.append(thing)
            self._filled.notify_all()

    def wait_for(self, count: int = 1) -> list[Any]:
        with self._filled:
            assert self._filled.wait_for(lambda: len(self.things) >= count, PATIENCE), self.things
            return list(self.things)


class Precious:
    """A value whose end can be waited for."""

    def __init__(self, content: Any = None) -> None:
        self.content = content

    def get(self) -> Any:
        return self.content


class Deaths(Here):
    """Makes values, and counts those that ended."""

    def __init__(self) -> None:
        super().__init__()
        self._box = Box()

    def make(self, content: Any = None) -> Precious:
        value = Precious(content)
        # Never holds another value: that would keep it alive.
        weakref.finalize(value, self._box.put, content if isinstance(content, str | int) else None)
        return value

    @property
    def count(self) -> int:
        return len(self._box.things)

    def wait_for(self, count: int = 1) -> list[Any]:
        return self._box.wait_for(count)


def make_precious(deaths: Deaths, content: Any = None) -> Precious:
    return deaths.make(content)


def wait_at(gate: Gate, result: Any = None) -> Any:
    gate.wait()
    return result


class Account:
    """A value with every kind of method."""

    def __init__(self, balance: int = 0) -> None:
        self.balance = balance

    def deposit(self, amount: int, times: int = 1) -> int:
        self.balance += amount * times
        return self.balance

    def itself(self) -> Account:
        return self

    def where(self) -> str:
        return rpc.get_worker_info().name

    def fail(self) -> None:
        raise KeyError("in the method")

    def wait(self, gate: Gate) -> int:
        return gate.wait()

    @staticmethod
    def double(number: int) -> int:
        return 2 * number

    @classmethod
    def kind(cls) -> str:
        return cls.__name__

    def __call__(self, number: int) -> int:
        return self.balance + number

    def __len__(self) -> int:
        return self.balance


def echo(value: Any) -> Any:
    return value


def worker_name() -> str:
    return rpc.get_worker_info().name


def fail_with(error: BaseException) -> None:
    raise error


# Three ways to make a call; all give its value.


def by_sync(to: Any, function: Callable[..., Any], args: Any = (), **more: Any) -> Any:
    return rpc.rpc_sync(to, function, args=args, **more)


def by_async(to: Any, function: Callable[..., Any], args: Any = (), **more: Any) -> Any:
    return rpc.rpc_async(to, function, args=args, **more).wait()


def by_remote(to: Any, function: Callable[..., Any], args: Any = (), **more: Any) -> Any:
    return rpc.remote(to, function, args=args, **more).to_here()


WAYS = (by_sync, by_async, by_remote)


def until_begun(gate: Gate, attempt: Callable[[float], None], seconds: float) -> float:
    """Make calls until a function has come to the gate, each with twice the time of the last one.

    A function that has not begun by the deadline of its call is never run.

    Args:
        attempt: makes a call with this timeout, and waits for its end.
        seconds: the first timeout.

    Returns:
        The last timeout.
    """
    attempt(seconds)
    while not gate.arrived:
        seconds *= 2
        attempt(seconds)
    return seconds


# Three ways to call a method of a reference's value; all give the result.


def proxy_sync(rref: rpc.RRef[Any], method: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(rref.rpc_sync(), method)(*args, **kwargs)


def proxy_async(rref: rpc.RRef[Any], method: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(rref.rpc_async(), method)(*args, **kwargs).wait()


def proxy_remote(rref: rpc.RRef[Any], method: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(rref.remote(), method)(*args, **kwargs).to_here()


PROXIES = (proxy_sync, proxy_async, proxy_remote)


@contextmanager
def in_threads(*functions: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run these at once, each in a thread; at the end of the block all have ended.

    Gives a list which then holds each function's result, or the exception it raised.
    """
    results: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    try:
        yield results
    finally:
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that nothing announces."""
    pause = threading.Event()
    for _ in range(int(PATIENCE * 1000)):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError(f"{condition} did not come true")


def wait_until_settled(*agents: Agent) -> None:
    """Wait until the references of these agents wait for no answer any more."""
    wait_until(lambda: all(is_settled(agent) for agent in agents))


def is_settled(agent: Agent) -> bool:
    statistics = agent.references.statistics()
    return not (
        statistics["releasing"] or statistics["pinned_transfers"] or statistics["waiting_arrivals"]
    )
