"""One stream connection: which thread may read, which may write, and how it ends.

Reading is a role, held by one thread at a time (`read_role`): the endpoint's `next`, or a caller
inside `exchange`, which takes the connection out of the poller meanwhile and receives its own
reply. Writing is a role too (`_write_role`): a frame is written by one thread from its first byte
to its last. A writer whose deadline passes in the middle of a frame leaves the rest as a residue,
which `next` writes when the peer reads again; the role stays taken until then.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from farcall.errors import BadFrame, LinkError
from farcall.ids import Worker
from farcall.threads import is_main_thread
from farcall.transport.base import OUTCOMES, NotSent
from farcall.transport.connect.keys import Keys
from farcall.transport.sockets.framing import FrameReader
from farcall.transport.sockets.poller import END, READ, WRITE, Poller
from farcall.transport.sockets.streams import source_of, writer_of
from farcall.transport.spin import SpinBudget, Spinner
from farcall.transport.uninterrupted import take
from farcall.transport.waiter import MAX_WAIT, Waiter
from farcall.wire.frames import Frame, Limits, encode
from farcall.wire.messages import KINDS, Message

MAX_POLL = 3600.0


class SocketLink:
    """See `base.Link`. The endpoint gets everything that no caller waits for by `on_frame`."""

    drawback = ""

    def __init__(
        self,
        sock: socket.socket,
        peer: Worker,
        description: str,
        poller: Poller,
        spin: SpinBudget,
        limits: Limits,
        on_frame: Callable[[SocketLink, Frame], None],
        on_link_lost: Callable[[SocketLink, str], None],
        is_behind: Callable[[], bool] = lambda: False,
        keys: Keys | None = None,
    ) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.description = description
        self.loss_cause: str | None = None
        self._cut: str | None = None  # why writing failed: lost once everything is read
        self.fd = sock.fileno()
        self.read_role = threading.Lock()
        self._sock = sock
        self._poller = poller
        self._reader = FrameReader(source_of(sock, keys), limits)
        self._writer = writer_of(sock, keys)
        self._readable = select.poll()
        self._readable.register(self.fd, select.POLLIN)
        self._spinner = Spinner(spin)
        self._write_role = threading.Lock()
        self._has_residue = False  # `next` writes what the writer has
        self._by_caller = False  # a caller reads, not the endpoint
        self._is_paused = False  # see `set_reading`
        self._interest = threading.Lock()  # guards what the poller is asked to watch for
        self._on_frame = on_frame
        self._on_link_lost = on_link_lost
        self._is_behind = is_behind  # so much waits for `next` that no caller should read more
        self._state = threading.Lock()  # guards `loss_cause` and `_waiters` against each other
        self._waiters: dict[int, Waiter[Frame]] = {}

    def start(self) -> None:
        """Let the endpoint read. The link may be lost by now: its endpoint knows it already."""
        with self.read_role:  # `free` can't close the fd meanwhile
            if self.loss_cause is None:
                with contextlib.suppress(ValueError, OSError):  # the poller was closed
                    self._poller.add(self.fd, self, READ)
            if self.loss_cause is not None:
                self._poller.remove(self.fd)

    # Writing.

    def send(self, frame: Frame, deadline: float) -> None:
        parts = encode(frame)
        is_writing, is_written = False, True
        try:
            is_writing = take(self._write_role) or take(self._write_role, _wait_time(deadline))
            if not is_writing:
                raise NotSent
            if self.loss_cause is not None:
                raise LinkError(self.loss_cause)
            is_written = False
            self._writer.put(parts)
            is_written = self._writer.write() or self._write_on(deadline)
        except (LinkError, NotSent):
            raise
        except OSError as error:  # a TimeoutError, too: that is the kernel's, of a dead host
            is_written = True  # nothing will be
            raise self._broken(error) from error
        finally:
            if is_writing:
                if is_written:
                    self._write_role.release()
                else:
                    self._leave()
        if not is_written:
            raise TimeoutError

    def _write_on(self, deadline: float) -> bool:
        """Write until all is written or the deadline has passed. Return whether all is."""
        writable = select.poll()
        writable.register(self.fd, select.POLLOUT)
        while _poll(writable, deadline):
            if self._writer.write():
                return True
        return False

    def _leave(self) -> None:
        """Leave the rest of the writing to the endpoint's thread."""
        is_left = [False]
        try:
            self._leave_once(is_left)
        except BaseException:  # KeyboardInterrupt
            self._leave_once(is_left)
            raise

    def _leave_once(self, is_left: list[bool]) -> None:
        with self._interest:
            if not is_left[0]:
                self._has_residue = is_left[0] = True
            self._ask()

    def _ask(self) -> None:
        """Have the poller watch for what its thread has to do here. `_interest` held."""
        if self.loss_cause is None:
            read = 0 if self._by_caller else END if self._is_paused else READ
            self._poller.modify(self.fd, read | WRITE if self._has_residue else read)

    def write_residue(self) -> None:
        """Write the rest: the endpoint's `next` saw that the socket takes bytes again."""
        if not self._has_residue:
            return
        try:
            is_written = self._writer.write()
        except OSError as error:
            is_written = True  # nothing will be
            self._broken(error)
        if is_written:
            with self._interest:
                self._end_residue()
                self._ask()

    def _end_residue(self) -> None:
        """Let others write. `_interest` held."""
        if self._has_residue:
            self._has_residue = False
            self._write_role.release()

    # Reading.

    def set_reading(self, is_on: bool) -> None:
        with self._interest:
            if self._is_paused is is_on:
                self._is_paused = not is_on
                self._ask()

    def exchange(
        self, frame: Frame, deadline: float, meanwhile: Callable[[], None] | None = None
    ) -> Frame:
        call_id = frame.call_id
        waiter: Waiter[Frame] = Waiter()
        reading = False
        try:
            with self._state:
                if self.loss_cause is not None:
                    raise LinkError(self.loss_cause)
                self._waiters[call_id] = waiter
            if meanwhile is None:
                # Out of the poller before the request goes: else its leader races us to the reply.
                reading = self._start_reading()
                self.send(frame, deadline)
            else:
                self.send(frame, deadline)
                meanwhile()
                reading = self._start_reading()
            if reading:
                answer = self._receive(waiter, deadline)
                if answer is not None:
                    return answer
                reading = False
                self._stop_reading()
            return waiter.wait(deadline)
        finally:
            if reading:
                self._stop_reading()
            self._waiters.pop(call_id, None)

    def receive(self, kinds: frozenset[type[Message]], alarm: int, deadline: float) -> Frame | None:
        if not self._start_reading():
            return None
        either = select.poll()
        either.register(self.fd, select.POLLIN)
        either.register(alarm, select.POLLIN)
        needs_more = not self._reader.has_input
        try:
            while self.loss_cause is None:
                if needs_more:
                    sleep = partial(_poll, either, deadline)
                    if not self._spinner.wait(partial(either.poll, 0), sleep):
                        return None
                    if not self._readable.poll(0):
                        return None  # it is the alarm
                frame = self._read()
                if frame is not None:
                    if type(frame.message) in kinds:
                        return frame
                    self._route(frame)
                    if self._is_behind() or time.monotonic() >= deadline:
                        return None
                # Half a frame may be there: its end has to be waited for, too.
                needs_more = frame is None or not self._reader.has_input
            return None
        finally:
            self._stop_reading()

    def _start_reading(self) -> bool:
        """Have the calling thread read, not the endpoint; return False if another one does."""
        # In the main thread Ctrl-C may come between any two steps of reading, and frames that were
        # read, for other callers too, would be lost. So that thread reads only if no other does.
        if self._poller.is_served and is_main_thread():
            return False
        if not self.read_role.acquire(blocking=False):
            return False
        with self._interest:
            self._by_caller = True
            self._ask()
        return True

    def _receive(self, waiter: Waiter[Frame], deadline: float) -> Frame | None:
        """Read, with the read role held, until this waiter has its outcome.

        Returns:
            None if the endpoint does not keep up with what arrives for it: it has to read itself.
        """
        reader = self._reader
        needs_more = not reader.has_input
        while not waiter.is_set:
            if needs_more and self.loss_cause is None:
                self._wait_readable(deadline)
            frame = self._read()
            if frame is not None:
                self._route(frame)
                if not waiter.is_set:
                    if self._is_behind():
                        return None
                    if time.monotonic() >= deadline:
                        raise TimeoutError
            needs_more = frame is None or not reader.has_input
        return waiter.result()

    def _wait_readable(self, deadline: float) -> None:
        look = partial(self._readable.poll, 0)
        if not self._spinner.wait(look, partial(_poll, self._readable, deadline)):
            raise TimeoutError

    def _stop_reading(self) -> None:
        leftover = self._reader.has_input or self._cut is not None
        # Before the role is given back: after that the fd may be closed, and be another's.
        with self._interest:
            self._by_caller = False
            self._ask()
        self.read_role.release()
        if leftover:
            self.service()

    def service(self) -> None:
        """Read once from the socket, unless a caller is reading; to the end, if the end is near.

        A peer that always has a next frame must not keep the others from being heard.
        """
        if not self.read_role.acquire(blocking=False):
            return
        try:
            while (frame := self._read()) is not None:
                while frame is not None:
                    self._route(frame)
                    frame = self._read(received=True)
                if self._cut is None:
                    break
        finally:
            self.read_role.release()

    def _read(self, *, received: bool = False) -> Frame | None:
        """Return the next frame, or only one that has been received already, if that is wanted."""
        if self.loss_cause is not None:
            return None
        try:
            return self._reader.read(received=received)
        except (BadFrame, LinkError) as error:
            self.fail(self._cut or str(error))
            return None

    def _route(self, frame: Frame) -> None:
        if KINDS[type(frame.message)] in OUTCOMES:
            with self._state:
                waiter = self._waiters.pop(frame.call_id, None)
            if waiter is not None:
                waiter.deliver(frame)
                return
        self._on_frame(self, frame)

    # Ending.

    def _broken(self, error: OSError) -> LinkError:
        """Writing failed. The peer's last frames, a goodbye maybe, still count."""
        gone = isinstance(error, BrokenPipeError)  # a reader says the same of it
        self._cut = "the peer closed the connection" if gone else f"the connection broke: {error}"
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # so that the reading thread finds the end
        if not is_main_thread():
            self.service()
        return LinkError(self.loss_cause or self._cut)

    def fail(self, cause: str) -> None:
        """End the link for this cause: all that wait on it fail, and it is reported once."""
        with self._state:
            if self.loss_cause is not None:
                return
            self.loss_cause = cause
            waiters = list(self._waiters.values())
            self._waiters.clear()
        self._poller.remove(self.fd)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for waiter in waiters:
            waiter.fail(cause)
        self._on_link_lost(self, cause)

    def close_after_fork(self) -> None:
        """Close this process's copy of the descriptor; the connection lives on in the parent."""
        self.loss_cause = "this process was forked from the worker"
        self._sock.close()

    def free(self) -> bool:
        """Close the socket of a lost link; return False, to be tried again, if it is in use."""
        if not self.read_role.acquire(blocking=False):
            return False
        try:
            with self._interest:  # a thread may still be asking the poller
                self._end_residue()
            if not self._write_role.acquire(blocking=False):
                return False
            self._sock.close()
            self._write_role.release()
            return True
        finally:
            self.read_role.release()


def _wait_time(deadline: float) -> float:
    if deadline == math.inf:
        return MAX_WAIT
    return max(0.0, min(deadline - time.monotonic(), MAX_WAIT))


def _poll(poll: select.poll, deadline: float) -> bool:
    """Sleep until the socket is ready; return False if the deadline passed first."""
    while True:
        left = MAX_POLL if deadline == math.inf else deadline - time.monotonic()
        if poll.poll(max(0.0, min(left, MAX_POLL)) * 1000):
            return True
        if left <= MAX_POLL:
            return False
