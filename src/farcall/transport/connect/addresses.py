"""Addresses of sockets: "tcp://host:port" or, for workers of one host, "unix:@name".

A Unix name is abstract, as Linux has them. It lives in a network namespace, nothing of it is ever
in the file system, and it is gone with its listener. It holds 128 random bits, so on another host,
or in a container with a network of its own, no process listens on it and connecting fails at once.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import struct
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from farcall.errors import LinkError
from farcall.log import get_logger
from farcall.transport.forks import keep_from_children

# A family, a kind, a protocol, a canonical name and an address for `connect`.
Resolved = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]

logger = get_logger("farcall.transport")

# Paths of frames between two workers, best first. Shared memory is set up over a Unix
# socket.
PATHS = ("shm", "unix", "tcp")

# TCP connections that a link to another host may use for large buffers, the first included.
DEFAULT_STREAMS = 4
MAX_STREAMS = 16

BACKLOG = 512
ALL = "::"
ALL_IPV4 = "0.0.0.0"
UNIX = "unix:@"

# The default is 208 KiB, of which the smallest frame takes most of one: 278 that are not read would
# block a sender, where TCP takes tens of thousands. With this, 28 MB go in 6 pieces instead of 30
# to 45, in 5.5 ms instead of 6.1; with 4 MiB it was 7.5. The system may allow less.
UNIX_BUFFER_SIZE = 1 << 20

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


def listen_tcp(host: str, port: int) -> socket.socket:
    """Return a listener on a host name or address; port 0 takes a free one.

    "::" is all interfaces, for IPv4 and IPv6 as far as this machine has them.

    Raises:
        LinkError: it can't be listened on.
    """
    if host == ALL and not socket.has_dualstack_ipv6():
        host = ALL_IPV4
    try:
        listener = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=BACKLOG,
            dualstack_ipv6=host == ALL,
        )
    except OSError as error:
        raise LinkError(f"can't listen on {host}:{port}: {error}") from error
    keep_from_children(listener)
    return listener


def listen_unix() -> socket.socket | None:
    """Return a listener on a random name, or None where there is no such thing."""
    if sys.platform != "linux":
        return None
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        keep_from_children(listener)
        listener.bind(f"\0farcall-{secrets.token_hex(16)}".encode())
        listener.listen(BACKLOG)
    except OSError as error:
        # A sandbox may forbid it. TCP is there, too.
        logger.debug("could not listen on a Unix socket: %s", error)
        if listener is not None:
            listener.close()
        return None
    return listener


def urls(listener: socket.socket, hosts: Sequence[str]) -> tuple[str, ...]:
    """Return where others reach a listener, given the names or addresses of this host."""
    address = listener.getsockname()
    if is_unix(listener):
        return (UNIX + address[1:].decode(),)
    return tuple(f"tcp://{join(host, address[1])}" for host in hosts)


def tcp_of(url: str) -> tuple[str, int] | None:
    """Return the host and port of a TCP address, or None if it is none. Others may have made it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    return (host, port) if parts.scheme == "tcp" and host and port else None


def accept(listener: socket.socket) -> tuple[socket.socket, str, str]:
    """Accept a connection; return it, its other end, and where that is: `origin_of`, or its user.

    The other end is "10.0.0.1:4711", or "pid 12 (uid 0)".

    Raises:
        OSError: there is none, or no descriptor for it.
    """
    sock, address = listener.accept()
    keep_from_children(sock)
    if not isinstance(address, tuple):  # of a Unix socket
        pid, uid = _credentials(sock)
        return sock, f"pid {pid} (uid {uid})", f"uid {uid}"
    # A listener for both gives IPv4 addresses as "::ffff:10.0.0.1".
    host = address[0].removeprefix("::ffff:")
    return sock, join(host, address[1]), origin_of(host)


@lru_cache(1024)  # a flood comes from few
def origin_of(address: str) -> str:
    """Return what counts as one origin: an IPv4 address, or a network of IPv6, which a host has."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


def is_unix(sock: socket.socket) -> bool:
    return sock.family not in (socket.AF_INET, socket.AF_INET6)


def is_loopback(sock: socket.socket) -> bool:
    """Return whether a TCP connection was dialled to an address that only this host has."""
    return is_loopback_name(sock.getpeername()[0])


def resolve(host: str, port: int, kind: socket.SocketKind) -> Sequence[Resolved]:
    """Return what `socket.getaddrinfo` gives for a host and a port.

    An ASCII name is passed as bytes: of a text Python first makes an international name, which
    loads tables for some milliseconds and raises a UnicodeError for a text that is no name.

    Raises:
        OSError: the name can't be resolved.
    """
    try:
        name = host.encode("ascii" if host.isascii() else "idna")
        return socket.getaddrinfo(name, port, type=kind)
    except ValueError as error:  # no international name, or with a zero byte
        raise OSError(f"{host!r} is no name of a host: {error}") from error


def is_loopback_name(host: str) -> bool:
    """Return whether a name or address is one that only this machine has."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        # Other names aren't looked up: what they resolve to may change after this check.
        return host == "localhost"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback  # as a listener for both families has it
    return address.is_loopback


def tune(sock: socket.socket) -> None:
    """Set what a connection needs to be quick."""
    if is_unix(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_SIZE)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def check_user(sock: socket.socket) -> None:
    """Refuse a process of another user at the other end of a Unix socket.

    Raises:
        PermissionError: it is one; the message names it.
    """
    pid, uid = _credentials(sock)
    if uid != os.geteuid():
        raise PermissionError(
            f"pid {pid} at the other end of the Unix socket belongs to another user (uid {uid}, "
            f"not {os.geteuid()})"
        )


def check_process(sock: socket.socket, pid: int) -> None:
    """Refuse another process than a worker's at the other end of a Unix socket that we dialled.

    The kernel says which process listens. A worker counts its pid in its own namespace, which may
    be another one than ours; where that can't be seen, any process passes.

    Args:
        pid: of the worker; 0 if it is unknown.

    Raises:
        PermissionError: it is another one; the message names it.
    """
    seen, _ = _credentials(sock)
    if not pid or not seen or pid == seen:
        return
    own = _pid_in_its_namespace(seen)
    if own not in (None, pid):
        raise PermissionError(f"pid {seen} listens there, not the worker, which is pid {pid}")


def _pid_in_its_namespace(seen: int) -> int | None:
    """Return the pid that a process has for itself, given what it is here; None if it can't be had.

    It is 0 if there is no such process any more.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # of another namespace
            return None
        with open(f"/proc/{seen}/status", encoding="utf-8", errors="replace") as file:
            numbers = [line.split() for line in file if line.startswith("NSpid:")]
    except (FileNotFoundError, ProcessLookupError):
        return 0 if os.path.exists("/proc/self/status") else None
    except OSError:
        return None
    return int(numbers[0][-1]) if numbers and numbers[0][-1].isdecimal() else None


def process_at(sock: socket.socket) -> str:
    """Name the process that connected, or listens. Its pid is 0 if it can't be seen from here."""
    pid, uid = _credentials(sock)
    return f"pid {pid} (uid {uid})"


def _credentials(sock: socket.socket) -> tuple[int, int]:
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def join(host: str, port: int) -> str:
    """Return "host:port", or "[host]:port" of an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
