"""Frames out of a byte stream, read without waiting and with as few copies as possible.

Small frames come through one buffer, many per system call. The raw buffers of a frame are received
straight into the memory in which they are handed out.

Memory is taken as data arrives, never as it is announced: what comes next of a frame has memory, up
to `AHEAD` bytes of it; beyond that, one part of the frame at most, whose pages come with its data.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
from collections import deque
from collections.abc import Iterator

from farcall.errors import BadFrame, LinkError
from farcall.transport.sockets.streams import MAX_VECTORS, OpenedStream
from farcall.wire.frames import (
    DEFAULT_LIMITS,
    HEADER,
    Frame,
    Header,
    Limits,
    decode_header,
    decode_table,
    padding,
)
from farcall.wire.messages import Buffer, decode_message

READ_SIZE = 1 << 16
UNCLEARED_SIZE = 64 << 10
MAPPED_SIZE = 32 << 20
AHEAD = 1 << 20
_SCRATCH_SIZE = 64
# `bytearray(length)` clears its memory, which takes longer than all the rest of a large frame.
_uncleared = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyByteArray_FromStringAndSize", ctypes.pythonapi)
)


def allocate(length: int) -> Buffer:
    """Writable memory of `length` bytes, aligned for vector instructions when it is large.

    Large ones are not cleared first, only to be filled later. The largest are mapped: their pages
    come from the kernel one by one as the data arrives, and a false claim costs nothing.
    """
    try:
        if length >= MAPPED_SIZE:
            return memoryview(mmap.mmap(-1, length))
        if length >= UNCLEARED_SIZE:
            uncleared: bytearray = _uncleared(None, length)
            return uncleared
        return bytearray(length)
    except (OSError, MemoryError, OverflowError, ValueError) as error:
        raise BadFrame(f"no memory for a frame part of {length} bytes") from error


class FrameReader:
    """Reads frames from one non-blocking socket, or its records. Used by one thread at a time."""

    def __init__(
        self, source: socket.socket | OpenedStream, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self._source = source
        self._limits = limits
        self._memory = bytearray(READ_SIZE)
        self._view = memoryview(self._memory)
        self._start = 0
        self._end = 0
        self._header: Header | None = None
        self._front: memoryview | None = None  # table, meta and body when they are too large
        self._front_filled = 0
        self._frame: Frame | None = None  # waits for its buffers
        self._buffers: list[Buffer] = []  # of that frame, so far
        self._lengths: Iterator[int] = iter(())  # of those of its buffers that have no memory yet
        self._offset = 0  # from the start of the frame, of what comes behind `_targets`
        self._targets: deque[memoryview] = deque()
        self._ahead = 0  # bytes of `_targets`, at most
        self._scratch = memoryview(bytearray(_SCRATCH_SIZE))

    @property
    def has_input(self) -> bool:
        """Return whether bytes are buffered: the next frame may be there without a system call."""
        return self._end > self._start or self._has_records

    @property
    def _has_records(self) -> bool:
        """Return whether records were received that are still to be opened."""
        return isinstance(self._source, OpenedStream) and self._source.has_input

    def read(self, *, received: bool = False) -> Frame | None:
        """Return the next whole frame, or None when more bytes have to arrive first.

        Args:
            received: of what has been received already: no system call.

        Raises:
            BadFrame: what arrived is not a frame, breaks a limit, or was altered on its way.
            LinkError: the stream ended.
        """
        while True:
            if self._end > self._start or self._frame is not None or self._front is not None:
                frame = self._parse()
                if frame is not None:
                    return frame
            if received and not self._has_records:
                return None
            if not self._fill():
                return None

    def _fill(self) -> bool:
        source = self._source
        try:
            if self._targets:
                count = self._receive_buffers()
            elif self._front is not None:
                count = source.recv_into(self._front[self._front_filled :])
                self._front_filled += count
            else:
                if self._start == self._end:
                    self._start = self._end = 0
                elif self._start:
                    self._compact()
                count = source.recv_into(self._view[self._end :])
                self._end += count
        except (BlockingIOError, InterruptedError):
            return False
        except BadFrame:
            raise
        except OSError as error:
            raise LinkError(f"the connection broke: {error}") from error
        if not count:
            raise LinkError("the peer closed the connection")
        return True

    def _compact(self) -> None:
        left = self._end - self._start
        self._view[:left] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, left

    def _receive_buffers(self) -> int:
        targets, source = self._targets, self._source
        if isinstance(source, OpenedStream):
            return self._filled(source.recv_into(targets[0]))
        views = [targets[i] for i in range(min(len(targets), MAX_VECTORS))]
        count = source.recvmsg_into(views)[0]
        left = count
        while left:
            left -= self._filled(min(left, len(targets[0])))
        return count

    def _filled(self, count: int) -> int:
        """Note that the first target has so many bytes more. Return how many."""
        view = self._targets[0]
        if count == len(view):
            self._targets.popleft()
        else:
            self._targets[0] = view[count:]
        self._ahead -= count
        return count

    def _parse(self) -> Frame | None:
        if self._frame is not None:
            if self._targets or self._take_memory():
                return None
            frame, self._frame = self._frame, None
            self._buffers = []
            return frame
        header = self._header
        if header is None:
            if self._end - self._start < HEADER.size:
                return None
            header = decode_header(
                self._view[self._start : self._start + HEADER.size], self._limits
            )
            self._start += HEADER.size
            self._header = header
        length = header.front_length
        if self._front is None and self._end - self._start >= length:
            front: memoryview | None = self._view[self._start : self._start + length]
            self._start += length
        else:
            front = self._take_front(length)
        if front is None:
            return None
        self._header = None
        return self._open_frame(header, front)

    def _take_front(self, length: int) -> memoryview | None:
        """Table, meta and body, once they are complete."""
        if self._front is not None:
            if self._front_filled < len(self._front):
                return None
            front, self._front = self._front, None
            return front
        if length <= READ_SIZE:
            return None
        self._front = memoryview(allocate(length))
        self._front_filled = self._end - self._start
        self._front[: self._front_filled] = self._view[self._start : self._end]
        self._start = self._end = 0
        return None

    def _open_frame(self, header: Header, front: memoryview) -> Frame | None:
        table_end = header.table_length
        meta_end = table_end + header.meta_length
        message = decode_message(header.kind, front[table_end:meta_end])
        # A copy: the memory behind a small front is used again for the next frame.
        body = bytes(front[meta_end:]) if len(front) <= READ_SIZE else front[meta_end:]
        if not header.buffer_count:
            return Frame(message, header.call_id, body)
        self._lengths = iter(decode_table(header, front[:table_end], self._limits))
        self._offset = HEADER.size + len(front)
        self._frame = Frame(message, header.call_id, body, self._buffers)
        self._take_buffered()
        return self._parse()

    def _take_memory(self) -> bool:
        """Take memory for the next buffers. Return whether any bytes have to come for them."""
        while self._ahead < AHEAD and len(self._targets) < MAX_VECTORS:
            length = next(self._lengths, None)
            if length is None:
                break
            buffer = allocate(length) if length else bytearray()
            self._buffers.append(buffer)
            pad = padding(self._offset)
            if pad:
                self._targets.append(self._scratch[:pad])
            if length:
                self._targets.append(memoryview(buffer))
            self._offset += pad + length
            self._ahead += pad + length
        return bool(self._targets)

    def _take_buffered(self) -> None:
        """Take the bytes read together with the front: they belong to the buffers already."""
        while self._end > self._start and (self._targets or self._take_memory()):
            view = self._targets[0]
            count = min(len(view), self._end - self._start)
            view[:count] = self._view[self._start : self._start + count]
            self._start += count
            self._filled(count)
