"""`socket` and `select`, for the threads of a simulated system."""

from __future__ import annotations

import errno
import math
import select
import socket
import struct
from typing import Any

from simulator.system.files import Dial, File, Kernel, Listener, Stream, pair
from simulator.system.locks import me_of

_TCP_INFO = struct.Struct("@8B13I")


class SimSocket:
    """As `socket.socket`, for TCP and socket pairs."""

    def __init__(
        self,
        sockets: Sockets,
        family: int = socket.AF_INET,
        kind: int = socket.SOCK_STREAM,
        proto: int = 0,
        fileno: int | None = None,
        *,
        file: File | None = None,
    ) -> None:
        self._sockets = sockets
        self._kernel = kernel = sockets.kernel
        self.family = family
        self.type = kind
        self.proto = proto
        self._timeout: float | None = None
        self._address: tuple[str, int] | None = None
        if fileno is not None:
            file = kernel.files.get(fileno)
            if file is None:
                raise OSError(errno.EBADF, "Bad file descriptor")
        if file is None:
            me = me_of(kernel.scheduler)
            file = Stream(kernel, me.process, me.process.host)
        self._file: File | None = file

    def __enter__(self) -> SimSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _stream(self) -> Stream:
        file = self._file
        if not isinstance(file, Stream) or not file.is_open:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return file

    def fileno(self) -> int:
        return -1 if self._file is None or not self._file.is_open else self._file.fd

    def detach(self) -> int:
        number = self.fileno()
        self._file = None
        return number

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None and file.is_open:
            file.close()

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def gettimeout(self) -> float | None:
        return self._timeout

    def setblocking(self, is_blocking: bool) -> None:
        self._timeout = None if is_blocking else 0.0

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        stream = self._file
        if not isinstance(stream, Stream):
            return
        if level == socket.IPPROTO_TCP and option == socket.TCP_USER_TIMEOUT:
            stream.user_timeout = value / 1000
        elif (level, option) == (socket.SOL_SOCKET, socket.SO_KEEPALIVE) and value:
            stream.keep_alive()

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        if level == socket.IPPROTO_TCP and option == socket.TCP_INFO:
            stream = self._stream
            fields = [0] * 21
            fields[12] = int(stream.under_way > 0)
            fields[20] = int((self._kernel.scheduler.now - stream.last_answer) * 1000)
            if fields[12]:
                fields[20] = max(fields[20], 0)
            return _TCP_INFO.pack(*fields)
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    def getsockname(self) -> tuple[str, int]:
        if isinstance(self._file, Listener):
            return self._file.address
        return self._stream.local

    def getpeername(self) -> tuple[str, int]:
        stream = self._stream
        if stream.peer is None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return stream.remote

    # Blocking operations.

    def _wait(self, file: File, until: float) -> None:
        scheduler = self._kernel.scheduler
        if self._timeout == 0.0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        if scheduler.now >= until:
            raise TimeoutError("timed out")
        me = me_of(scheduler)
        file.waiters[me] = file.waiters.get(me, 0) + 1
        try:
            scheduler.sleep(until)
        finally:
            file.waiters[me] -= 1
            if not file.waiters[me]:
                del file.waiters[me]

    def _until(self) -> float:
        return math.inf if self._timeout is None else self._kernel.scheduler.now + self._timeout

    def connect(self, address: Any) -> None:
        stream, until = self._stream, self._until()
        stream.host.ports += 1
        stream.local = (stream.host.address, stream.host.ports)
        dial = Dial(stream, address[:2])
        while dial.outcome is None:
            self._wait(stream, until)
        if dial.outcome == errno.ETIMEDOUT:
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        if dial.outcome:
            raise OSError(dial.outcome, errno.errorcode[dial.outcome])

    def accept(self) -> tuple[SimSocket, tuple[str, int]]:
        listener, until = self._file, self._until()
        assert isinstance(listener, Listener)
        self._kernel.scheduler.may_switch()
        while not listener.waiting:
            self._wait(listener, until)
        stream = listener.waiting.popleft()
        made = SimSocket(self._sockets, self.family, self.type, file=stream)
        return made, stream.remote

    def send(self, data: Any) -> int:
        until = self._until()
        self._kernel.scheduler.may_switch()
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        while True:
            stream = self._stream
            count = stream.send(view)  # type: ignore[arg-type]
            if count or not len(view):
                return count
            self._wait(stream, until)

    def sendall(self, data: Any) -> None:
        view = memoryview(data)
        while view:
            view = view[self.send(view) :]

    def sendmsg(self, parts: Any) -> int:
        return self.send(b"".join(parts))

    def recv(self, count: int, flags: int = 0) -> bytes:
        until = self._until()
        self._kernel.scheduler.may_switch()
        while True:
            stream = self._stream
            if stream.unread:
                return (
                    bytes(stream.unread[:count]) if flags & socket.MSG_PEEK else stream.take(count)
                )
            stream.check()
            if stream.has_end:
                return b""
            self._wait(stream, until)

    def recv_into(self, buffer: Any, nbytes: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        data = self.recv(nbytes or len(view))
        view[: len(data)] = data
        return len(data)

    def recvmsg_into(self, buffers: Any) -> tuple[int, list[Any], int, Any]:
        views = [memoryview(one).cast("B") for one in buffers]
        data = memoryview(self.recv(sum(map(len, views))))
        total = len(data)
        for view in views:
            count = min(len(view), len(data))
            view[:count] = data[:count]
            data = data[count:]
        return total, [], 0, None

    def shutdown(self, how: int) -> None:
        stream = self._stream
        if stream.peer is None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        if how in (socket.SHUT_WR, socket.SHUT_RDWR):
            stream.shut()
        if how in (socket.SHUT_RD, socket.SHUT_RDWR):
            stream.has_end = True
        stream.changed()


class Sockets:
    """The module `socket` of a simulated system."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        sockets = self

        class Socket(SimSocket):
            def __init__(
                self,
                family: int = socket.AF_INET,
                type: int = socket.SOCK_STREAM,  # as in `socket`
                proto: int = 0,
                fileno: int | None = None,
            ) -> None:
                super().__init__(sockets, family, type, proto, fileno)

        self.socket = Socket

    def __getattr__(self, name: str) -> Any:
        if name[:1].isupper() or name in ("gaierror", "timeout", "error", "inet_ntoa"):
            return getattr(socket, name)
        raise AttributeError(f"the simulated system has no socket.{name}")

    def has_dualstack_ipv6(self) -> bool:
        return False

    def gethostname(self) -> str:
        return str(me_of(self.kernel.scheduler).process.host)

    def create_server(self, address: tuple[str, int], *, backlog: int = 512, **_: Any) -> SimSocket:
        me = me_of(self.kernel.scheduler)
        host = me.process.host
        port = address[1]
        if not port:
            host.ports += 1
            port = host.ports
        listener = Listener(self.kernel, me.process, (host.address, port), backlog)
        return SimSocket(self, file=listener)

    def socketpair(self) -> tuple[SimSocket, SimSocket]:
        process = me_of(self.kernel.scheduler).process
        one, other = (Stream(self.kernel, process, process.host) for _ in range(2))
        pair(one, other)
        return tuple(SimSocket(self, socket.AF_UNIX, file=end) for end in (one, other))  # type: ignore[return-value]

    def getaddrinfo(self, host: Any, port: int, **_: Any) -> list[Any]:
        name = host.decode() if isinstance(host, bytes) else host
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (name, port))]


class _Poller:
    """The common part of `select.epoll` and `select.poll`."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.masks: dict[int, int] = {}
        self.sleepers: list[Any] = []

    def _ready(self) -> list[tuple[int, int]]:
        found = []
        for fd, mask in list(self.masks.items()):
            file = self.kernel.files.get(fd)
            if file is None:
                events = self.of_closed
            else:
                events = mask & (
                    select.EPOLLIN * file.is_readable
                    | select.EPOLLOUT * file.is_writable
                    | select.EPOLLRDHUP * file.is_ended
                )
                if file.is_broken:
                    events |= select.EPOLLERR | select.EPOLLHUP
            if events:
                found.append((fd, events))
        return found

    of_closed = 0

    def _wait(self, timeout: float | None) -> list[tuple[int, int]]:
        scheduler = self.kernel.scheduler
        scheduler.may_switch()
        until = math.inf if timeout is None or timeout < 0 else scheduler.now + timeout
        while True:
            ready = self._ready()
            if ready or scheduler.now >= until:
                return ready
            me = me_of(scheduler)
            files = [self.kernel.files[fd] for fd in self.masks if fd in self.kernel.files]
            for file in files:
                file.waiters[me] = file.waiters.get(me, 0) + 1
            self.sleepers.append(me)
            try:
                scheduler.sleep(until)
            finally:
                self.sleepers.remove(me)
                for file in files:
                    file.waiters[me] -= 1
                    if not file.waiters[me]:
                        del file.waiters[me]

    def _changed(self) -> None:
        for thread in list(self.sleepers):
            self.kernel.scheduler.wake(thread)


class SimEpoll(_Poller):
    """As `select.epoll`."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._is_closed = False

    def _check(self) -> None:
        if self._is_closed:
            raise ValueError("I/O operation on closed epoll object")

    def _number(self, fd: Any) -> int:
        return int(fd if isinstance(fd, int) else fd.fileno())

    def register(self, fd: Any, mask: int) -> None:
        self._check()
        number = self._number(fd)
        if number in self.masks:
            raise FileExistsError(errno.EEXIST, "File exists")
        if number not in self.kernel.files:
            raise OSError(errno.EBADF, "Bad file descriptor")
        self.masks[number] = mask
        self._changed()

    def modify(self, fd: Any, mask: int) -> None:
        self._check()
        number = self._number(fd)
        if number not in self.masks:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        self.masks[number] = mask
        self._changed()

    def unregister(self, fd: Any) -> None:
        self._check()
        if self.masks.pop(self._number(fd), None) is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        self._check()
        return self._wait(timeout)

    def close(self) -> None:
        self._is_closed = True
        self._changed()


class SimPoll(_Poller):
    """As `select.poll`."""

    of_closed = select.POLLNVAL

    def register(self, fd: Any, mask: int) -> None:
        self.masks[int(fd if isinstance(fd, int) else fd.fileno())] = mask

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        return self._wait(None if milliseconds is None else milliseconds / 1000)


class Select:
    """The module `select` of a simulated system."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(select, name)

    def epoll(self) -> SimEpoll:
        return SimEpoll(self._kernel)

    def poll(self) -> SimPoll:
        return SimPoll(self._kernel)
