"""Facts of this machine that workers depend on: names, ports, limits, memory, the clock.

Each check looks anew, changes nothing, and takes a second at most. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from farcall.errors import LinkError, RendezvousError
from farcall.monitor.findings import Finding, fine, size
from farcall.runtime.membership.store_probe import StoreSearch
from farcall.threads import FarcallThread
from farcall.transport.connect.addresses import (
    ALL,
    listen_tcp,
    listen_unix,
    resolve,
)

RESOLVER_SECONDS = 1.0
SLOW_RESOLVER = 0.2  # seconds
STORE_SECONDS = 0.5
FEW_FILES, FEW_THREADS, FEW_PORTS = 4096, 1024, 4096
SMALL_SHM = 1 << 30  # bytes; Docker's default is 64 MiB
NEARLY_FULL = 0.9
SLOW_CLOCK = 1e-6  # seconds that reading it takes
CLOCK_READS = 1000
_LONG_AGO = 1_767_225_600  # 2026: a clock before that is not set
_UNLIMITED = 1 << 60  # cgroups of version 1 have a number for it


def names() -> Iterator[Finding]:
    """Look whether the names of hosts that workers use mean something, and how fast."""
    wanted = {"this machine's name": socket.gethostname(), "localhost": "localhost"}
    for variable in ("MASTER_ADDR", "FARCALL_LISTEN"):
        if os.environ.get(variable):
            wanted[variable] = os.environ[variable]
    good = []
    for what, said in wanted.items():
        host = _without_port(said) if what == "FARCALL_LISTEN" else said
        found, why, took = _resolved(host)
        if not found:
            yield Finding(
                "look" if what == "this machine's name" else "wrong",
                "name resolution",
                f"{what}, {host!r}, can't be resolved: {why}",
                f"add {host!r} to /etc/hosts or to the DNS, or use an address in its place",
            )
        elif took > SLOW_RESOLVER:
            yield Finding(
                "look",
                "name resolution",
                f"{host!r} took {took:.1f} s to resolve",
                "look at the name servers in /etc/resolv.conf, or add it to /etc/hosts",
            )
        else:
            good.append(f"{host} is {', '.join(found)}")
    if good:
        yield fine("name resolution", "; ".join(good))


def _without_port(place: str) -> str:
    host, colon, port = place.rpartition(":")
    return (host if colon and port.isdecimal() else place).strip("[]")


def _resolved(host: str) -> tuple[list[str], str, float]:
    """Return addresses of a host, or why there are none, and the seconds that it took."""
    found: list[str] = []
    failures: list[str] = []

    def ask() -> None:
        try:
            infos = resolve(host, 0, socket.SOCK_STREAM)
            found.extend(dict.fromkeys(str(info[4][0]) for info in infos))
        except OSError as error:
            failures.append(str(error))

    thread = FarcallThread(ask, "farcall resolver")
    refused = thread.try_start()
    began = time.monotonic()
    if refused is not None:
        failures.append(f"the system has no thread for it: {refused}")
    thread.join_if_started(RESOLVER_SECONDS)
    why = failures[0] if failures else f"the resolver does not answer within {RESOLVER_SECONDS:g} s"
    return found, why, time.monotonic() - began


def ports() -> Iterator[Finding]:
    """Look whether workers can listen, and whether a process does where they are to meet."""
    good = []
    for host, what in ((ALL, "all interfaces"), ("127.0.0.1", "loopback")):
        try:
            listen_tcp(host, 0).close()
            good.append(what)
        except LinkError as error:
            yield Finding("wrong", "ports", str(error), "look at the firewall or the sandbox")
    unix = listen_unix()
    if unix is None:
        yield Finding(
            "look",
            "ports",
            "there are no abstract Unix sockets here: workers of this host talk over TCP",
            "they need Linux, and a sandbox that allows them",
        )
    else:
        unix.close()
        good.append("Unix sockets")
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, _read("/proc/sys/net/ipv4/ip_local_port_range").split())
        if last - first < FEW_PORTS:
            yield Finding(
                "look",
                "ports",
                f"the system gives only {last - first + 1} ports to connections",
                "sysctl net.ipv4.ip_local_port_range='32768 60999'",
            )
    if good:
        yield fine("ports", f"workers can listen on {', '.join(good)}")
    yield from _store()


def _store() -> Iterator[Finding]:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host and not port:
        return
    if not host or not port.isdecimal():
        yield Finding(
            "wrong",
            "store",
            f"of MASTER_ADDR and MASTER_PORT one is missing or no number: {host!r}, {port!r}",
            "set both, or none and say init_method=",
        )
        return
    try:
        StoreSearch(host, int(port), STORE_SECONDS, confined=False).find("")
        yield fine("store", f"a store answers at {host}:{port} (MASTER_ADDR, MASTER_PORT)")
    except (RendezvousError, OSError) as error:
        yield Finding(
            "look",
            "store",
            str(error),
            "rank 0 makes it when it starts; if it has started, look at the firewall between",
        )


def limits() -> Iterator[Finding]:
    """Look at what the system lets a process have: files, threads, locked memory."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"a process may open {_number(files)} files"
    if 0 <= files < FEW_FILES:
        cure = f"ulimit -n {most_files if most_files > files else 65536}"
        yield Finding("look", "descriptors", f"{text}; a link takes several", cure)
    else:
        yield fine("descriptors", text)
    threads, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    allowed = [threads if threads >= 0 else _UNLIMITED, _cgroup("pids", "pids.max")[0]]
    fewest = min(allowed)
    text = f"this user or container may have {_number(fewest)} threads and processes"
    if fewest < FEW_THREADS:
        cure = "ulimit -u 4096, or docker run --pids-limit=-1"
        yield Finding("look", "threads", text, cure)
    else:
        yield fine("threads", text)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space >= 0:
        yield Finding(
            "look",
            "address space",
            f"a process may map {size(space)} only; shared memory and torch map a lot",
            "ulimit -v unlimited",
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    amount = "any amount" if locked < 0 else size(locked)
    yield fine(
        "memlock",
        f"a process may lock {amount}; farcall locks nothing, CUDA's pinned memory and RDMA do",
    )


def memory() -> Iterator[Finding]:
    """Look at memory: of the machine, of this container, and shared memory."""
    free, total = _meminfo("MemAvailable"), _meminfo("MemTotal")
    most, used = _cgroup("memory", "memory.max", "memory.current")
    if most >= _UNLIMITED:
        most, used, _ = *_cgroup("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"), 0
    if most < _UNLIMITED and used > NEARLY_FULL * most:
        yield Finding(
            "look",
            "memory",
            f"this container uses {size(used)} of the {size(most)} that it may have; beyond that "
            "the system kills its processes (SIGKILL)",
            "give it more (docker run --memory, resources.limits of Kubernetes), or load less",
        )
    elif total and free < (1 - NEARLY_FULL) * total:
        yield Finding(
            "look",
            "memory",
            f"{size(free)} of {size(total)} are free; the system kills processes when none is",
            "end what needs it, or load less",
        )
    else:
        within = f"; this container may have {size(most)}" if most < _UNLIMITED else ""
        yield fine("memory", f"{size(free)} of {size(total)} are free{within}")
    yield from _shared_memory()


def _shared_memory() -> Iterator[Finding]:
    try:
        os.close(os.memfd_create("farcall-doctor"))
    except (AttributeError, OSError) as error:
        yield Finding(
            "look",
            "shared memory",
            f"the system gives no shared memory to links ({error}): they take Unix sockets",
            "it needs Linux, and a sandbox that allows memfd_create",
        )
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding(
            "look", "shared memory", f"there is no /dev/shm ({error}), which torch shares by", ""
        )
        return
    total, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    text = f"/dev/shm has {size(free)} of {size(total)} free"
    if total < SMALL_SHM or free < (1 - NEARLY_FULL) * total:
        yield Finding(
            "look",
            "shared memory",
            f"{text}: tensors that torch shares (DataLoader, share_memory_) lie there",
            "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm; remove old files",
        )
    else:
        yield fine("shared memory", text)


def clock() -> Iterator[Finding]:
    """Look at the clock: certificates need the time, and calls read it."""
    now = time.time()
    if now < _LONG_AGO:
        yield Finding(
            "wrong",
            "clock",
            f"it says {time.strftime('%Y-%m-%d', time.gmtime(now))}: no certificate is valid then",
            "set the clock, for instance by chrony or systemd-timesyncd",
        )
        return
    began = time.perf_counter()
    for _ in range(CLOCK_READS):
        time.monotonic()
    took = (time.perf_counter() - began) / CLOCK_READS
    if took > SLOW_CLOCK:
        source = _read("/sys/devices/system/clocksource/clocksource0/current_clocksource").strip()
        yield Finding(
            "look",
            "clock",
            f"reading it takes {took * 1e6:.1f} us (source {source or 'unknown'}), which each call "
            "does several times",
            "use the clock source tsc or kvm-clock",
        )
    else:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now))
        yield fine("clock", f"{when} UTC; reading it takes {took * 1e9:.0f} ns")


def _number(limit: int) -> str:
    return "any number of" if limit < 0 or limit >= _UNLIMITED else str(limit)


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text("ascii", "replace")
    return ""


def _meminfo(key: str) -> int:
    """Return an amount of /proc/meminfo in bytes, or 0."""
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 0


def _cgroup(controller: str, limit: str, usage: str = "") -> tuple[int, int]:
    """Return the lowest limit of the control groups that this process is in, and what it uses."""
    lowest, used = _UNLIMITED, 0
    for line in _read("/proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        base = Path("/sys/fs/cgroup" if number == "0" else f"/sys/fs/cgroup/{controller}")
        folder = base / path.strip("/")
        for place in [folder, *folder.parents]:
            text = _read(str(place / limit)).strip()
            if text.isdecimal() and int(text) < lowest:
                lowest = int(text)
                used_text = _read(str(place / usage)).strip() if usage else ""
                used = int(used_text) if used_text.isdecimal() else 0
            if place == base:
                break
    return lowest, used
