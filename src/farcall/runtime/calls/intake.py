"""The calls queued here, by caller; beyond the bounds a caller's link is not read.

The rules are `farcall.protocol.admission`'s. A function that runs at once is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from farcall.runtime.calls.outboxes import size_of
from farcall.runtime.membership.peers import IncomingCall, Peer
from farcall.transport.base import Link


def queue(call: IncomingCall) -> None:
    """Count a request that can't run yet."""
    peer = call.peer
    call.queued = size_of(call.frame)
    with peer.lock:
        peer.admission.queue(call.queued)
        has_changed = not peer.admission.reads
    if has_changed:
        _follow(peer, call.link)


def holds(call: IncomingCall) -> bool:
    """Return whether the function of a call has to wait until its caller has read more answers.

    Then it is queued until `Answers` lets it begin again.
    """
    peer = call.peer
    call.queued = size_of(call.frame)
    with peer.lock:
        if peer.admission.begin(call):
            return False
        peer.admission.queue(call.queued)
        has_changed = not peer.admission.reads
    if has_changed:
        _follow(peer, call.link)
    return True


def begin(call: IncomingCall) -> None:
    """Note that a request that was counted is about to run."""
    peer = call.peer
    with peer.lock:
        was_paused = not peer.admission.reads
        peer.admission.begun(call.queued)
        has_changed = was_paused and peer.admission.reads
    if has_changed:
        _follow(peer, call.link)


def let_in(peers: Iterable[Peer]) -> None:
    """Read on: there are no threads for queued calls, and those may wait for unread frames."""
    for peer in peers:
        link = peer.back_link
        if link is not None and not peer.admission.reads:
            with peer.lock:
                peer.admission.stuck()
            _follow(peer, link)


def _follow(peer: Peer, link: Link) -> None:
    """Have a link read, or not. Of several threads the last one sets the last decision."""
    with peer.reading:
        link.set_reading(peer.admission.reads)
