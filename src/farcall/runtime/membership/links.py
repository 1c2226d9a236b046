"""The links by which an agent's calls go out."""

from __future__ import annotations

from farcall.runtime.membership.directory import Directory
from farcall.runtime.membership.peers import Peer
from farcall.transport.base import Endpoint, Link
from farcall.transport.loopback import LoopbackLink


class Links:
    """Finds and makes the links of one agent. Thread-safe.

    Args:
        endpoint: has the links to other workers.
        loopback: the link to the agent's own worker.
        directory: learns where a worker listens.
    """

    def __init__(self, endpoint: Endpoint, loopback: LoopbackLink, directory: Directory) -> None:
        self._endpoint = endpoint
        self.loopback = loopback
        self._directory = directory
        self._me = loopback.peer

    def linked(self, peer: Peer) -> Link | None:
        """Return the link for calls to a peer, if there is one already. Never waits."""
        return self.loopback if peer.worker is self._me else self._endpoint.linked(peer.worker)

    def connect(self, peer: Peer, deadline: float) -> Link:
        """Return the link for calls to a peer, dialled on first use; may be the loopback.

        Args:
            deadline: `time.monotonic()` seconds.

        Raises:
            LinkError: it can't be reached.
            TimeoutError: it does not answer by the deadline.
        """
        if peer.worker is self._me:
            return self.loopback
        if not peer.worker.addresses:
            # It joined later and dialled us first: where it listens the rendezvous knows.
            self._directory.find(peer.name, deadline)
        link = self._endpoint.connect(peer.worker, deadline)
        peer.linked = True
        return link
