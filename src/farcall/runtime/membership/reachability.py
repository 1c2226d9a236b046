"""The addresses by which others reach this machine: never loopback if they are elsewhere.

Nothing is kept and nothing is sent: the routing table and the interfaces are asked each time.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

from torch.distributed import Store  # type: ignore[attr-defined]  # as in stores.py

from farcall.log import get_logger
from farcall.runtime.membership.stores import host_of
from farcall.transport.connect.addresses import ALL, ALL_IPV4, is_loopback_name, resolve

if sys.platform == "linux":
    import fcntl

logger = get_logger("farcall")

MAX_ADDRESSES = 8
_LOOPBACK = "127.0.0.1", "::1"
# Of the ranges for documentation: no host has them, so the way there is the way to any host.
_ANYBODY = "192.0.2.1", "2001:db8::1"
_SIOCGIFADDR = 0x8915
_NAME_LENGTH = 16
_GLOBAL_SCOPE = "00"


def advertised(listen: str, store: Store | None, init_method: str) -> tuple[str, ...]:
    """Return where others reach a worker that listens on `listen`: names, addresses, best first.

    Of a worker that listens on all interfaces these are its address on the way to where the
    workers meet, the one on the way to anybody, those of its interfaces, and loopback, for workers
    of this machine only.
    """
    if listen not in (ALL, ALL_IPV4):
        return (_numeric_if_loopback(listen),)
    both = listen == ALL and socket.has_dualstack_ipv6()
    master = _master(store, init_method)
    ways = [address_towards(host) for host in (master, *_ANYBODY) if host]
    found = [address for address in (*ways, *_of_interfaces()) if address is not None]
    wanted = [
        address
        for address in dict.fromkeys(found)
        if not is_loopback_name(address) and (both or ":" not in address)
    ]
    has_ipv4 = not both or not wanted or any(":" not in address for address in wanted)
    local = _LOOPBACK[0] if has_ipv4 else _LOOPBACK[1]
    if not wanted:
        logger.debug("this machine has no address but loopback: workers elsewhere can't reach it")
    return (*wanted[:MAX_ADDRESSES], local)


def _numeric_if_loopback(host: str) -> str:
    """Return the host, or loopback if its name means that here: elsewhere it means another."""
    try:
        address = str(resolve(host, 0, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host  # listening will say so
    return address if is_loopback_name(address) else host


def _master(store: Store | None, init_method: str) -> str | None:
    if store is not None:
        return host_of(store)
    url = urlsplit(init_method)
    return os.environ.get("MASTER_ADDR") if url.scheme == "env" else url.hostname


def address_towards(host: str) -> str | None:
    """Return the address of this machine that `host` would see; None if there is no way to it."""
    try:
        family, kind, protocol, _, address = resolve(host, 9, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return _plain(str(probe.getsockname()[0]))
    except OSError:
        return None


def _of_interfaces() -> Iterator[str | None]:
    if sys.platform == "linux":
        yield from _of_interfaces_ipv4()
        yield from _of_interfaces_ipv6()
    else:
        try:
            for *_, address in resolve(socket.gethostname(), 0, socket.SOCK_STREAM):
                yield _plain(str(address[0]))
        except OSError:
            return


def _of_interfaces_ipv4() -> Iterator[str]:
    if sys.platform != "linux":
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[: _NAME_LENGTH - 1])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no IPv4 address
            yield socket.inet_ntoa(answer[20:24])


def _of_interfaces_ipv6() -> Iterator[str]:
    try:
        with open("/proc/net/if_inet6", encoding="utf-8") as file:
            lines = [line.split() for line in file]
    except OSError:
        return
    for address, _, _, scope, *_ in lines:
        if scope == _GLOBAL_SCOPE:
            yield str(ipaddress.IPv6Address(bytes.fromhex(address)))


def _plain(address: str) -> str | None:
    """Return the address, or None if it is link-local, and so needs an interface."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return None if parsed.is_link_local or parsed.is_unspecified else address
