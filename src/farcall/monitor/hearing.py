"""Workers' reports as they are taken: bounded, and safe to print.

A process is asked because it listens where a worker would. Any process of the user can do that, and
say anything: enormous reports, numbers that are none, terminal escape sequences as names.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import msgspec

from farcall.errors import BadFrame
from farcall.ids import is_name
from farcall.runtime.inspection.exchange import decoded
from farcall.runtime.inspection.reports import WorkerReport
from farcall.transport.connect.handshake_messages import printable

MOST_VALUES = 1 << 20  # of one report: 40,000 members or 100,000 calls
MOST_OF_ALL = 1 << 23  # of all reports together: 500 workers that know each other say as much
WHAT = "report of a worker"

_LONGEST = 1000  # characters of a text, as `printable` has it

_decode = msgspec.msgpack.Decoder(WorkerReport).decode


class Hearing:
    """The reports of all workers that are asked for one answer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # so one report at a time is larger than it may be
        self._left = MOST_OF_ALL

    def report_in(self, data: bytearray) -> WorkerReport:
        """Return the report in a message, with "?" for whatever can't be printed.

        Raises:
            BadFrame: it is none, or it or all reports together have too many values.
        """
        with self._lock:
            most = min(MOST_VALUES, self._left)
            safe = _Safe(most)
            report: WorkerReport = safe.of(decoded(_decode, data, WHAT))
            self._left -= most - safe.left
        if not is_name(report.name):
            raise BadFrame(f"what came is no {WHAT}: no worker has the name {report.name!r}")
        return report


class _Safe:
    """Makes copies of values that are safe to print.

    Args:
        left: how many values there may be.
    """

    def __init__(self, left: int) -> None:
        self.left = left

    def of(self, value: Any) -> Any:
        """Return the copy of one value, and of those in it."""
        self.left -= 1
        if self.left < 0:
            raise BadFrame(f"a {WHAT} came with more values than are taken")
        match value:
            case str():
                return value if value.isprintable() and len(value) <= _LONGEST else printable(value)
            case int() | None:
                return value
            case float():
                if not math.isfinite(value):
                    raise BadFrame(f"what came is no {WHAT}: it says {value} of a number")
                return value
            case list() | tuple():
                return type(value)(map(self.of, value))
            case dict():
                return {self.of(key): self.of(one) for key, one in value.items()}
            case msgspec.Struct():
                fields = value.__struct_fields__
                return type(value)(*[self.of(getattr(value, name)) for name in fields])
        raise AssertionError(f"reports have no {type(value).__name__}")
