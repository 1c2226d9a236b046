"""The first messages on a connection: the identity of each side, and proofs of the secret.

Runs over a connected stream before the first frame, so that nothing a stranger sends is ever
unpickled. It knows no sockets, no frames, no worker state: each side is a script of
`conversation.py`. The connector leads:

    connector                        acceptor
    (a knock, over TCP, if there is a secret)
    (TLS 1.3, mutual, over TCP, if there are credentials: all that follows is inside)
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
construction is ISO/IEC 9798-4's mutual authentication by challenge and response.

Inside TLS each hello has half of what the keys of the records behind it are made of: see `keys.py`.
Without it, what follows the handshake is neither encrypted nor authenticated.

Nothing is read beyond the last message, so the socket can be handed to frame code as it is. The
messages are in `handshake_messages.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import msgspec

from farcall.errors import AuthenticationFailed, BadFrame, LinkError
from farcall.transport.base import Meeting
from farcall.transport.connect.conversation import (
    Conversation,
    HandshakeChannel,
    Refusal,
    Script,
    Stage,
    drive,
    stranger,
)
from farcall.transport.connect.credentials import CHECK_SECRET, Terms
from farcall.transport.connect.handshake_messages import (
    LENGTH,
    NONCE_LENGTH,
    PROOF_SIZE,
    PROTOCOL,
    READY_SIZE,
    VERSION,
    DiallerReady,
    Hello,
    Identity,
    NotHere,
    Proof,
    Unwanted,
    printable,
)
from farcall.transport.connect.keys import KEY_LENGTH, Keys, keys_of
from farcall.transport.connect.knock import LENGTH as LENGTH_OF_KNOCK
from farcall.transport.connect.knock import is_knock, is_right, knock
from farcall.transport.connect.listening import first_meeting
from farcall.transport.connect.tls import BEGINNING, NotTls, TlsStream, is_tls

PRESENCE = "presence"  # what the proof of an acceptor is for that is only asked whether it is there
_CHECK_TLS = "set FARCALL_SECRET, or FARCALL_TLS_CERT, _KEY and _CA, on both workers"


class HandshakeResult(NamedTuple):
    """The result of a handshake.

    Attributes:
        peer: what it said of itself, proven if there is a secret.
        keys: of the records that follow; None: frames follow as they are.
    """

    peer: Identity
    keys: Keys | None


class Wanted(NamedTuple):
    """The worker that a connector means; see `connect`. `probes`: it is to prove itself at once."""

    incarnation: int = 0
    name: str = ""
    address: str = ""
    probes: bool = False


def connect(
    sock: socket.socket,
    me: Identity,
    terms: Terms,
    *,
    expects: int,
    deadline: float,
    expects_name: str = "",
    expects_address: str = "",
) -> HandshakeResult:
    """Introduce this worker over a socket that it connected, and learn who answers.

    The socket is left open and with its timeout unchanged; on an error the caller closes it.
    Blocks the calling thread; safe in any thread, one handshake per socket.

    Args:
        sock: a connected stream socket that no other thread reads or writes meanwhile.
        me: this worker, and which meeting with the peer it is ready for.
        terms: what both sides prove themselves with.
        expects: incarnation that must answer; 0 for anyone.
        deadline: on `time.monotonic()`, in seconds; bounds the whole handshake.
        expects_name: name of the worker that must answer; "" for anyone.
        expects_address: that was dialled, as the worker advertises it; "" for any.

    Raises:
        AuthenticationFailed: the credentials differ, or only one side has some.
        BadFrame: whatever answers is not farcall.
        LinkError: another incarnation, name or version; or refused.
        Unfinished: closed, or out of time: the peer may be alive.
    """
    wanted = Wanted(expects, expects_name, expects_address)
    return drive(sock, Conversation(lambda channel: _connect(channel, me, terms, wanted)), deadline)


def check_presence(
    channel: HandshakeChannel, secret: bytes, greeting: tuple[Hello, Hello, bytes, bytes]
) -> Script[None]:
    """Check that the acceptor knows the secret, of which the connector's hello has asked it.

    Args:
        greeting: what `greet` has returned.

    Raises:
        Refusal, BadFrame: it has not proven it.
    """
    _, answer, mine, theirs = greeting
    yield from _check_proof(channel, answer.identity, _digest(secret, PRESENCE, mine, theirs))


def accepting(
    me: Identity,
    terms: Terms,
    *,
    admit: Callable[[Identity], str | None],
    meeting: Meeting = first_meeting,
) -> Conversation[HandshakeResult]:
    """Return the acceptor's side: learn who connected, make it prove itself, say who we are.

    When the peer is proven the conversation waits for `go_on`, which asks `admit`. A peer of which
    no credential is asked is no more trusted then than before (`Conversation.is_trusted`).

    Args:
        me: this worker.
        terms: what both sides prove themselves with.
        admit: called once with the peer; returns why it is refused, or None to let it in.
        meeting: which meeting with the peer this worker is ready for.

    It ends with these errors:
        AuthenticationFailed: the credentials differ, or only one side has some.
        BadFrame: whatever connected is not farcall.
        LinkError: it wants another incarnation, name or version; or not admitted.
        Ended: the peer closed the connection.
    """
    return Conversation(lambda channel: _accept(channel, me, terms, admit, meeting))


def greet(
    channel: HandshakeChannel, me: Identity, terms: Terms, wanted: Wanted
) -> Script[tuple[Hello, Hello, bytes, bytes]]:
    """Begin as the connector, and learn the identity of the acceptor.

    But for TLS it has yet to be proven.

    Returns:
        Both hellos, the connector's first, and their bytes as they went over the wire.
    """
    shown = terms.shown(me)  # first: an error of its own says more than the refusal of the peer
    yield from _secure(channel, terms)
    hello = _hello(shown, terms, wanted)
    mine = channel.send(hello)
    answer, theirs = yield from channel.receive()
    if not isinstance(answer, Hello):
        raise BadFrame("the peer did not begin with a hello")
    _check_common(channel, answer, terms)
    _check_expected(answer.identity, wanted)
    return hello, answer, mine, theirs


def _secure(channel: HandshakeChannel, terms: Terms) -> Script[None]:
    """Begin TLS at the connector, if there are credentials for it."""
    if terms.certificates is None:
        return
    if terms.secret is not None:
        channel.wire.write(knock(terms.secret))
    stream = TlsStream(channel.wire, terms.certificates, dials=True)
    try:
        yield from stream.shake()
    except NotTls:
        # It may say why, but anybody could: what it says is for people.
        try:
            yield from channel.receive()
        except BadFrame:
            raise
        except LinkError as error:
            raise AuthenticationFailed(f"the peer does not begin TLS: {error}") from None
        raise AuthenticationFailed(f"the peer does not encrypt: {CHECK_SECRET}") from None
    channel.stream = stream


def _connect(
    channel: HandshakeChannel, me: Identity, terms: Terms, wanted: Wanted
) -> Script[HandshakeResult]:
    hello, answer, mine, theirs = yield from greet(channel, me, terms, wanted)
    if terms.secret is not None:
        channel.send(Proof(_digest(terms.secret, "connector", mine, theirs)))
        expected = _digest(terms.secret, "acceptor", mine, theirs)
        yield from _check_proof(channel, answer.identity, expected)
    channel.send(DiallerReady())
    keys = _keys(channel, (hello, mine), (answer, theirs), terms)
    return HandshakeResult(_agreed(answer, me), keys)


def _accept(
    channel: HandshakeChannel,
    me: Identity,
    terms: Terms,
    admit: Callable[[Identity], str | None],
    meeting: Meeting,
) -> Script[HandshakeResult]:
    beginning = yield from channel.wire.peek(BEGINNING)
    if is_knock(beginning):
        data = yield from channel.wire.read(LENGTH_OF_KNOCK)
        channel.is_known = terms.secret is not None and is_right(terms.secret, data)
        beginning = yield from channel.wire.peek(BEGINNING)
    if is_tls(beginning):
        yield from _secured(channel, terms)
    hello, theirs = yield from channel.receive()
    if not isinstance(hello, Hello):
        raise BadFrame("the peer did not begin with a hello")
    if hello.asks and terms.is_local:
        terms = terms._replace(secret=None)  # it may look at this process's memory as well
    # The acceptor finds every disagreement that an honest connector would find, and finds it
    # first: a connector without a secret has no later message in which to be refused.
    _check_common(channel, hello, terms)
    _check_expected(me, Wanted(hello.expects, hello.expects_name, hello.expects_address))
    channel.stage = Stage.GREETED
    me = msgspec.structs.replace(me, meeting=meeting(hello.incarnation))
    peer = _agreed(hello, me)
    answer = _hello(me, terms, Wanted())
    if terms.secret is None:
        yield from _check_admitted(channel, peer, admit)
        mine = channel.send(answer)
    else:
        mine = channel.send(answer)
        if hello.probes:
            channel.send(Proof(_digest(terms.secret, PRESENCE, theirs, mine)))
        expected = _digest(terms.secret, "connector", theirs, mine)
        yield from _check_proof(channel, hello.identity, expected)
        channel.is_trusted = True
        yield from _check_admitted(channel, peer, admit)
        channel.send(Proof(_digest(terms.secret, "acceptor", theirs, mine)))
    ready, _ = yield from channel.receive(READY_SIZE)
    if not isinstance(ready, DiallerReady):
        raise BadFrame("the peer did not end the handshake")
    keys = _keys(channel, (hello, theirs), (answer, mine), terms)
    return HandshakeResult(peer, None if keys is None else keys.of_acceptor())


def _secured(channel: HandshakeChannel, terms: Terms) -> Script[None]:
    """Take part in TLS at the acceptor, or say that there is none."""
    if terms.certificates is None:
        raise Refusal(
            AuthenticationFailed,
            f"the peer encrypts, and this worker has neither a secret nor certificates: "
            f"{CHECK_SECRET}",
            f"the other worker has neither a secret nor certificates: {CHECK_SECRET}",
        )
    if terms.secret is not None and not channel.is_known:
        raise Refusal(  # before TLS, which is what a flood would have us spend our time on
            AuthenticationFailed,
            f"the peer could not show that it knows our secret: {CHECK_SECRET}",
            f"your worker could not show that it knows the secret: {CHECK_SECRET}",
        )
    stream = TlsStream(channel.wire, terms.certificates, dials=False)
    try:
        yield from stream.shake()
    except NotTls:
        raise stranger(channel.wire.ahead) from None
    channel.stream = stream
    channel.is_trusted = True


def _agreed(hello: Hello, me: Identity) -> Identity:
    """Return who the peer is, with the meeting for which both sides are ready, or will be."""
    return msgspec.structs.replace(hello.identity, meeting=max(hello.meeting, me.meeting))


def _keys(
    channel: HandshakeChannel,
    connector: tuple[Hello, bytes],
    acceptor: tuple[Hello, bytes],
    terms: Terms,
) -> Keys | None:
    """Return the connector's keys, once the last message has come.

    Args:
        connector, acceptor: their hellos, each with its bytes as they went over the wire.
    """
    if not isinstance(channel.stream, TlsStream):
        return None
    channel.stream.end()
    salt = hashlib.sha256(_transcript(connector[1], acceptor[1])).digest()
    return keys_of(connector[0].key + acceptor[0].key, salt, encrypts=terms.encrypts)


def _hello(me: Identity, terms: Terms, wanted: Wanted) -> Hello:
    return Hello(
        protocol=PROTOCOL,
        version=VERSION,
        name=me.name,
        id=me.id,
        incarnation=me.incarnation,
        expects=wanted.incarnation,
        expects_name=wanted.name,
        host=me.host,
        main=me.main,
        nonce=secrets.token_bytes(NONCE_LENGTH),
        secured=terms.secret is not None,
        shm=me.shm,
        zero_copy=me.zero_copy,
        streams=me.streams,
        link=me.link,
        joins=me.joins,
        versions=me.versions,
        addresses=me.addresses,
        meeting=me.meeting,
        key=b"" if terms.certificates is None else secrets.token_bytes(KEY_LENGTH),
        encrypts=terms.encrypts,
        membership=me.membership,
        expects_address=wanted.address,
        strict=me.strict,
        asks=me.asks,
        role=me.role,
        pid=me.pid,
        probes=wanted.probes,
    )


def _check_common(channel: HandshakeChannel, hello: Hello, terms: Terms) -> None:
    if hello.protocol != PROTOCOL:
        raise BadFrame(f"the peer speaks {printable(hello.protocol)!r}, not {PROTOCOL!r}")
    if hello.version != VERSION:
        _refuse(f"the workers speak versions {hello.version} and {VERSION} of the handshake")
    name = printable(hello.name)
    if hello.secured != (terms.secret is not None):
        with_one, without = "a secret and {} has none", "no secret and {} has one"
        theirs, ours = (with_one, without) if terms.secret is None else (without, with_one)
        raise Refusal(
            AuthenticationFailed,
            f"worker {name!r} has {theirs.format('this worker')}: {CHECK_SECRET}",
            f"the other worker has {ours.format('yours')}: {CHECK_SECRET}",
        )
    if not isinstance(channel.stream, TlsStream):
        if terms.certificates is not None:
            raise Refusal(
                AuthenticationFailed,
                f"worker {name!r} does not encrypt: {_CHECK_TLS}",
                f"your worker does not encrypt: {_CHECK_TLS}",
            )
        return
    if len(hello.key) != KEY_LENGTH:
        raise BadFrame(f"worker {name!r} has no share in the keys")
    if hello.encrypts != terms.encrypts:
        why = "one worker has encrypt=False and the other has not: set FARCALL_ENCRYPT the same"
        raise Refusal(AuthenticationFailed, why, why)
    if terms.certificates is not None and terms.certificates.binds_names and not hello.asks:
        names = channel.stream.names()
        if hello.name not in names:
            what = f"is for {', '.join(map(printable, names)) or 'no name'} and not for {name!r}"
            advice = f"issue one with subjectAltName=DNS:{name}"
            raise Refusal(
                AuthenticationFailed,
                f"the certificate of worker {name!r} {what}: {advice}",
                f"your certificate {what}: {advice}",
            )


def _check_expected(actual: Identity, wanted: Wanted) -> None:
    """Is this the worker that the connector wants, and is it where that believes it to be?"""
    name = printable(actual.name)
    if wanted.name not in ("", actual.name):
        _refuse(f"worker {name!r} is at this address, not {printable(wanted.name)!r}", NotHere)
    if wanted.incarnation not in (0, actual.incarnation):
        _refuse(f"worker {name!r} at this address is another incarnation: it restarted", NotHere)
    if wanted.address not in ("", *actual.addresses):
        _refuse(f"worker {name!r} does not listen at {printable(wanted.address)}", NotHere)


def _check_admitted(
    channel: HandshakeChannel, peer: Identity, admit: Callable[[Identity], str | None]
) -> Script[None]:
    channel.stage = Stage.PROVEN
    yield 0
    reason = admit(peer)
    if reason is not None:
        raise Refusal(Unwanted, f"refused worker {printable(peer.name)!r}: {reason}", reason)


def _check_proof(channel: HandshakeChannel, peer: Identity, expected: bytes) -> Script[None]:
    proof, _ = yield from channel.receive(PROOF_SIZE)
    if not isinstance(proof, Proof):
        raise BadFrame("the peer did not send its proof")
    if not hmac.compare_digest(proof.digest, expected):
        name = printable(peer.name)
        raise Refusal(
            AuthenticationFailed,
            f"worker {name!r} could not prove that it knows our secret: {CHECK_SECRET}",
            f"your worker could not prove that it knows the secret: {CHECK_SECRET}",
        )


def _digest(secret: bytes, role: str, connector: bytes, acceptor: bytes) -> bytes:
    text = f"{PROTOCOL} {VERSION} {role}".encode()
    return hmac.digest(secret, _transcript(text, connector, acceptor), "sha256")


def _transcript(*parts: bytes) -> bytes:
    # Every part with its length: no two different transcripts give the same bytes.
    return b"".join([LENGTH.pack(len(part)) + part for part in parts])


def _refuse(reason: str, error: type[LinkError] = Unwanted) -> NoReturn:
    raise Refusal(error, reason, reason)
