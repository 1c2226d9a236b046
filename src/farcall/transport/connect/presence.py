"""Does a worker still listen where it used to? A worker that wants to take its name over asks.

That something listens at an address proves nothing: the system gives the port of a process that
has ended to the next one that asks, and a connection to a free port of this host may even reach
itself. So whoever answers says, in the first message of a handshake, which incarnation it is.
"""

from __future__ import annotations

import threading
import time

from farcall.errors import AuthenticationFailed, BadFrame, LinkError
from farcall.ids import Worker, original
from farcall.transport.base import NotSent
from farcall.transport.connect import handshake
from farcall.transport.connect.addresses import UNIX
from farcall.transport.connect.credentials import LinkCredentials
from farcall.transport.connect.dialling import Dialled, Dialler
from farcall.transport.connect.handshake_messages import Ended, Identity, NotHere
from farcall.transport.connect.listening import Listening

PROBE_SECONDS = 2.0  # for an answer; one that listens and says nothing in that time is busy


def is_gone(
    worker: Worker,
    me: Identity,
    listening: Listening,
    credentials: LinkCredentials,
    closing: threading.Event,
    deadline: float,
) -> bool:
    """Return whether that incarnation is at none of its addresses any more.

    It is gone if each of them refuses, or somebody else answers there, or if for
    `Listening.dead_host_timeout` seconds no address has given a connection. When in doubt it is
    there: so is one that is stopped, or that refuses us. Blocks the calling thread.

    Args:
        worker: the one that is looked for.
        me: the asking worker.
        listening: which ways may be taken.
        credentials: what this worker proves itself with.
        closing: ends the search.
        deadline: on `time.monotonic()`, in seconds; ends the search, too.
    """
    if not all(url.startswith((UNIX, "tcp:")) for url in worker.addresses):
        return False  # it can be reached in ways that are unknown here
    dialler: Dialler[None] = Dialler(worker, me, listening, closing)
    if not dialler.has_addresses:
        return False

    def ask(dialled: Dialled) -> None:
        until = min(dialled.until, time.monotonic() + PROBE_SECONDS)
        with dialled.sock:
            try:
                _ask(worker, me, credentials, dialled, until)
            except (NotHere, BadFrame, Ended):
                raise
            except LinkError:
                return  # it refuses us, or is busy: it is there

    try:
        dialler.reach(deadline, ask)
    except NotSent:
        return False
    except LinkError:
        return not closing.is_set()
    return False


def answers(
    worker: Worker,
    me: Identity,
    listening: Listening,
    credentials: LinkCredentials,
    closing: threading.Event,
    deadline: float,
) -> bool:
    """Return whether that incarnation says by the deadline that it is there, or refuses us.

    True if it can be reached only in ways that are unknown here, or its addresses are unknown.
    Blocks the calling thread. Arguments as for `is_gone`.
    """
    if not all(url.startswith((UNIX, "tcp:")) for url in worker.addresses):
        return True
    dialler: Dialler[None] = Dialler(worker, me, listening, closing)
    if not dialler.has_addresses:
        return True

    def ask(dialled: Dialled) -> None:
        with dialled.sock:
            _ask(worker, me, credentials, dialled, dialled.until)

    try:
        dialler.reach(deadline, ask)
    except NotSent:
        return False
    except (AuthenticationFailed, BadFrame):
        return True  # something answers, and no process of ours can tell what
    except LinkError:
        return False
    return True


def _ask(
    worker: Worker, me: Identity, credentials: LinkCredentials, dialled: Dialled, until: float
) -> None:
    handshake.ask(
        dialled.sock,
        me,
        credentials.over(dialled.sock),
        expects=original(worker.incarnation),
        deadline=until,
        expects_name=worker.name,
        expects_address=dialled.url,
    )
