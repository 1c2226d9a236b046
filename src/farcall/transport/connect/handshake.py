"""The first messages on a connection: who is there, and does it know the secret?

Runs over a connected stream socket before the first frame, so that nothing a stranger sends is
ever unpickled. It knows sockets and msgpack, no frames, no worker state. The connector leads:

    connector                        acceptor
    Hello                      ->    checks version, secret or none, incarnation, name
                               <-    Hello
    Proof("connector")         ->    checks the proof, then asks `admit`
                               <-    Proof("acceptor")
    Ready                      ->

Both hellos say which meeting of the two this is for their sender (see `farcall.ids`); the later one
counts. The side that is behind has been given up by the other; it gives that up, too, and goes on.

Ready says that the connector has not given up meanwhile, nor will because it is late: the end of a
link is the death of a peer, the end of a handshake is not. Without a secret on both sides there are
no proofs, and `admit` is asked before the acceptor's Hello. At every step a side may answer Refuse,
whose reason the other side raises.

A proof is HMAC-SHA256(secret, role | both hellos as they went over the wire). Each hello has a
fresh nonce, so an old proof is worth nothing; the roles differ, so a proof sent back to its maker
is worth nothing; names and incarnations are inside, so they can't be changed on the way. The
construction is ISO/IEC 9798-4's mutual authentication by challenge and response. What follows the
handshake is neither encrypted nor signed: against someone who can alter traffic, use TLS or a VPN.

The place for TLS is here: `connect` and `accept` are the first to see a socket, so that is where an
`ssl.SSLContext` will wrap it (server side in `accept`); the handshake then runs inside, unchanged.

Nothing is read beyond the last message, so the socket can be handed to frame code as it is. What
goes over the wire is in `handshake_messages.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec

from farcall.errors import AuthenticationFailed, BadFrame, LinkError
from farcall.transport.base import Meeting
from farcall.transport.connect.handshake_messages import (
    ERRORS,
    LENGTH,
    NONCE_LENGTH,
    PROTOCOL,
    VERSION,
    Channel,
    Ended,
    Hello,
    Identity,
    NotHere,
    Proof,
    Ready,
    Refuse,
    Unfinished,
    printable,
)
from farcall.transport.connect.listening import first_meeting

__all__ = ["Ended", "Identity", "Unfinished", "accept", "ask", "connect"]

PARTING_SECONDS = 1.0  # what a peer that is refused has to read why

_CHECK_SECRET = "check FARCALL_SECRET on both workers"


class _Refusal(Exception):
    """What this side says to the peer (`told`) and to its own caller (`message`), then gives up."""

    def __init__(self, error: type[LinkError], message: str, told: str) -> None:
        super().__init__(message)
        self.error = error
        self.message = message
        self.told = told


def connect(
    sock: socket.socket,
    me: Identity,
    secret: bytes | None,
    *,
    expects: int,
    deadline: float,
    expects_name: str = "",
) -> Identity:
    """Introduce this worker over a socket that it connected, and learn who answers.

    The socket is left open and with its timeout unchanged; on an error the caller closes it.
    Blocks the calling thread; safe in any thread, one handshake per socket.

    Args:
        sock: a connected stream socket that nobody else reads or writes meanwhile.
        me: this worker, and which meeting with the peer it is ready for.
        secret: the shared secret, or None when there is none.
        expects: incarnation that must answer; 0 for anyone.
        deadline: on `time.monotonic()`, in seconds; bounds the whole handshake.
        expects_name: name of the worker that must answer; "" for anyone.

    Raises:
        AuthenticationFailed: the secrets differ, or only one side has one.
        BadFrame: whatever answers is not farcall.
        LinkError: another incarnation, name or version; or refused.
        Unfinished: closed, or out of time: the peer may be alive.
    """
    return _guarded(sock, deadline, lambda link: _connect(link, me, secret, expects, expects_name))


def ask(
    sock: socket.socket, me: Identity, secret: bytes | None, *, expects: int, deadline: float
) -> None:
    """Return if a worker says at the other end of a socket that it is that incarnation.

    It need not prove it: nothing else is said, and no link comes of it. Otherwise like `connect`.

    Raises:
        NotHere: it is another one.
        AuthenticationFailed, BadFrame, LinkError, Unfinished: as from `connect`.
    """
    _guarded(sock, deadline, lambda channel: _greet(channel, me, secret, expects, "")[0].identity)


def accept(
    sock: socket.socket,
    me: Identity,
    secret: bytes | None,
    *,
    deadline: float,
    admit: Callable[[Identity], str | None],
    meeting: Meeting = first_meeting,
    seconds_when_admitted: float = 0.0,
) -> Identity:
    """Learn who connected, make it prove that it knows the secret, and introduce this worker.

    The socket is left open and with its timeout unchanged; on an error the caller closes it.
    Blocks the calling thread; safe in any thread, one handshake per socket.

    Args:
        sock: an accepted stream socket that nobody else reads or writes meanwhile.
        me: this worker.
        secret: the shared secret, or None when there is none.
        deadline: on `time.monotonic()`, in seconds; bounds the whole handshake.
        admit: called once with the peer (after it has proven itself, when there is a secret);
            returns why it is refused, or None to let it in.
        meeting: which meeting with the peer this worker is ready for.
        seconds_when_admitted: how long a peer that was let in has for its last message, if that is
            later than the deadline. It may be on a busy machine, and a connection that is closed
            behind its last message would look like our death.

    Raises:
        AuthenticationFailed: the secrets differ, or only one side has one.
        BadFrame: whatever connected is not farcall.
        LinkError: it wants another incarnation, name or version; or not admitted.
        Unfinished: closed, or out of time.
    """
    return _guarded(
        sock,
        deadline,
        lambda link: _accept(link, me, secret, admit, meeting, seconds_when_admitted),
    )


def _guarded(sock: socket.socket, deadline: float, run: Callable[[Channel], Identity]) -> Identity:
    """Run one side; tell the peer why it is refused; turn socket errors into LinkError."""
    before = sock.gettimeout()
    channel = Channel(sock, deadline)
    try:
        try:
            return run(channel)
        except _Refusal as refusal:
            [code] = [code for code, error in ERRORS.items() if error is refusal.error]
            _tell(channel, Refuse(refusal.told[:1000], code))
            channel.part(PARTING_SECONDS)
            raise refusal.error(refusal.message) from None
    except LinkError:
        raise
    except TimeoutError as error:
        raise Unfinished("the handshake was not finished in time: the peer is silent") from error
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Ended(f"the connection failed during the handshake: {error}") from error
    except OSError as error:
        raise Unfinished(f"the connection failed during the handshake: {error}") from error
    finally:
        sock.settimeout(before)


def _tell(channel: Channel, refuse: Refuse) -> None:
    try:
        channel.send(refuse)
    except OSError:
        return  # the peer has gone already; our own caller still gets the reason


def _greet(
    channel: Channel, me: Identity, secret: bytes | None, expects: int, expects_name: str
) -> tuple[Hello, bytes, bytes]:
    """The acceptor's hello, and both hellos as they went over the wire, the connector's first."""
    mine = channel.send(_hello(me, secret, expects, expects_name))
    hello, theirs = channel.receive()
    if not isinstance(hello, Hello):
        raise BadFrame("the peer did not begin with a hello")
    _check_common(hello, secret)
    _check_expected(hello.identity, expects, expects_name)
    return hello, mine, theirs


def _connect(
    channel: Channel, me: Identity, secret: bytes | None, expects: int, expects_name: str
) -> Identity:
    hello, mine, theirs = _greet(channel, me, secret, expects, expects_name)
    if secret is not None:
        channel.send(Proof(_digest(secret, "connector", mine, theirs)))
        _check_proof(channel, hello.identity, _digest(secret, "acceptor", mine, theirs))
    channel.send(Ready())
    return _agreed(hello, me)


def _accept(
    channel: Channel,
    me: Identity,
    secret: bytes | None,
    admit: Callable[[Identity], str | None],
    meeting: Meeting,
    seconds_when_admitted: float,
) -> Identity:
    hello, theirs = channel.receive()
    if not isinstance(hello, Hello):
        raise BadFrame("the peer did not begin with a hello")
    # The acceptor finds every disagreement that an honest connector would find, and finds it
    # first: a connector without a secret has no later message in which to be refused.
    _check_common(hello, secret)
    _check_expected(me, hello.expects, hello.expects_name)
    me = msgspec.structs.replace(me, meeting=meeting(hello.incarnation))
    peer = _agreed(hello, me)
    answer = _hello(me, secret, 0, "")
    if secret is None:
        _check_admitted(peer, admit)
        channel.send(answer)
    else:
        mine = channel.send(answer)
        _check_proof(channel, hello.identity, _digest(secret, "connector", theirs, mine))
        _check_admitted(peer, admit)
        channel.send(Proof(_digest(secret, "acceptor", theirs, mine)))
    channel.extend(time.monotonic() + seconds_when_admitted)
    ready, _ = channel.receive()
    if not isinstance(ready, Ready):
        raise BadFrame("the peer did not end the handshake")
    return peer


def _agreed(hello: Hello, me: Identity) -> Identity:
    """Return who the peer is, with the meeting for which both sides are ready, or will be."""
    return msgspec.structs.replace(hello.identity, meeting=max(hello.meeting, me.meeting))


def _hello(me: Identity, secret: bytes | None, expects: int, expects_name: str) -> Hello:
    return Hello(
        protocol=PROTOCOL,
        version=VERSION,
        name=me.name,
        id=me.id,
        incarnation=me.incarnation,
        expects=expects,
        expects_name=expects_name,
        host=me.host,
        main=me.main,
        nonce=secrets.token_bytes(NONCE_LENGTH),
        secured=secret is not None,
        shm=me.shm,
        zero_copy=me.zero_copy,
        streams=me.streams,
        link=me.link,
        joins=me.joins,
        versions=me.versions,
        addresses=me.addresses,
        meeting=me.meeting,
        strict=me.strict,
    )


def _check_common(hello: Hello, secret: bytes | None) -> None:
    if hello.protocol != PROTOCOL:
        raise BadFrame(f"the peer speaks {printable(hello.protocol)!r}, not {PROTOCOL!r}")
    if hello.version != VERSION:
        _refuse(f"the workers speak versions {hello.version} and {VERSION} of the handshake")
    if hello.secured == (secret is not None):
        return
    name = printable(hello.name)
    if secret is None:
        message = f"worker {name!r} has a secret and this worker has none: {_CHECK_SECRET}"
        told = f"the other worker has no secret and yours has one: {_CHECK_SECRET}"
    else:
        message = f"worker {name!r} has no secret and this worker has one: {_CHECK_SECRET}"
        told = f"the other worker has a secret and yours has none: {_CHECK_SECRET}"
    raise _Refusal(AuthenticationFailed, message, told)


def _check_expected(actual: Identity, expects: int, expects_name: str) -> None:
    """Is this the worker that the connector wants?"""
    name = printable(actual.name)
    if expects_name not in ("", actual.name):
        _refuse(f"worker {name!r} is at this address, not {printable(expects_name)!r}", NotHere)
    if expects not in (0, actual.incarnation):
        _refuse(f"worker {name!r} at this address is another incarnation: it restarted", NotHere)


def _check_admitted(peer: Identity, admit: Callable[[Identity], str | None]) -> None:
    reason = admit(peer)
    if reason is not None:
        raise _Refusal(LinkError, f"refused worker {printable(peer.name)!r}: {reason}", reason)


def _check_proof(channel: Channel, peer: Identity, expected: bytes) -> None:
    proof, _ = channel.receive()
    if not isinstance(proof, Proof):
        raise BadFrame("the peer did not send its proof")
    if not hmac.compare_digest(proof.digest, expected):
        name = printable(peer.name)
        raise _Refusal(
            AuthenticationFailed,
            f"worker {name!r} could not prove that it knows our secret: {_CHECK_SECRET}",
            f"your worker could not prove that it knows the secret: {_CHECK_SECRET}",
        )


def _digest(secret: bytes, role: str, connector: bytes, acceptor: bytes) -> bytes:
    parts = (f"{PROTOCOL} {VERSION} {role}".encode(), connector, acceptor)
    # Every part with its length: no two different transcripts give the same bytes.
    transcript = b"".join(LENGTH.pack(len(part)) + part for part in parts)
    return hmac.new(secret, transcript, hashlib.sha256).digest()


def _refuse(reason: str, error: type[LinkError] = LinkError) -> NoReturn:
    raise _Refusal(error, reason, reason)
