"""Dicts and sets of a peer's keys, built in a bounded time.

A peer that chooses its keys can make each of them meet all others in the table: by keys of one
hash, which are counted, and by hashes that lead through the same places, which only time shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from farcall.errors import Refused

# Of one hash: more of them in a large dict or set are an attack on its table.
MOST_EQUAL_HASHES = 100
# Seconds of this thread's processor time that the tables of a message may take: at first, and for
# each key. An honest key takes 0.2 to 1 us.
SECONDS = 1.0
SECONDS_PER_KEY = 2e-6
BATCH = 256  # keys between two looks at the clock


class TableBudget:
    """The time that the dicts and sets of one message may take.

    Args:
        clock: says how much processor time the calling thread has used, in seconds.
    """

    __slots__ = ("_clock", "_left")

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._left = SECONDS

    def dict_of(self, keys: list[Any], values: list[Any]) -> dict[Any, Any]:
        """Return the dict of these keys and values.

        Raises:
            Refused: the keys are an attack on its table.
        """
        made: dict[Any, Any] = {}
        if len(keys) <= MOST_EQUAL_HASHES:
            made.update(zip(keys, values, strict=True))
        else:
            self._fill(made.update, keys, zip(keys, values, strict=True))
        return made

    def set_of(self, keys: list[Any]) -> set[Any]:
        """Return the set of these members.

        Raises:
            Refused: the members are an attack on its table.
        """
        made: set[Any] = set()
        if len(keys) <= MOST_EQUAL_HASHES:
            made.update(keys)
        else:
            self._fill(made.update, keys, iter(keys))
        return made

    def _fill(self, update: Callable[[Any], None], keys: list[Any], items: Any) -> None:
        _check_hashes(keys)
        self._left += SECONDS_PER_KEY * len(keys)
        begin = self._clock()
        limit = begin + self._left
        for _ in range(0, len(keys), BATCH):
            update(islice(items, BATCH))
            if self._clock() > limit:
                raise Refused(
                    f"this worker takes no dict or set whose {len(keys)} keys are so chosen that "
                    "it takes seconds to build"
                )
        self._left -= self._clock() - begin


def _check_hashes(keys: list[Any]) -> None:
    """Sort the hashes, which takes the same time whatever they are; a table of them would not."""
    hashes = sorted(map(hash, keys))
    if any(map(int.__eq__, hashes, hashes[MOST_EQUAL_HASHES:])):
        raise Refused(
            f"this worker takes no dict or set of more than {MOST_EQUAL_HASHES} keys of one hash"
        )
