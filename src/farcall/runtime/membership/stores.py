"""Opening the torch Store at which workers meet: `env://`, `tcp://host:port`, `file:///path`.

It accepts what `torch.distributed.rendezvous` accepts, and torchrun's environment, but opens the
stores itself: that function's TCPStore waits for all clients, and when one is missing its timeout
names no worker. `rendezvous` finds the missing ones; here a worker only gets a store,
and its place (rank, world size) as the arguments, the URL or the environment tell it.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote_to_bytes, urlsplit

# torch passes these names on from C without saying so in a way that mypy's strict mode accepts.
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from farcall.errors import FarcallError, RendezvousError, RendezvousTimeout
from farcall.runtime.membership.store_probe import LOOPBACK, StoreSearch, listen_on_loopback
from farcall.transport.uninterrupted import in_a_thread

# Stands for "no limit" where torch wants one: its stores count milliseconds in 32 bits.
_NO_LIMIT = 7 * 24 * 3600.0
_PROBE_SECONDS = 5.0  # for a connection to a store that was there before
_HOST_SECONDS = 60.0  # for a store of this process to answer the process itself

_Result = TypeVar("_Result")


def open_store(
    init_method: str,
    rank: int = -1,
    world_size: int | None = None,
    timeout: float = 60.0,
    *,
    confined: bool = False,
) -> tuple[Store, int, int | None]:
    """Open the store that a URL names; return it, this worker's rank, and the world size.

    An argument wins over the URL's query (`?rank=0&world_size=2`), which wins over the environment
    (`RANK`, `WORLD_SIZE`; `env://` only). Where `FARCALL_ELASTIC` is 1, as in workers of `farcall
    launch --restart`, the environment's world size does not count. Under torchrun and `farcall
    launch` the agent hosts the store; else rank 0 does, and the store lives as long as the object
    returned there. May block the calling thread until the timeout; safe in any thread.

    Args:
        init_method: "env://" (with `MASTER_ADDR` and `MASTER_PORT`), "tcp://host:port" or
            "file:///path".
        rank: this worker's, or -1 when the URL or environment says it.
        world_size: number of workers; None, 0 or -1 when the URL or environment says it.
        timeout: seconds to wait for the store to appear; 0 for no limit.
        confined: host a store for this machine alone, and use none of another machine.

    Returns:
        The store, the rank (-1: to be assigned, in a group without a world size) and the world
        size (None: workers come and go).

    Raises:
        ValueError: a part is missing or makes no sense; the message says which.
        RendezvousTimeout: no store is at that address; the message says what else answers there.
        RendezvousError: the address can't be used, for instance because another program has it, or
            because it is another machine's and this worker is confined to its own.
    """
    url = urlsplit(init_method)
    if url.scheme not in ("env", "tcp", "file"):
        raise ValueError(
            f"init_method {init_method!r} is not understood: use env://, tcp://host:port or "
            "file:///path"
        )
    query = dict(parse_qsl(url.query))
    environment = _environment(url)
    rank = _place("rank", rank, query, environment)
    size = _place("world_size", -1 if world_size is None else world_size, query, environment)
    check_place(rank, size, init_method)
    if url.scheme == "file":
        store = _open_file(url, size, timeout)
    else:
        store = _open_tcp(*_master(url), rank, timeout, _use_libuv(query), confined)
    return store, rank, size if size > 0 else None


def check_place(rank: int, world_size: int, where: str) -> None:
    """Raise ValueError if this is no rank of a group of that size; 0 and -1 are any size."""
    if world_size > 0 and rank < 0:
        raise ValueError(
            f"{where} rendezvous: the rank is missing: pass rank= (RANK in the environment counts "
            "with init_method env:// only)"
        )
    if 0 < world_size <= rank:
        raise ValueError(
            f"rank {rank} is not below the world size {world_size}: ranks count from 0"
        )


def host_of(store: Store) -> str | None:
    """Return where a store is, if it is a TCPStore, by itself or below prefixes."""
    below = _below_prefixes(store)
    return below.host if isinstance(below, TCPStore) else None


def connect_to_store(
    host: str,
    port: int,
    timeout: float,
    *,
    hint: str = "",
    use_libuv: bool = True,
    confined: bool = False,
) -> TCPStore:
    """Return a client of the TCPStore at an address, which another process may have taken.

    Blocks the calling thread, a second longer than the timeout at most.

    Args:
        host, port: where the store is.
        timeout: seconds, for this and for each later wait of the client; 0 for no limit.
        hint: what an error says behind the reason.
        use_libuv: as torch's TCPStore takes it.
        confined: use no store of another machine.

    Raises:
        RendezvousTimeout: no store is at that address; the message says what else answers there.
        RendezvousError: something else has answered, or see `StoreSearch.resolve`.
    """
    search = StoreSearch(host, port, timeout, confined=confined)
    address = search.find(hint)
    late = search.late(hint, "what listens there has answered one question, and not the next")
    try:
        store = _tcp_store(address, port, search.remaining, use_libuv, late)
    except FarcallError:
        raise
    except RuntimeError as error:  # it ended just now
        raise search.late(hint) from error
    store.set_timeout(timedelta(seconds=timeout or _NO_LIMIT))
    return store


def host_store_at(listener: socket.socket) -> TCPStore:
    """Return a store that this process hosts, given a socket that listens, which becomes its own.

    Raises:
        RuntimeError: torch can't host it.
    """
    address, port = listener.getsockname()[:2]
    late = RendezvousTimeout(f"the store of this process, at {address}:{port}, does not answer")
    fd = listener.detach()
    return _tcp_store(address, port, _HOST_SECONDS, True, late, is_master=True, fd=fd)


def reopened(store: Store) -> Store:
    """Return a new client of the same store, with the same prefixes.

    Raises:
        OSError: no process hosts the store.
        RuntimeError: torch can't connect to it.
    """
    below = _below_prefixes(store)
    if isinstance(below, TCPStore):
        # First, since torch's client would try for its whole timeout, and print why.
        socket.create_connection((below.host, below.port), _PROBE_SECONDS).close()
    clone: Store = store.clone()  # type: ignore[attr-defined]
    return clone


def _below_prefixes(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def bounded(run: Callable[[], _Result], seconds: float, late: Exception) -> _Result:
    """Run an operation of a store, which may never return, and raise `late` if it takes longer.

    Raises:
        FarcallError: the system has no thread for it.
    """
    return in_a_thread(run, "farcall store", seconds, late, "an operation of torch's store")


def _environment(url: SplitResult) -> Mapping[str, str]:
    """Return the variables that say where this worker belongs."""
    if url.scheme != "env":
        return {}
    left_out = "WORLD_SIZE" if os.environ.get("FARCALL_ELASTIC") == "1" else ""
    return {name: text for name, text in os.environ.items() if name != left_out}


def _place(name: str, given: int, query: Mapping[str, str], environment: Mapping[str, str]) -> int:
    """Rank or world size: from the argument, the query or the environment; -1 for unknown."""
    if given > 0 or (given == 0 and name == "rank"):
        return given
    text = query.get(name) or environment.get(name.upper()) or "-1"
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, not {text!r}") from None


def _master(url: SplitResult) -> tuple[str, int]:
    """Host and port of the store."""
    if url.scheme == "env":
        host = os.environ.get("MASTER_ADDR", "")
        port_text = os.environ.get("MASTER_PORT", "")
        for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port_text)):
            if not value:
                raise ValueError(
                    f"env:// rendezvous: environment variable {name} is not set. Start the script "
                    "by `farcall launch` or torchrun, which set it, or pass another init_method: "
                    "tcp://host:port or file:///path"
                )
        where = "MASTER_PORT"
    else:
        host = url.hostname or ""
        port_text = url.netloc.rpartition("@")[2][len(_bracketed(host, url)) :].lstrip(":")
        where = f"the port of {url.geturl()}"
        if not host:
            raise ValueError(f"tcp:// rendezvous: {url.geturl()} has no host")
        if not port_text:
            raise ValueError(f"tcp:// rendezvous: {url.geturl()} has no port")
    if not port_text.isdecimal() or int(port_text) >= 2**16:
        raise ValueError(f"{where} must be a number from 0 to 65535, not {port_text!r}")
    return host, int(port_text)


def _bracketed(host: str, url: SplitResult) -> str:
    return f"[{host}]" if url.netloc.startswith("[") else host


def _use_libuv(query: Mapping[str, str]) -> bool:
    default = "0" if sys.platform == "win32" else "1"  # torch for Windows comes without libuv
    return query.get("use_libuv", os.environ.get("USE_LIBUV", default)) == "1"


def _open_tcp(
    host: str, port: int, rank: int, timeout: float, use_libuv: bool, confined: bool
) -> Store:
    hosted_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if rank == 0 and not hosted_by_agent:
        search = StoreSearch(host, port, timeout, confined=confined)
        return _host_store(host, port, search, use_libuv, confined)
    host_of_store = "torchrun or farcall launch" if hosted_by_agent else "rank 0"
    hint = f"; is {host_of_store} running, and is that its address?"
    store = connect_to_store(host, port, timeout, hint=hint, use_libuv=use_libuv, confined=confined)
    if hosted_by_agent:
        # The agent's store outlives its workers: without this, workers that torchrun restarts
        # would meet the records of the ones before.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"farcall_attempt_{attempt}", store)
    return store


def _host_store(
    host: str, port: int, search: StoreSearch, use_libuv: bool, confined: bool
) -> Store:
    addresses = search.resolve("; is it the name of rank 0's machine?")
    late = search.late("", "the store that this process hosts does not answer it")

    def host_it(at: str, port: int, fd: int | None = None) -> Store:
        return _tcp_store(at, port, search.remaining, use_libuv, late, is_master=True, fd=fd)

    try:
        if not confined:
            return host_it(LOOPBACK[0], port)
        try:
            listener = listen_on_loopback(addresses, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Perhaps a store of this process has it, such as that of `init_process_group`: torch
            # shares its own stores within a process, and fails if it is another's.
            return host_it(LOOPBACK[0], port)
        own, port = listener.getsockname()[:2]
        return host_it(own, port, listener.detach())
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise RendezvousError(f"rank 0 can't host a store at {host}:{port}: {reason}") from error


def _tcp_store(
    host: str,
    port: int,
    seconds: float,
    use_libuv: bool,
    late: Exception,
    *,
    is_master: bool = False,
    fd: int | None = None,
) -> TCPStore:
    """Return a client of a store, the only way to make one here.

    torch's client asks its store whether it is there, and waits for the answer without end.

    Args:
        late: raised when the client is not made in so many seconds, or one if those are less.
        is_master: host the store in this process, too; `fd`: with a socket that listens.
    """
    seconds = max(1.0, min(seconds, _NO_LIMIT))

    def make() -> TCPStore:
        return TCPStore(
            host,
            port,
            None,
            is_master,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=fd,
            use_libuv=use_libuv,
        )

    return bounded(make, seconds, late)


def _open_file(url: SplitResult, world_size: int, timeout: float) -> Store:
    path = _path_of(url)
    if not path:
        raise ValueError("file:// rendezvous: the path is missing: use file:///path")
    problem = _problem_of_file(os.path.abspath(path))
    if problem is not None:
        raise RendezvousError(f"file:// rendezvous: {problem}")
    try:
        store = FileStore(path, world_size)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RendezvousError(f"file:// rendezvous: can't use {path}: {reason}") from error
    store.set_timeout(timedelta(seconds=timeout or _NO_LIMIT))
    return store


def _path_of(url: SplitResult) -> str:
    """Return the path as it is written, or, if only that leads to a folder, without escapes.

    Torch takes `%20` as it is written; `Path.as_uri` writes it for a space.
    """
    written = url.netloc + url.path
    meant = os.fsdecode(unquote_to_bytes(written))
    return meant if not _has_folder(written) and _has_folder(meant) else written


def _has_folder(path: str) -> bool:
    return os.path.isdir(os.path.dirname(os.path.abspath(path)))


def _problem_of_file(path: str) -> str | None:
    """Return the fault of a FileStore's path, which would try to open it until its timeout."""
    directory = os.path.dirname(path)
    if not os.path.exists(directory):
        return f"can't create {path}: the directory {directory} does not exist"
    if not os.path.isdir(directory):
        return f"can't create {path}: {directory} is not a directory"
    if os.path.isdir(path):
        return f"{path} is a directory: name a file, for instance {os.path.join(path, 'workers')}"
    if not os.path.exists(path):
        if os.access(directory, os.W_OK | os.X_OK):
            return None
        return f"can't create {path}: no permission to write to the directory {directory}"
    if not os.path.isfile(path):
        return f"{path} is not a regular file"
    if not os.access(path, os.R_OK | os.W_OK):
        return f"no permission to read and write {path}"
    return None
