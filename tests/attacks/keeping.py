"""Workers that several tests use one after the other: starting them takes most of a test's time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Generic, TypeVar

import pytest

T = TypeVar("T")


class Kept(Generic[T]):
    """Makes something for a test and lends it to the next tests, too, until one of them fails.

    Args:
        make: makes it, and ends it at the end of the block.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        self._make = make
        self._made: list[T] = []
        self._stack = ExitStack()

    @contextmanager
    def lent(self, session: pytest.Session) -> Iterator[T]:
        """Lend it to a test, which may not end it."""
        if not self._made:
            self._made.append(self._stack.enter_context(self._make()))
        failures = session.testsfailed
        yield self._made[0]
        if session.testsfailed > failures:
            self.close()  # a process may still be busy with what has failed

    def close(self) -> None:
        self._made.clear()
        self._stack.close()
