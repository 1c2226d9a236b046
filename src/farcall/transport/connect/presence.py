"""A check whether a worker still listens where it used to, for a newcomer that wants its name.

That something listens at an address proves nothing: the system gives the port of a process that
has ended to the next one that asks, and a connection to a free port of this host may even reach
itself. So the process that answers says, in the first message of a handshake, which incarnation it
is, and proves that it has the group's credential.
"""

from __future__ import annotations

import sys
import threading
import time

import msgspec

from farcall.errors import AuthenticationFailed, BadFrame, LinkError
from farcall.ids import Worker, original
from farcall.transport.base import NotSent
from farcall.transport.connect.addresses import UNIX
from farcall.transport.connect.conversation import (
    Conversation,
    HandshakeChannel,
    Refusal,
    Script,
    drive,
)
from farcall.transport.connect.credentials import LinkCredentials, Terms
from farcall.transport.connect.dialling import Dialled, Dialler
from farcall.transport.connect.handshake import Wanted, check_presence, greet
from farcall.transport.connect.handshake_messages import Ended, Identity, NotHere, Unwanted
from farcall.transport.connect.listening import Listening
from farcall.transport.connect.tls import TlsStream, has_shown_an_expired_one

_NETWORK = "/net:["  # in the name of a host that tells its networks apart, see `hosts.host_id`
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

    It is gone if each of them refuses, or another process answers there, or if for
    `Listening.dead_host_timeout` seconds no address has given a connection. A process that can't
    show our group's credential is another one. When in doubt the worker is there: so is one that
    is stopped, or that refuses us where there is no credential. Blocks the calling thread.

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
    worker = _at_what_proves_most(worker, me, listening)
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


def _at_what_proves_most(worker: Worker, me: Identity, listening: Listening) -> Worker:
    """Return the worker with its Unix names alone, if it runs where we can reach these.

    A Unix name ends with the worker's process, and the kernel says which process listens on it. A
    port says nothing of the process that listens there in silence.
    """
    names = tuple(url for url in worker.addresses if url.startswith(UNIX))
    is_near = worker.host == me.host and _NETWORK in worker.host
    if not (names and is_near and listening.uses_unix and sys.platform == "linux"):
        return worker
    return msgspec.structs.replace(worker, addresses=names)


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
    except (AuthenticationFailed, BadFrame, Unwanted):
        return True  # something answers, and no process of ours can tell what
    except LinkError:
        return False
    return True


def _ask(
    worker: Worker, me: Identity, credentials: LinkCredentials, dialled: Dialled, until: float
) -> None:
    """Return if a worker says at the other end of a connection that it is that incarnation.

    It proves that it has our credential, by TLS or behind its hello. No link comes of it.

    Raises:
        NotHere: it is another one, or, where we have a credential, none that has it.
        Unwanted: it has shown a credential, and refuses us; or no worker would take ours now.
        AuthenticationFailed, BadFrame, LinkError, Unfinished: as from `handshake.connect`.
    """
    terms = credentials.over(dialled.sock)
    try:
        shown = terms.shown(me)
    except AuthenticationFailed as error:
        raise Unwanted(str(error)) from error
    terms = terms._replace(shown=lambda _: shown)
    probes = terms.secret is not None and terms.certificates is None
    wanted = Wanted(original(worker.incarnation), worker.name, dialled.url, probes)
    drive(dialled.sock, Conversation(lambda channel: _learn(channel, me, terms, wanted)), until)


def _learn(channel: HandshakeChannel, me: Identity, terms: Terms, wanted: Wanted) -> Script[None]:
    try:
        greeting = yield from greet(channel, me, terms, wanted)
        if terms.secret is not None and wanted.probes:
            yield from check_presence(channel, terms.secret, greeting)
        return
    except Refusal as refusal:  # by which we refuse it
        if refusal.error is not AuthenticationFailed:
            raise
        reason = AuthenticationFailed(refusal.message)
    except AuthenticationFailed as error:
        if isinstance(channel.stream, TlsStream) or has_shown_an_expired_one(error):
            raise Unwanted(str(error)) from error
        reason = error
    if terms.secret is None and terms.certificates is None:
        raise reason
    raise NotHere(f"the process that answers there is none of this group: {reason}")
