"""The transport of a worker: the first one that the options name and this machine has."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.distributed import Store  # type: ignore[attr-defined]  # as in stores.py

from farcall.log import get_logger
from farcall.runtime.options.credential import Credential
from farcall.transport.base import Admit, Endpoint, Meeting
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.listening import Answer, Listening
from farcall.transport.sockets.endpoint import SocketEndpoint

logger = get_logger("farcall")

NATIVE = "farcall.transport.native.endpoint"
SOCKET_PATHS = ("unix", "tcp")

# Where it was compiled. Not at the first start: workers that are forked would do it one by one.
with contextlib.suppress(ImportError):
    importlib.import_module(NATIVE)


class ListeningEndpoint(Endpoint, Protocol):
    """An endpoint that is reached over a network."""

    me: Identity
    """The worker's own statement in handshakes that begin from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPlace:
    """The place where a worker is about to start, as far as opening its endpoint may need it.

    Attributes:
        me: what to say of ourselves. The id is -1 if the group has yet to assign it.
        admit, vouch, shown, meeting, answer: for the endpoint, see `Listening`.
        credential: what to prove ourselves with, and with whom we may talk.
        listen: host and port (0: any free one) to listen on, checked to be safe.
        advertise: host names or addresses under which others reach us, best first.
        store: for the endpoint's own use: keys in it clash with no other's.
        world_size: number of workers; None: they come and go.
        timeout: seconds to wait for others; 0 for no limit.
    """

    me: Identity
    admit: Admit
    vouch: Callable[[Identity], str | None]
    shown: Callable[[Identity], Identity]
    meeting: Meeting
    answer: Answer
    credential: Credential
    listen: tuple[str, int]
    advertise: tuple[str, ...]
    store: Store
    world_size: int | None
    timeout: float


_Opener = Callable[[Identity, Listening], ListeningEndpoint]


class _Missing(Exception):
    """This machine, or these options, can't have that transport. The message says why."""

    def __init__(self, reason: str, cure: str = "") -> None:
        super().__init__(reason)
        self.cure = cure  # what to do about it


def open_endpoint(
    transports: Sequence[str], me: Identity, listening: Listening
) -> ListeningEndpoint:
    """Listen, on the best transport that can be had.

    Logs once per process that the native transport was wanted and another one is used: a warning
    on Linux, where it belongs to farcall.

    Args:
        transports: their names, best first; see `RpcBackendOptions`.
        me: what to say of ourselves in handshakes.
        listening: where to listen, and how to reach others.

    Raises:
        LinkError: the address can't be listened on.
        ValueError: none of these transports can be had; the message says why.
    """
    missing: dict[str, _Missing] = {}
    for name in transports:
        try:
            opener = _FINDERS[name](listening)
        except _Missing as error:
            missing[name] = error
            continue
        if "native" in missing:
            _say_that_calls_are_slower(str(missing["native"]), missing["native"].cure)
        return opener(me, listening)
    reasons = "; ".join(f"{name!r}: {reason}" for name, reason in missing.items())
    raise ValueError(f"none of the transports that were asked for can be had here: {reasons}")


def _find_native(listening: Listening) -> _Opener:
    try:
        native = importlib.import_module(NATIVE)
    except ImportError as error:
        cure = "install farcall where there is a C++20 compiler"
        raise _Missing(str(error), cure) from error
    # Only with a credential do links over TCP have keys.
    if (listening.secret or listening.tls) and not native.has_crypto():
        raise _Missing(
            "it found no libcrypto.so of OpenSSL, which its links over TCP are encrypted with",
            "install OpenSSL's libcrypto (libssl3 on Debian and Ubuntu)",
        )
    opener: _Opener = native.NativeEndpoint
    return opener


def _find_socket(listening: Listening) -> _Opener:
    paths = tuple(listening.paths)
    if not set(paths) & set(SOCKET_PATHS):
        raise _Missing(f"it has no way to other workers with paths={paths}: add 'tcp'")
    return SocketEndpoint


_FINDERS: dict[str, Callable[[Listening], _Opener]] = {
    "native": _find_native,
    "socket": _find_socket,
}


@functools.cache  # once per process
def _say_that_calls_are_slower(reason: str, cure: str) -> None:
    logger.log(
        logging.WARNING if sys.platform == "linux" else logging.INFO,
        "farcall runs without its native transport: %s, calls are slower; %s, or set "
        "FARCALL_TRANSPORTS=socket to say that this is meant",
        reason,
        cure,
    )
