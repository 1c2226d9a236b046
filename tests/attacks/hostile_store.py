"""A store in the hands of an attacker: what a worker reads there is what the attacker wants."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import FileStore, HashStore, Store

Rewrite = Callable[[str, bytes], bytes]


class HostileStore(Store):  # type: ignore[misc]
    """Hands everything on to another store, but rewrites the values read.

    Args:
        rewrite: gets each key and its value; returns what the worker reads.
    """

    def __init__(self, inner: Any, rewrite: Rewrite) -> None:
        super().__init__()
        self._inner = inner
        self._rewrite = rewrite
        self.rewritten = 0

    def _read(self, key: str, value: bytes) -> bytes:
        shown = self._rewrite(key, value)
        self.rewritten += shown != value
        return shown

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self._read(key, self._inner.get(key))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._read(key, self._inner.compare_set(key, expected, desired))

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self._inner.wait(keys, *([timeout] if timeout else []))

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def num_keys(self) -> int:
        return int(self._inner.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    def clone(self) -> HostileStore:
        return HostileStore(self._inner, self._rewrite)


def at_file(path: str, rewrite: Rewrite) -> HostileStore:
    return HostileStore(FileStore(path, -1), rewrite)


def in_memory(rewrite: Rewrite) -> HostileStore:
    return HostileStore(HashStore(), rewrite)


class Replace:
    """Replaces texts in every record, whatever else is in it: all at once, so two may swap.

    Args:
        texts: the old ones, each with the new one.
    """

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = {old.encode(): new.encode() for old, new in texts.items()}

    def __call__(self, key: str, value: bytes) -> bytes:
        old = b"|".join(map(re.escape, self._texts))
        return re.sub(old, lambda found: self._texts[found[0]], value)


class SwapRecords:
    """Gives the record of one worker for that of another one, and the other way round.

    Args:
        path: of the file of the store.
        keys: what the keys of the two end with.
    """

    def __init__(self, path: str, keys: tuple[str, str]) -> None:
        self._path = path
        self._other = dict([keys, keys[::-1]])

    def __call__(self, key: str, value: bytes) -> bytes:
        head, _, last = key.rpartition("/")
        other = self._other.get(last)
        if other is None or head.rpartition("/")[2] not in ("name", "rank"):
            return value
        return bytes(FileStore(self._path, -1).get(f"{head}/{other}"))


class Junk:
    """Gives the same junk for every key whose name has a part."""

    def __init__(self, part: str, junk: bytes) -> None:
        self._part, self._junk = part, junk

    def __call__(self, key: str, value: bytes) -> bytes:
        return self._junk if self._part in key else value


class Deceive:
    """Gives at each read of a record something else, the truth among it.

    Args:
        path: of the file of the store.
        names: of two workers that are given for each other.
        swapped: what their records have, their addresses say, each with the other's.
    """

    def __init__(self, path: str, names: tuple[str, str], swapped: dict[str, str]) -> None:
        self._draw = random.Random(25)
        self._others = SwapRecords(path, names)
        self._swap = Replace(swapped)
        self._first: dict[str, bytes] = {}

    def __call__(self, key: str, value: bytes) -> bytes:
        if "name/" not in key and "rank/" not in key:
            return value
        first = self._first.setdefault(key, value)
        at = self._draw.randrange(len(value))
        flipped = bytes([value[at] ^ 1 << self._draw.randrange(8)])
        lies = (
            value,
            first,
            self._swap(key, value),
            self._others(key, value),
            self._others(key, self._swap(key, value)),
            value[:at] + flipped + value[at + 1 :],
            value[:at],
        )
        return self._draw.choice(lies)
