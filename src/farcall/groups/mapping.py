"""Calls of several workers, whose results are wanted in order."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from farcall.runtime.calls.future import Future
from farcall.serde import add_note

T = TypeVar("T")
S = TypeVar("S")


class Callee(Protocol):
    """A worker, as far as it is known here."""

    name: str

    def call_async(self, function: Callable[[S], T], item: S, /) -> Future[T]: ...


def each_or_raise(futures: Sequence[Future[T]], where: Callable[[int], str]) -> list[T]:
    """Wait for all futures; return their values, or raise the error of the first that failed.

    Ctrl-C cancels the calls that still run.

    Args:
        futures: of the calls.
        where: says in a note of the error, by the number of a call, which call that was.
    """
    results: list[T] = []
    failed: BaseException | None = None
    with _cancelling(futures):
        for number, future in enumerate(futures):
            try:
                results.append(future.wait())
            except Exception as error:
                if failed is None:
                    failed = error
                    add_note(failed, f"farcall: {where(number)}")
    if failed is not None:
        raise failed
    return results


def hand_out(workers: Sequence[Callee], function: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Call the function with each item, on a worker that is free: see `Group.map`."""
    free = deque(workers)
    done: queue.SimpleQueue[tuple[Callee, Future[T]]] = queue.SimpleQueue()
    futures: list[Future[T]] = []
    places: list[str] = []
    with _cancelling(futures):
        for number, item in enumerate(items):
            if not free:
                worker, future = done.get()
                if _has_failed(future):
                    break
                free.append(worker)
            callee = free.popleft()
            future = callee.call_async(function, item)
            futures.append(future)
            places.append(f"item {number} of map, on {callee.name!r}")
            future.add_done_callback(lambda ended, callee=callee: done.put((callee, ended)))  # type: ignore[misc]
    return each_or_raise(futures, places.__getitem__)


@contextmanager
def _cancelling(futures: Sequence[Future[Any]]) -> Iterator[None]:
    """Cancel the calls of these futures if the block raises: no other code waits for them."""
    try:
        yield
    except BaseException:
        for future in futures:
            if not future.cancel():
                future.exception()  # so that a failure is not reported as one never looked at
        raise


def _has_failed(future: Future[T]) -> bool:
    try:
        future.value()
    except Exception:
        return True
    return False
