"""Memory is taken as data arrives, never as it is announced: measured in processes of its own."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys

import pytest
from stations import DIALLER_KEY, PATIENCE

from farcall.wire.frames import HEADER, MAGIC, VERSION
from farcall.wire.messages import Kind, Leaving, encode_message

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at memory in /proc")

META = encode_message(Leaving("now"))
MOST = 4 << 20  # bytes beyond those sent and those that a reader has anyway

PROGRAM = """
import json, os, pickle, socket, sys, threading
from pathlib import Path

from farcall.errors import BadFrame
from farcall.transport.connect.keys import Keys
from farcall.transport.sockets.framing import FrameReader
from farcall.transport.sockets.records import Sealer
from farcall.transport.sockets.streams import SealedWriter, source_of

def memory():
    # Not of files: a fork has none of their pages at first.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10

def measure(name, key, data):
    keys = Keys(bytes.fromhex(key), bytes.fromhex(key), True) if key else None
    reading, writing = socket.socketpair()
    reading.setblocking(False)

    def write():
        if keys is None:
            return writing.sendall(data)
        writer = SealedWriter(writing, Sealer(keys.sending, True))
        writer.put([data])
        writer.write()

    reader = FrameReader(source_of(reading, keys))
    reader.read()  # imports and caches
    before = memory()
    writer = threading.Thread(target=write)
    writer.start()
    refused, frames = "", 0
    try:
        while writer.is_alive() or reader.has_input:
            frames += reader.read() is not None
        while reader.read() is not None:
            frames += 1
    except BadFrame as error:
        refused = str(error)
        reading.close()
    print(json.dumps([name, key, memory() - before, frames, refused]), flush=True)

for case in pickle.load(sys.stdin.buffer):
    if (child := os.fork()) == 0:
        measure(*case)
        os._exit(0)
    os.waitpid(child, 0)
"""


def announced(lengths: list[int], body: int = 0, meta: int = len(META)) -> bytes:
    """Return the beginning of a frame: header, table and meta."""
    head = HEADER.pack(MAGIC, VERSION, Kind.LEAVING, 0, meta, len(lengths), 0, body)
    return head + struct.pack(f"<{len(lengths)}Q", *lengths) + META


FRAMES = {
    "60,000 buffers of 40 KB": announced([40_000] * 60_000),
    "60,000 buffers of 63 KB, and the first of them": announced([63_000] * 60_000) + bytes(70_000),
    "60,000 buffers of 1 MB": announced([1_000_000] * 60_000),
    "1,000 buffers of 1 GB, and 2 MB of them": announced([1 << 30] * 1000) + bytes(2 << 20),
    "a million buffers of one byte": announced([1] * (1 << 20)),
    "buffers of every size": announced([1 << n for n in range(36)] * 10),
    "one buffer of 31 MB": announced([31 << 20]),
    "one buffer of 60 GB": announced([60 << 30]),
    "a body of 31 MB": announced([], 31 << 20),
    "a body of 1 GB": announced([], 1 << 30),
    "60 MB of metadata": announced([], meta=60 << 20),
}


KEYS = {"plain": "", "encrypted": DIALLER_KEY.hex()}

Measured = dict[tuple[str, str], tuple[int, int, str]]


@pytest.fixture(scope="module")
def measured() -> Measured:
    """Have a process measure all frames, each in a fork of its own."""
    cases = [(name, key, data) for name, data in FRAMES.items() for key in KEYS.values()]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=pickle.dumps(cases),
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(found) == len(cases), ran.stderr.decode()
    return {(name, key): (taken, frames, refused) for name, key, taken, frames, refused in found}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("frame", FRAMES)
def test_frame_takes_no_more_memory_than_came_of_it(
    measured: Measured, frame: str, key: str
) -> None:
    taken, frames, refused = measured[frame, key]
    assert frames == 0
    assert not refused or "no memory" in refused
    # The table's numbers are Python's, too, while it is read.
    size = len(FRAMES[frame])
    assert taken <= MOST + 8 * size, f"{taken >> 20} MiB for {size >> 10} KiB"
