"""Kernel objects for descriptors: listeners, and streams with Linux's limits of TCP.

A kernel answers while its processes stand still: it takes what fits in its buffers, acknowledges,
and accepts connections up to a backlog.
"""

from __future__ import annotations

import errno
import math
from collections import deque
from collections.abc import Callable

from simulator.system.network import Host, Network
from simulator.system.scheduler import Process, SimThread

BUFFER = 64 * 1024  # bytes of a stream that its sender has sent and its receiver has not read
KEEPALIVE_SECONDS = 30.0  # of silence on an idle connection
SYN_RETRIES = (1.0, 3.0, 7.0, 15.0, 31.0, 63.0)

Address = tuple[str, int]


class Kernel:
    """The descriptors and listeners of all hosts."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.scheduler = network.scheduler
        self.files: dict[int, File] = {}
        self.listeners: dict[Address, Listener] = {}
        self._next = 1000

    def number(self, file: File) -> int:
        """Return a descriptor for a file."""
        self._next += 1
        self.files[self._next] = file
        return self._next

    def open_files(self, process: Process) -> list[File]:
        """Return the files of a process that are open."""
        return [file for file in self.files.values() if file.process is process]

    def end_process(self, process: Process) -> None:
        """Close all files of a process that has ended."""
        for file in self.open_files(process):
            file.close()


class File:
    """Something with a descriptor."""

    def __init__(self, kernel: Kernel, process: Process) -> None:
        self.kernel = kernel
        self.process = process
        self.is_open = True
        self.waiters: dict[SimThread, int] = {}  # threads that poll it, and how often
        self.fd = kernel.number(self)

    def changed(self) -> None:
        """Wake those that poll."""
        for thread in list(self.waiters):
            self.kernel.scheduler.wake(thread)

    def close(self) -> None:
        """Close it."""
        self.is_open = False
        self.kernel.files.pop(self.fd, None)
        self.changed()

    # States that polls see.

    @property
    def is_readable(self) -> bool:
        return False

    @property
    def is_writable(self) -> bool:
        return False

    @property
    def is_ended(self) -> bool:
        return False

    @property
    def is_broken(self) -> bool:
        return False


class Listener(File):
    """A socket that listens."""

    def __init__(self, kernel: Kernel, process: Process, address: Address, backlog: int) -> None:
        super().__init__(kernel, process)
        self.address = address
        self.backlog = backlog
        self.waiting: deque[Stream] = deque()
        kernel.listeners[address] = self

    def __repr__(self) -> str:
        return f"<listener {self.fd} at port {self.address[1]}>"

    @property
    def is_readable(self) -> bool:
        return bool(self.waiting)

    def close(self) -> None:
        self.kernel.listeners.pop(self.address, None)
        super().close()
        while self.waiting:
            self.waiting.popleft().close()


class Stream(File):
    """One end of a connection.

    Attributes:
        error: the `errno` that the next operation fails with; 0 for none.
        user_timeout: seconds after which unacknowledged bytes end the connection; 0: never.
        unread: the bytes that have arrived.
    """

    def __init__(self, kernel: Kernel, process: Process, host: Host) -> None:
        super().__init__(kernel, process)
        self.host = host
        self.local: Address = (host.address, 0)
        self.remote: Address = ("", 0)
        self.peer: Stream | None = None
        self.error = 0
        self.user_timeout = 0.0
        self._keeps_alive = False
        self.unread = bytearray()
        self.has_end = False  # the peer sends no more
        self.is_shut = False  # for writing
        self.under_way = 0  # bytes that the peer's kernel has not acknowledged
        self.since = 0.0  # when the bytes under way were sent, or the peer's kernel last answered
        self.last_answer = kernel.scheduler.now
        self._arrival = 0.0  # of the bytes sent last
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()

    def __repr__(self) -> str:
        ends = (f"{host}:{port}" for host, port in (self.local, self.remote))
        return f"<stream {self.fd}, {' to '.join(ends)}>"

    # Sending.

    @property
    def space(self) -> int:
        """Return how many bytes can be sent now."""
        peer = self.peer
        unread = 0 if peer is None else len(peer.unread)
        return max(0, BUFFER - self.under_way - unread)

    def send(self, data: bytes) -> int:
        """Send what fits.

        Raises:
            OSError: the connection has ended.
        """
        self.check()
        if self.is_shut or self.peer is None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        peer, count = self.peer, min(len(data), self.space)
        if not count:
            return 0
        piece = bytes(data[:count])
        scheduler = self.kernel.scheduler
        if not self.under_way:
            self.since = scheduler.now
            self._limit()
        self.under_way += count
        self._carry(lambda: peer.receive(piece))
        return count

    def check(self) -> None:
        """Raise what has ended the connection, once."""
        if self.error:
            number, self.error = self.error, 0
            self.is_shut = self.has_end = True
            raise OSError(number, errno.errorcode[number])

    def shut(self) -> None:
        """Send no more."""
        if not self.is_shut and self.peer is not None:
            peer = self.peer
            self._carry(peer.end)
        self.is_shut = True

    def _carry(self, act: Callable[[], None]) -> None:
        """Have something arrive at the peer behind all that went before."""
        peer, network = self.peer, self.kernel.network
        assert peer is not None
        arrival = max(
            self._arrival, self.kernel.scheduler.now + network.delay(self.host, peer.host)
        )
        self._arrival = arrival
        self._queue.append((arrival, act))
        if len(self._queue) == 1:
            self.kernel.scheduler.at(arrival, self._pump)

    def _pump(self) -> None:
        peer, network, scheduler = self.peer, self.kernel.network, self.kernel.scheduler
        assert peer is not None
        if network.is_cut(self.host, peer.host):
            again = network.cut_until(self.host, peer.host) + network.random.random()
            scheduler.at(again, self._pump)
            return
        while self._queue and self._queue[0][0] <= scheduler.now:
            self._queue.popleft()[1]()
        if self._queue:
            scheduler.at(self._queue[0][0], self._pump)

    def _limit(self) -> None:
        if not self.user_timeout:
            return
        since, peer = self.since, self.peer

        def look() -> None:
            if self.is_open and self.under_way and self.since == since and self.user_timeout:
                self.fail(errno.ETIMEDOUT)

        if peer is not None:
            self.kernel.scheduler.after(self.user_timeout, look)

    # Receiving. These run in the kernel.

    def receive(self, piece: bytes) -> None:
        """Take in some bytes that have arrived here."""
        sender = self.peer
        assert sender is not None
        if not self.is_open:
            self.kernel.network.carry(self.host, sender.host, sender.reset)
            return
        self.unread += piece
        self.changed()
        count = len(piece)
        self.kernel.network.carry(self.host, sender.host, lambda: sender.acknowledged(count))

    def acknowledged(self, count: int) -> None:
        """Count some bytes as taken by the peer's kernel."""
        self.under_way = max(0, self.under_way - count)
        self.last_answer = self.since = self.kernel.scheduler.now
        if self.under_way:
            self._limit()
        self.changed()

    def end(self) -> None:
        """Note that the peer sends no more."""
        self.has_end = True
        self.changed()

    def reset(self) -> None:
        """Reset the connection: the peer's kernel does not know it."""
        self.fail(errno.ECONNRESET)

    def fail(self, number: int) -> None:
        """End the connection with this error."""
        if self.is_open and not self.error:
            self.error = number
            self.has_end = True
            self.changed()

    def take(self, count: int) -> bytes:
        """Read some of what has arrived."""
        data = bytes(self.unread[:count])
        del self.unread[:count]
        if self.peer is not None:
            self.peer.changed()
        return data

    def keep_alive(self) -> None:
        """Begin to ask an idle peer now and then: `SO_KEEPALIVE`."""
        if self._keeps_alive:
            return
        self._keeps_alive = True

        def look() -> None:
            peer, network = self.peer, self.kernel.network
            if not self.is_open or peer is None:
                return
            if not network.is_cut(self.host, peer.host):
                self.last_answer = self.kernel.scheduler.now
                if not peer.is_open and not peer.has_end and not self._will_end(peer):
                    self.fail(errno.ECONNRESET)
            elif (
                self.kernel.scheduler.now - self.last_answer >= KEEPALIVE_SECONDS
                and not self.under_way
            ):
                self.fail(errno.ETIMEDOUT)
            self.kernel.scheduler.after(KEEPALIVE_SECONDS / 6, look)

        self.kernel.scheduler.after(KEEPALIVE_SECONDS / 6, look)

    @staticmethod
    def _will_end(peer: Stream) -> bool:
        return peer.is_shut or bool(peer._queue)

    # Polling and closing.

    @property
    def is_readable(self) -> bool:
        return bool(self.unread) or self.has_end or bool(self.error)

    @property
    def is_writable(self) -> bool:
        if self.error:
            return True
        return self.peer is not None and (self.space > 0 or self.is_shut)

    @property
    def is_ended(self) -> bool:
        return self.has_end

    @property
    def is_broken(self) -> bool:
        return bool(self.error)

    def close(self) -> None:
        if not self.is_open:
            return
        peer = self.peer
        if peer is not None:
            if self.unread:
                self._carry(peer.reset)
            elif not self.is_shut:
                self._carry(peer.end)
        self.is_shut = True
        super().close()


def pair(one: Stream, other: Stream) -> None:
    """Connect two streams."""
    one.peer, other.peer = other, one
    one.remote, other.remote = other.local, one.local
    one.last_answer = other.last_answer = one.kernel.scheduler.now


class Dial:
    """An attempt to connect.

    Attributes:
        outcome: None while it goes on; a number of `errno`, or 0 if there is a connection.
    """

    def __init__(self, stream: Stream, address: Address) -> None:
        self.stream = stream
        self.outcome: int | None = None
        self._address = address
        self._kernel = stream.kernel
        self._tries = iter(SYN_RETRIES)
        host = self._kernel.network.hosts.get(address[0])
        if host is None:
            self._end(errno.EHOSTUNREACH)
            return
        self._host = host
        if stream.user_timeout:
            self._kernel.scheduler.after(stream.user_timeout, lambda: self._end(errno.ETIMEDOUT))
        self._try()

    def _end(self, outcome: int) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self.stream.changed()

    def _try(self) -> None:
        network, stream = self._kernel.network, self.stream
        if self.outcome is not None or not stream.is_open:
            return
        again = next(self._tries, math.inf)
        if again == math.inf:
            self._end(errno.ETIMEDOUT)
            return
        scheduler = self._kernel.scheduler
        if not network.is_cut(stream.host, self._host):
            scheduler.after(network.delay(stream.host, self._host), self._arrive)
        scheduler.after(again, self._try)

    def _arrive(self) -> None:
        network, stream = self._kernel.network, self.stream
        if self.outcome is not None or network.is_cut(stream.host, self._host):
            return
        listener = self._kernel.listeners.get(self._address)
        if listener is None or not listener.is_open:
            network.carry(self._host, stream.host, lambda: self._end(errno.ECONNREFUSED))
            return
        if len(listener.waiting) >= listener.backlog or stream.peer is not None:
            return
        if not stream.is_open:
            return
        other = Stream(self._kernel, listener.process, self._host)
        other.local = self._address
        pair(stream, other)
        listener.waiting.append(other)
        listener.changed()
        network.carry(self._host, stream.host, lambda: self._end(0))
