"""A worker's listening for others, and its ways to them: the same for every transport."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from farcall.transport.base import Admit, Meeting
from farcall.transport.connect.addresses import PATHS
from farcall.transport.connect.credentials import LinkCredentials, shown_as_it_is
from farcall.transport.connect.dark_hosts import DEFAULT_SECONDS
from farcall.transport.connect.handshake_messages import Identity
from farcall.transport.connect.keys import Keys
from farcall.transport.connect.tls_config import TlsConfig

DEFAULT_SHARED_MEMORY = 4 << 30  # bytes
Answer = Callable[[socket.socket, Keys | None], None]


def admit_all(name: str, incarnation: int, meeting: int) -> None:
    """Refuse no peer."""


def vouch_for_all(identity: Identity) -> None:
    """Ask no peer for a sign of the group."""


def first_meeting(incarnation: int) -> int:
    """Return the number of the first meeting: no peer is lost."""
    return 0


def answer_nothing(sock: socket.socket, keys: Keys | None) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The addresses to listen on, the workers to let in, and the ways to others to take.

    Attributes:
        listen: (host, port) to listen on with TCP; port 0 takes a free one.
        advertise: host names or addresses under which others reach us.
        secret: what links are authenticated with; None for none.
        tls: certificates for links over TCP; None: they are made of the secret, if there is one.
        encrypt: encrypt what goes over TCP, where there is a secret or are certificates; otherwise
            it is only authenticated.
        admit: asked about everyone who dials in, see `base.Admit`.
        vouch: asked before that whether who dials in shows that it belongs to the group: why it is
            refused, or None. It does not wait.
        shown: gives what to say of ourselves to those that we dial, with what shows `vouch` there
            that we belong to the group: for each dial, as certificates are renewed. It does not
            wait.
        meeting: which meeting with a worker it is, see `base.Meeting`.
        answer: answers a process that asks about this worker, on a connection that is closed
            afterwards; in a thread that may wait for some seconds. It may raise an OSError.
        paths: which ways to other workers may be used, of "shm", "unix" and "tcp". TCP is always
            listened on. With "shm", a Unix socket is there to set it up, and used if that fails.
        streams: how many TCP connections a link may use for large buffers, 1 to 16, if the peer
            can use as many and the transport can use several; None: 4, but links that we dial to
            workers of this host have one.
        dead_host_timeout: seconds after which a host that does not answer counts as dead; 0: as
            long as the system waits.
        shared_memory: how many bytes of it the endpoint may create, for all its links together. A
            link for which there is no more goes over the Unix socket.
        confined: dial Unix sockets and loopback only.
        move_threads: a caller that waits may move to another core (`native` only, `spin.hpp`).
        keep_awake: a thread that waits may keep its core awake (`native` only,
            `busy_wait_budget.hpp`).
    """

    listen: tuple[str, int] = ("127.0.0.1", 0)
    advertise: Sequence[str] = ()
    secret: bytes | None = field(default=None, repr=False)
    tls: TlsConfig | None = None
    encrypt: bool = True
    admit: Admit = admit_all
    vouch: Callable[[Identity], str | None] = vouch_for_all
    shown: Callable[[Identity], Identity] = shown_as_it_is
    meeting: Meeting = first_meeting
    answer: Answer = answer_nothing
    paths: Collection[str] = PATHS
    streams: int | None = None
    dead_host_timeout: float = DEFAULT_SECONDS
    shared_memory: int = DEFAULT_SHARED_MEMORY
    confined: bool = False
    move_threads: bool = False
    keep_awake: bool = True

    @property
    def uses_unix(self) -> bool:
        """Return whether to listen on a Unix socket, and to dial those of others.

        "shm" is as good as "unix", as shared memory is handed over on a Unix socket.
        """
        return "unix" in self.paths or "shm" in self.paths

    @property
    def protection(self) -> str:
        """The protection of frames over TCP: see `base.Means`."""
        if self.secret is None and self.tls is None:
            return "none"
        return "encrypted" if self.encrypt else "authenticated"

    def credentials(self) -> LinkCredentials:
        """Return what links are authenticated with.

        Raises:
            ValueError: the certificates can't be used.
        """
        expects_tcp = not (self.confined and self.uses_unix)
        return LinkCredentials(
            self.secret,
            self.tls,
            encrypts=self.encrypt,
            shown=self.shown,
            at_once=expects_tcp,
        )
