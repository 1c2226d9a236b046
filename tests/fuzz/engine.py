"""Run one target in this process until the time is over: Atheris, which is libFuzzer for Python.

Called by run.py, which sees the end of this process. The input lies in a file that both have
mapped, so that an input which ends the process, however it does so, is known.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import atheris

LARGEST = 4 << 10  # bytes of an input
HEAD = struct.Struct("<QQ")  # how many were tried before, and the length of the one that is tried


def recorded(run: Callable[[bytes], None], memory: mmap.mmap) -> Callable[[bytes], None]:
    """Return the target, which says what it is about to try."""
    count = 0

    def record(data: bytes) -> None:
        nonlocal count
        memory[HEAD.size : HEAD.size + len(data)] = data
        memory[: HEAD.size] = HEAD.pack(count, len(data))
        run(data)
        count += 1
        memory[: HEAD.size] = HEAD.pack(count, len(data))

    return record


def main(name: str, record: str, corpus: str, *options: str) -> None:
    """Fuzz until the options of libFuzzer say to stop. Does not return."""
    with atheris.instrument_imports(include=["farcall"]):
        from targets import TARGETS  # noqa: PLC0415  imports here are watched

    with Path(record).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    arguments = [sys.argv[0], corpus, f"-max_len={LARGEST}", "-verbosity=0", *options]
    atheris.Setup(arguments, recorded(TARGETS[name].run, memory))
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
