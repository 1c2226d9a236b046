"""The handshake: strangers are kept out, and both sides are told why.

Every test runs both sides over a real socket pair, in threads; nothing sleeps.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from patience import PATIENCE

from farcall.errors import AuthenticationFailed, BadFrame, LinkError
from farcall.transport.connect import conversation, handshake
from farcall.transport.connect.conversation import drive
from farcall.transport.connect.credentials import Terms
from farcall.transport.connect.handshake_messages import (
    DiallerReady,
    Ended,
    Hello,
    Identity,
    NotHere,
    Proof,
    Refuse,
    Unwanted,
)

LEFT = Identity("left", 0, 11, "host-a", "main-a", shm=3)
RIGHT = Identity("right", 1, 22, "host-b", "main-b")
SECRET = b"the right secret"

Pair = tuple[socket.socket, socket.socket]
Outcome = Identity | BaseException


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def soon() -> float:
    return time.monotonic() + PATIENCE


def anyone(peer: Identity) -> None:
    return None


def connect(sock: socket.socket, me: Identity, secret: bytes | None, **options: Any) -> Identity:
    """Run the dialling side, over a connection without TLS."""
    met = handshake.connect(sock, me, Terms(secret), **options)
    assert met.keys is None
    return met.peer


def accept(
    sock: socket.socket, me: Identity, secret: bytes | None, *, deadline: float, **options: Any
) -> Identity:
    """Run the accepting side, in one thread."""
    return drive(sock, handshake.accepting(me, Terms(secret), **options), deadline).peer


def both(one: Callable[[], Identity], other: Callable[[], Identity]) -> tuple[Outcome, Outcome]:
    """Run two sides at once, and return the result or the error of each."""
    outcomes: dict[int, Outcome] = {}

    def run(index: int, side: Callable[[], Identity]) -> None:
        try:
            outcomes[index] = side()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=item) for item in enumerate((one, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes[0], outcomes[1]


def meet(
    pair: Pair,
    left_secret: bytes | None,
    right_secret: bytes | None,
    *,
    expects: int = 0,
    expects_name: str = "",
    admit: Callable[[Identity], str | None] = anyone,
) -> tuple[Outcome, Outcome]:
    """Let the left side connect, and the right side accept."""
    return both(
        lambda: connect(
            pair[0], LEFT, left_secret, expects=expects, expects_name=expects_name, deadline=soon()
        ),
        lambda: accept(pair[1], RIGHT, right_secret, deadline=soon(), admit=admit),
    )


def say(sock: socket.socket, message: object) -> None:
    data = msgspec.msgpack.encode(message)
    sock.sendall(struct.pack("<I", len(data)) + data)


def hear_raw(sock: socket.socket) -> bytes:
    (length,) = struct.unpack("<I", sock.recv(4, socket.MSG_WAITALL))
    return sock.recv(length, socket.MSG_WAITALL)


def hear(sock: socket.socket) -> Hello | Proof | Refuse:
    return msgspec.msgpack.decode(hear_raw(sock), type=Hello | Proof | Refuse)


def a_hello(secured: bool = True, **changes: object) -> Hello:
    hello = Hello("farcall", 1, "left", 0, 11, 0, "", "", "", bytes(32), secured)
    return msgspec.structs.replace(hello, **changes)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_both_sides_learn_who_the_other_is(pair: Pair, secret: bytes | None) -> None:
    assert meet(pair, secret, secret, expects=22, expects_name="right") == (RIGHT, LEFT)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_nothing_beyond_the_handshake_is_read_and_the_timeout_is_kept(
    pair: Pair, secret: bytes | None
) -> None:
    pair[0].settimeout(7.0)

    def connect_and_go_on() -> Identity:
        peer = connect(pair[0], LEFT, secret, expects=0, deadline=soon())
        pair[0].sendall(b"first frame")
        return peer

    def accept_and_go_on() -> Identity:
        peer = accept(pair[1], RIGHT, secret, deadline=soon(), admit=anyone)
        assert pair[1].recv(11, socket.MSG_WAITALL) == b"first frame"
        return peer

    assert both(connect_and_go_on, accept_and_go_on) == (RIGHT, LEFT)
    assert pair[0].gettimeout() == 7.0
    assert pair[1].gettimeout() is None


def test_wrong_secret_is_refused_on_both_sides_without_leaking_it(pair: Pair) -> None:
    left, right = meet(pair, b"another secret", SECRET)
    for outcome in (left, right):
        assert isinstance(outcome, AuthenticationFailed)
        assert "check FARCALL_SECRET on both workers" in str(outcome)
        assert "another secret" not in str(outcome)
        assert SECRET.decode() not in str(outcome)


@pytest.mark.parametrize("secrets", [(SECRET, None), (None, SECRET)])
def test_one_sided_secret_is_refused_on_both_sides(
    pair: Pair, secrets: tuple[bytes | None, bytes | None]
) -> None:
    left, right = meet(pair, *secrets)
    for outcome in (left, right):
        assert isinstance(outcome, AuthenticationFailed)
        assert "check FARCALL_SECRET on both workers" in str(outcome)
    # Each side is told in its own terms who has the secret.
    assert ("yours has one" in str(left)) == (secrets[0] is not None)
    assert ("this worker has one" in str(right)) == (secrets[1] is not None)


def test_acceptor_that_claims_no_secret_cannot_downgrade_a_connector(pair: Pair) -> None:
    def impostor() -> Identity:
        hear(pair[1])
        say(pair[1], a_hello(secured=False))
        answer = hear(pair[1])
        assert isinstance(answer, Refuse)
        return RIGHT

    left, right = both(lambda: connect(pair[0], LEFT, SECRET, expects=0, deadline=soon()), impostor)
    assert isinstance(left, AuthenticationFailed)
    assert right == RIGHT


@pytest.mark.parametrize("change", [{"shm": 9}, {"main": "main-b"}])
def test_hello_that_was_changed_on_the_way_is_refused_on_both_sides(
    pair: Pair, change: dict[str, object]
) -> None:
    there, here = socket.socketpair()

    def relay() -> None:
        say(there, msgspec.structs.replace(hear(pair[1]), **change))
        for source, target in ((there, pair[1]), (pair[1], there), (there, pair[1])):
            data = hear_raw(source)
            target.sendall(struct.pack("<I", len(data)) + data)

    with there, here:
        between = threading.Thread(target=relay)
        between.start()
        outcomes = both(
            lambda: connect(pair[0], LEFT, SECRET, expects=0, deadline=soon()),
            lambda: accept(here, RIGHT, SECRET, deadline=soon(), admit=anyone),
        )
        between.join()
    for outcome in outcomes:
        assert isinstance(outcome, AuthenticationFailed)


@pytest.mark.parametrize(
    ("missing", "shm", "zero_copy"), [(8, 1, True), (9, 1, False), (10, 0, False)]
)
def test_hello_without_the_fields_that_came_last_has_none_of_that(
    pair: Pair, missing: int, shm: int, zero_copy: bool
) -> None:
    hello = a_hello(secured=False, shm=1, zero_copy=True, streams=2, link=b"", joins=b"")
    items = msgspec.msgpack.decode(msgspec.msgpack.encode(hello))
    last = [1, True, 2, b"", b"", "", [], 0, b"", True, b"", "", False, False, "", 0, False]
    assert items[-len(last) :] == last
    del items[-missing - 7 :]

    def older() -> Identity:
        say(pair[0], items)
        assert isinstance(hear(pair[0]), Hello)
        say(pair[0], DiallerReady())
        return LEFT

    _, right = both(older, lambda: accept(pair[1], RIGHT, None, deadline=soon(), admit=anyone))
    assert right == Identity("left", 0, 11, shm=shm, zero_copy=zero_copy)


def test_proof_reflected_to_its_maker_is_refused(pair: Pair) -> None:
    """Send back, without a secret, everything that the connector says."""

    def mirror() -> Identity:
        for _ in range(2):
            data = hear_raw(pair[1])
            pair[1].sendall(struct.pack("<I", len(data)) + data)
        assert isinstance(hear(pair[1]), Refuse)
        return RIGHT

    left, right = both(lambda: connect(pair[0], LEFT, SECRET, expects=0, deadline=soon()), mirror)
    assert isinstance(left, AuthenticationFailed)
    assert right == RIGHT


def test_replayed_proof_is_refused(pair: Pair) -> None:
    """Repeat a connector's old words to the same acceptor, word for word."""
    heard: list[bytes] = []

    def relay(there: socket.socket) -> Identity:
        """Relay between an honest connector and acceptor, and keep the connector's words."""
        asked, answered = (pair[1], there), (there, pair[1])
        for source, target in (asked, answered, asked, answered, asked):
            data = hear_raw(source)
            if source is pair[1]:
                heard.append(data)
            target.sendall(struct.pack("<I", len(data)) + data)
        return RIGHT

    def replay(there: socket.socket) -> Identity:
        there.sendall(struct.pack("<I", len(heard[0])) + heard[0])
        assert isinstance(hear(there), Hello)
        there.sendall(struct.pack("<I", len(heard[1])) + heard[1])
        answer = hear(there)
        assert isinstance(answer, Refuse)
        assert answer.code == "authentication"
        return LEFT

    def honest_acceptor(here: socket.socket) -> Callable[[], Identity]:
        return lambda: accept(here, RIGHT, SECRET, deadline=soon(), admit=anyone)

    there, here = socket.socketpair()
    with there, here:
        connector = threading.Thread(
            target=lambda: connect(pair[0], LEFT, SECRET, expects=0, deadline=soon())
        )
        connector.start()
        assert both(lambda: relay(there), honest_acceptor(here)) == (RIGHT, LEFT)
        connector.join()
        _, outcome = both(lambda: replay(there), honest_acceptor(here))
    assert isinstance(outcome, AuthenticationFailed)


def test_peer_without_the_proof_is_never_admitted(pair: Pair) -> None:
    asked: list[Identity] = []

    def admit(peer: Identity) -> None:
        asked.append(peer)

    meet(pair, b"wrong", SECRET, admit=admit)
    assert asked == []


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xff\xff\xff" + b"x" * 10,
        bytes(4),
        struct.pack("<I", 6) + b"random",
        struct.pack("<I", 2) + b"\x91\xa5",
    ],
    ids=["http", "4 GB length", "zero length", "not msgpack", "cut msgpack"],
)
@pytest.mark.parametrize(
    "side",
    [
        lambda sock: accept(sock, RIGHT, SECRET, deadline=soon(), admit=anyone),
        lambda sock: connect(sock, RIGHT, SECRET, expects=0, deadline=soon()),
    ],
    ids=["accept", "connect"],
)
def test_bytes_that_are_not_farcall_raise_bad_frame(
    pair: Pair, data: bytes, side: Callable[[socket.socket], Identity]
) -> None:
    pair[0].sendall(data)
    with pytest.raises(BadFrame, match="not farcall") as caught:
        side(pair[1])
    assert repr(data[:4])[2:-1] in str(caught.value)


def test_message_shows_how_the_stranger_began(pair: Pair) -> None:
    pair[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(BadFrame, match=r"it sent b'GET / HTTP/1'\.\.\."):
        accept(pair[1], RIGHT, None, deadline=soon(), admit=anyone)


@pytest.mark.parametrize(
    "message",
    [a_hello(protocol="another"), a_hello(nonce=b"short"), a_hello(shm=-1), Proof(bytes(32))],
    ids=["other protocol", "short nonce", "version below 0", "proof first"],
)
def test_hello_that_breaks_the_rules_raises_bad_frame(pair: Pair, message: Hello | Proof) -> None:
    say(pair[0], message)
    with pytest.raises(BadFrame):
        accept(pair[1], RIGHT, SECRET, deadline=soon(), admit=anyone)


def test_half_a_hello_then_silence_ends_at_the_deadline(pair: Pair) -> None:
    pair[0].sendall(struct.pack("<I", 100) + b"half")
    with pytest.raises(LinkError, match="not finished in time"):
        accept(pair[1], RIGHT, SECRET, deadline=time.monotonic() + 0.05, admit=anyone)


def test_peer_that_sends_a_byte_now_and_then_does_not_move_the_deadline(pair: Pair) -> None:
    done = threading.Event()

    def drip() -> None:
        pair[0].sendall(struct.pack("<I", 4000))
        while not done.wait(0.005):
            pair[0].sendall(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(LinkError, match="not finished in time"):
            accept(pair[1], RIGHT, SECRET, deadline=time.monotonic() + 0.1, admit=anyone)
    finally:
        done.set()
        dripping.join()


def test_deadline_in_the_past_raises_at_once(pair: Pair) -> None:
    with pytest.raises(LinkError, match="not finished in time"):
        connect(pair[0], LEFT, None, expects=0, deadline=time.monotonic() - 1)


def test_peer_that_hangs_up_raises_link_error(pair: Pair) -> None:
    pair[0].sendall(struct.pack("<I", 100) + b"half")
    pair[0].close()
    with pytest.raises(LinkError, match="closed the connection"):
        accept(pair[1], RIGHT, SECRET, deadline=soon(), admit=anyone)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_connector_that_gives_up_before_the_end_is_not_let_in(
    pair: Pair, secret: bytes | None
) -> None:
    """Answer too late: there is no link, so its end can't be taken for a death."""

    def impatient() -> Identity:
        say(pair[0], a_hello(secured=secret is not None))
        hear(pair[0])
        pair[0].close()
        return LEFT

    _, right = both(
        impatient, lambda: accept(pair[1], RIGHT, secret, deadline=soon(), admit=anyone)
    )
    assert type(right) is Ended
    assert "closed the connection during the handshake" in str(right)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_wrong_incarnation_is_refused_on_both_sides(pair: Pair, secret: bytes | None) -> None:
    for outcome in meet(pair, secret, secret, expects=23):
        assert type(outcome) is NotHere
        assert "worker 'right' at this address is another incarnation: it restarted" in str(outcome)


def test_wrong_name_is_refused_on_both_sides(pair: Pair) -> None:
    for outcome in meet(pair, SECRET, SECRET, expects_name="third"):
        assert type(outcome) is NotHere
        assert "worker 'right' is at this address, not 'third'" in str(outcome)


def test_other_version_is_refused_on_both_sides(pair: Pair) -> None:
    say(pair[0], a_hello(version=2))
    with pytest.raises(LinkError, match="versions 2 and 1"):
        accept(pair[1], RIGHT, SECRET, deadline=soon(), admit=anyone)
    answer = hear(pair[0])
    assert isinstance(answer, Refuse)
    assert "versions 2 and 1" in answer.reason


@pytest.mark.parametrize("secret", [None, SECRET])
def test_peer_that_is_not_admitted_is_told_why(pair: Pair, secret: bytes | None) -> None:
    left, right = meet(pair, secret, secret, admit=lambda peer: f"{peer.name} was declared lost")
    assert type(left) is type(right) is Unwanted
    assert "left was declared lost" in str(left)
    assert "refused worker 'left': left was declared lost" in str(right)


def test_words_of_a_stranger_are_shown_without_control_characters(pair: Pair) -> None:
    say(pair[1], Refuse("\x1b[2Jgone", "link"))
    with pytest.raises(LinkError) as caught:
        connect(pair[0], LEFT, None, expects=0, deadline=soon())
    assert "?[2Jgone" in str(caught.value)


def test_limit_holds_for_our_own_hello(pair: Pair) -> None:
    with pytest.raises(LinkError, match="over 12288 bytes"):
        connect(
            pair[0], Identity("left", 0, 1, host="h" * 15_000), None, expects=0, deadline=soon()
        )


def test_refusal_is_read_though_the_connection_was_reset_behind_it() -> None:
    """Close with our hello unread: TCP resets, and sending fails before reading."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        say(there, Refuse("we are closed", "authentication"))
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        there.close()
        hung_up = select.poll()
        hung_up.register(here, select.POLLHUP)
        assert hung_up.poll(1000 * PATIENCE)
        with here, pytest.raises(AuthenticationFailed, match="we are closed"):
            connect(here, LEFT, SECRET, expects=0, deadline=soon())


def test_refuser_waits_until_the_refused_has_read_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait: what the peer still sends would reset the connection, and lose the reason."""
    monkeypatch.setattr(conversation, "PARTING_SECONDS", 60.0)
    left, right = socket.socketpair()
    closed = threading.Event()

    def refuse() -> None:
        with contextlib.suppress(AuthenticationFailed):
            accept(right, RIGHT, None, deadline=soon(), admit=anyone)
        closed.set()
        right.close()

    with left:
        say(left, a_hello(secured=True))
        left.sendall(b"more than was asked for")
        thread = threading.Thread(target=refuse)
        thread.start()
        assert isinstance(hear(left), Refuse)
        assert not closed.is_set()
        left.shutdown(socket.SHUT_WR)
        assert left.recv(1) == b""  # an end, and no reset
    thread.join()


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (0, 3), (2, 3)])
def test_both_agree_on_the_later_meeting(
    pair: Pair, secret: bytes | None, left: int, right: int
) -> None:
    admitted: list[int] = []

    def admit(peer: Identity) -> None:
        admitted.append(peer.meeting)

    me = msgspec.structs.replace(LEFT, meeting=left)
    outcomes = both(
        lambda: connect(pair[0], me, secret, expects=22, deadline=soon()),
        lambda: accept(
            pair[1], RIGHT, secret, deadline=soon(), admit=admit, meeting=lambda _: right
        ),
    )
    agreed = max(left, right)
    assert [outcome.meeting for outcome in outcomes] == [agreed, agreed]  # type: ignore[union-attr]
    assert admitted == [agreed]
