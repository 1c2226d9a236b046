"""A link of the compiled transport: messages are encoded and decoded here."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from farcall import _native
from farcall.errors import BadFrame, LinkError
from farcall.ids import Worker
from farcall.transport.base import NotSent
from farcall.transport.connect.keys import Keys
from farcall.transport.connect.multi_stream import StreamTarget
from farcall.wire.frames import Frame, check_size
from farcall.wire.messages import KINDS, Buffer, Message, decode_message, encode_message

_DIALLED, _ACCEPTED = 0, 1
_NUMBERS = {message: int(kind) for message, kind in KINDS.items()}
_LAST_KIND = max(_NUMBERS.values())


class NativeLink:
    """See `base.Link`."""

    __slots__ = ("_core", "_zero_copy", "description", "drawback", "peer", "target")

    def __init__(
        self,
        core: _native.Link,
        peer: Worker,
        description: str,
        zero_copy: bool,
        target: StreamTarget | None,
        drawback: str,
    ) -> None:
        self.peer = peer
        self.description = description
        self.drawback = drawback
        self.target = target
        self._core = core
        self._zero_copy = zero_copy

    @property
    def id(self) -> int:
        """The number by which the core calls it in its events."""
        return self._core.id

    @property
    def loss_cause(self) -> str | None:
        """The reason why it ended, or None."""
        return self._core.loss_cause if self._core.is_lost else None

    def start(self) -> None:
        """Let the endpoint read."""
        try:
            self._core.start()
        except RuntimeError as error:
            raise LinkError(str(error)) from error

    def set_reading(self, is_on: bool) -> None:
        self._core.set_reading(is_on)

    def join(self, sock: socket.socket, keys: Keys | None) -> None:
        """See `connections.Connections`."""
        try:
            self._core.join(sock.detach(), keys)
        except RuntimeError as error:
            raise LinkError(str(error)) from error

    @property
    def streams(self) -> int:
        """Return how many streams it has: the connections that it uses."""
        return self._core.streams

    @property
    def striped_buffers(self) -> int:
        """Return how many buffers it has sent over several streams."""
        return self._core.striped_buffers

    def send(self, frame: Frame, deadline: float) -> None:
        message, buffers = frame.message, frame.buffers
        status = self._core.send(
            _NUMBERS[type(message)],
            frame.call_id,
            encode_message(message),
            frame.body,
            _with_files(buffers) if self._zero_copy else buffers,
            deadline,
        )
        if status:
            raise self._failure(status, frame)

    def exchange(
        self, frame: Frame, deadline: float, meanwhile: Callable[[], None] | None = None
    ) -> Frame:
        message, buffers = frame.message, frame.buffers
        answer = self._core.exchange(
            _NUMBERS[type(message)],
            frame.call_id,
            encode_message(message),
            frame.body,
            _with_files(buffers) if self._zero_copy else buffers,
            deadline,
            meanwhile,
        )
        if isinstance(answer, int):
            raise self._failure(answer, frame)
        kind, call_id, meta, body, arrived = answer
        opened = self.open(kind, call_id, meta, body, arrived)
        if opened is None:
            raise self._failure(_native.LOST, frame)
        return opened

    def receive(self, kinds: frozenset[type[Message]], alarm: int, deadline: float) -> Frame | None:
        arrived = self._core.receive(_mask(kinds), alarm, deadline)
        return None if arrived is None else self.open(*arrived)

    def open(
        self, kind: int, call_id: int, meta: bytes, body: Buffer, buffers: list[memoryview]
    ) -> Frame | None:
        """Return the frame that arrived; None if it can't be decoded, which loses the link."""
        try:
            return Frame(decode_message(kind, meta), call_id, body, buffers)
        except BadFrame as error:
            self.fail(str(error))
            return None

    def fail(self, cause: str) -> None:
        """End the link for this cause: all that wait on it fail, and it is reported once."""
        self._core.fail(cause)

    def close_after_fork(self) -> None:
        """Close a forked child's copy, without a word to the peer."""
        self._core.close_after_fork()

    def _failure(self, status: int, frame: Frame) -> Exception:
        if status == _native.TOO_LARGE:
            meta = encode_message(frame.message)
            check_size(frame.message, len(meta), len(frame.body), frame.buffers)
        if status == _native.LOST:
            return LinkError(self.loss_cause or "the connection broke")
        return NotSent() if status == _native.NOT_SENT else TimeoutError()


@lru_cache
def _mask(kinds: frozenset[type[Message]]) -> int:
    return sum(1 << _NUMBERS[kind] for kind in kinds)


def _with_files(buffers: Sequence[Any]) -> list[_native.OutBuffer]:
    """Buffers; those that lie in shared memory, see `serde/shared.py`, with the file."""
    return [_with_file(buffer) for buffer in buffers]


def _with_file(buffer: Any) -> _native.OutBuffer:
    exporter = getattr(buffer, "obj", None)
    if isinstance(exporter, memoryview):  # the buffer is a part of the exported memory
        exporter = exporter.obj
    find = getattr(exporter, "file_and_address", None)
    file = None if find is None else find()
    return buffer if file is None else (buffer, *file)
