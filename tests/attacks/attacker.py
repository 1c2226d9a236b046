"""An attacker's knowledge of farcall's insides: no other module of these tests has any.

A change of the handshake, of frames or of messages changes this module, and no other one here. Each
way in has a control: a test in which the same steps with the right credential succeed, so that no
attack fails for want of an attacker who speaks the protocol.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import pickle
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import torch
from patience import PATIENCE

from farcall.ids import Worker, new_incarnation
from farcall.runtime.calls.methods import RemoteMethod
from farcall.runtime.current import current_agent
from farcall.runtime.membership import fixed_group, rendezvous
from farcall.runtime.membership.signing import MembershipProof, SecretSigner
from farcall.serde import Serializer
from farcall.transport.connect import handshake
from farcall.transport.connect.certificates import made_of
from farcall.transport.connect.conversation import Conversation, drive
from farcall.transport.connect.credentials import SecretCertificates, Terms
from farcall.transport.connect.guests import Guest
from farcall.transport.connect.handshake_messages import (
    LENGTH,
    NONCE_LENGTH,
    PROTOCOL,
    VERSION,
    DiallerReady,
    Hello,
    Identity,
    Proof,
    Refuse,
)
from farcall.transport.connect.knock import knock
from farcall.transport.connect.listening import Listening
from farcall.transport.connect.multi_stream import StreamRegistry
from farcall.transport.connect.visitors import Visitor
from farcall.transport.sockets.streams import source_of, writer_of
from farcall.wire.frames import HEADER, MAGIC, Frame, encode
from farcall.wire.frames import VERSION as FRAME_VERSION
from farcall.wire.messages import Failure, Kind, Message, Reference, Reply, Request

_message = msgspec.msgpack.Encoder().encode


MADV_REMOVE = 9


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (self._path, "w")


# Frames.


def whole(frame: Frame) -> bytes:
    """Return the bytes of a frame."""
    return b"".join(bytes(part) for part in encode(frame))


_ids = itertools.count(1 << 40)  # of calls: no honest worker counts so far


def request(function: str, body: bytes, **fields: Any) -> bytes:
    return whole(Frame(Request(function, 0.0, **fields), next(_ids), body))


def call_by_name(path: str) -> bytes:
    """Return a call of `eval`: CVE-2024-5480 in farcall's form."""
    return request("builtins:eval", pickle.dumps(((f"open({path!r}, 'w')",), {})))


def remote_module(path: str) -> bytes:
    """Return the making of a RemoteModule out of a pickle: CVE-2024-48063 in farcall's form."""
    args = (torch.nn.Linear, (Trap(path),), {}, "cpu")
    return request("farcall.nn.owner:make", pickle.dumps((args, {})))


def hostile_pickle(path: str, function: str = "_operator:truth") -> bytes:
    """Return a call of a harmless function whose arguments run code: CVE-2024-7804 likewise."""
    return request(function, pickle.dumps(((Trap(path),), {})))


def hostile_answers(path: str) -> bytes:
    """Return answers to calls 1 to 64, whose values run code."""
    body = pickle.dumps(Trap(path))
    return b"".join(whole(Frame(Reply(), number, body)) for number in range(1, 65))


CVES = {
    "CVE-2024-5480": call_by_name,
    "CVE-2024-48063": remote_module,
    "CVE-2024-7804": hostile_pickle,
}


def harmless() -> bytes:
    """Return a call of `operator.truth(1)`."""
    return request("_operator:truth", pickle.dumps(((1,), {})))


def announcing(buffers: int, size: int) -> bytes:
    """Return a frame that announces buffers of `size` bytes each, and brings none of them."""
    meta = _message(list(msgspec.to_builtins(Request("_operator:truth"))))
    header = HEADER.pack(MAGIC, FRAME_VERSION, Kind.REQUEST, 0, len(meta), buffers, 1, 0)
    return header + size.to_bytes(8, "little") * buffers + meta


# Without a credential: bytes, as a stranger sends them.


def plain_hello(**changes: Any) -> bytes:
    """Return a hello as it goes over the wire."""
    values: dict[str, Any] = {
        "protocol": PROTOCOL,
        "version": VERSION,
        "name": "mallory",
        "id": 7,
        "incarnation": new_incarnation(),
        "expects": 0,
        "expects_name": "",
        "host": "",
        "main": "",
        "nonce": secrets.token_bytes(NONCE_LENGTH),
        "secured": False,
        "key": secrets.token_bytes(NONCE_LENGTH),
    }
    data = _message(Hello(**{**values, **changes}))
    return LENGTH.pack(len(data)) + data


def refusal(reason: str, code: Any) -> bytes:
    """Return a refusal of a connection, as it goes over the wire."""
    data = _message(Refuse(reason, code))
    return LENGTH.pack(len(data)) + data


def rest_of_handshake(secured: bool) -> bytes:
    """Return what a dialler says behind its hello, without having listened."""
    messages: list[Any] = [Proof(secrets.token_bytes(32))] if secured else []
    data = [_message(message) for message in (*messages, DiallerReady())]
    return b"".join(LENGTH.pack(len(one)) + one for one in data)


def dial(url: str) -> socket.socket:
    """Connect to an address of a worker, without any credential."""
    if url.startswith("unix:@"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(PATIENCE)
        sock.connect("\0" + url.removeprefix("unix:@"))
        return sock
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return socket.create_connection((parts.hostname, parts.port), PATIENCE)


# Both ends of a handshake over TLS without I/O, as a worker has them.


def overheard_knock(secret: str) -> bytes:
    """Return the bytes of a worker that an attacker on the path has seen, and repeats."""
    return knock(secret.encode())


def stolen_certificate(secret: str) -> tuple[bytes, bytes]:
    """Return a certificate that workers with the secret accept, and its key, in PEM."""
    worker = made_of(secret.encode()).worker
    at = worker.index(b"-----BEGIN PRIVATE KEY")
    return worker[:at], worker[at:]


@functools.cache
def _terms(secret: str) -> Terms:
    """Return those of a worker with certificates: no knock comes before TLS."""
    return Terms(None, SecretCertificates(secret.encode()))


def _identity() -> Identity:
    return Identity("w0", 0, new_incarnation())


def accepting_side(secret: str) -> Conversation[handshake.HandshakeResult]:
    """Return a worker's side of a handshake with a stranger that dials in."""
    return handshake.accepting(_identity(), _terms(secret), admit=lambda _: None)


def dialling_side(secret: str) -> Conversation[handshake.HandshakeResult]:
    """Return a worker's side of a handshake with the server that it has dialled."""
    wanted = handshake.Wanted(new_incarnation(), "w1")
    return Conversation(
        lambda channel: handshake._connect(channel, _identity(), _terms(secret), wanted)
    )


def visitor(sock: socket.socket, secret: str) -> Visitor:
    """Return a connection as the thread has it that shakes hands with all strangers."""
    sock.setblocking(False)
    guest = Guest(_identity(), _terms(secret), Listening(), StreamRegistry())
    return Visitor(sock, "somebody", "somewhere", guest, time.monotonic())


def wait_briefly_for_belief() -> None:
    """Wait from now on for 0.3 seconds, not 5, until a record of the store can be believed."""
    fixed_group.CLAIM_SECONDS = rendezvous._RENEWAL_LIMIT = 0.3


def believe_in(names: dict[str, str]) -> None:
    """Have this worker know others that are not there.

    Args:
        names: of each, with the address of another listener.
    """
    for number, (name, url) in enumerate(names.items()):
        worker = Worker(name, 1000 + number, new_incarnation(), (url,))
        current_agent().directory.add(worker)


# With the credential: as a member, or as the thief of a secret.


class Session:
    """A connection behind a handshake, on which its holder says what it likes."""

    def __init__(self, sock: socket.socket, met: handshake.HandshakeResult) -> None:
        self.sock = sock
        self.peer = met.peer
        self._writer = writer_of(sock, met.keys)
        self._source = source_of(sock, met.keys)

    def say(self, data: bytes) -> None:
        self._writer.put([data])
        while not self._writer.write():
            pass

    def answer(self) -> tuple[int, bytes]:
        """Return the kind and the body of the next frame; (0, b"") if the peer has closed."""
        try:
            head = self._read(HEADER.size)
            _, _, kind, _, meta, count, _, length = HEADER.unpack(head)
            self._read(8 * count + meta)
            return kind, self._read(length)
        except ConnectionError:
            return 0, b""

    def hang_up(self) -> None:
        """Close the connection, and wait until the other side has."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(1 << 16):
                pass
        self.sock.close()

    def _read(self, count: int) -> bytes:
        data = memoryview(bytearray(count))
        done = 0
        while done < count:
            received = self._source.recv_into(data[done:])
            if not received:
                raise ConnectionError("the peer has closed the connection")
            done += received
        return bytes(data)


def enter(url: str, secret: str | None, seconds: float = PATIENCE, **me: Any) -> Session:
    """Do the dialler's handshake with the identity `me`, and with a secret if there is one."""
    sock = dial(url)
    identity = Identity(**{"name": "mallory", "id": 7, "incarnation": new_incarnation(), **me})
    key = None if secret is None else secret.encode()
    over_tls = key is not None and sock.family != socket.AF_UNIX
    terms = Terms(key, SecretCertificates(key) if key is not None and over_tls else None)
    deadline = time.monotonic() + seconds
    try:
        met = handshake.connect(sock, identity, terms, expects=0, deadline=deadline)
    except BaseException:
        sock.close()
        raise
    sock.settimeout(PATIENCE)
    return Session(sock, met)


ENTER_SECONDS, FAILED_ENTRIES = 5.0, 8
_sessions: list[Session] = []


def open_links(urls: list[str], secret: str, count: int, *, invents: bool) -> int:
    """Open links as this member, or as workers that it invents, and keep them.

    Returns:
        How many handshakes came to their end, of so many tries at each address, or fewer if it has
        no success any more.
    """
    name, number, incarnation = me()
    signer = MembershipProof("farcall/open", SecretSigner(secret.encode()))
    made = failed = 0
    for url, attempt in itertools.product(urls, range(count)):
        identity = Identity(name, number, incarnation)
        if invents:
            identity = Identity(f"m{attempt}", 1000 + attempt, new_incarnation())
        shown = {"membership": signer.shown_by(identity).membership}
        fields = {"name": identity.name, "id": identity.id, "incarnation": identity.incarnation}
        try:
            _sessions.append(enter(url, secret, ENTER_SECONDS, **fields, **shown))
            made, failed = made + 1, 0
        except OSError:
            failed += 1
            if failed > FAILED_ENTRIES:
                break
    return made


# Steps of a member that turned: its worker is honest, and its own links carry what it forges.


class Outcome(NamedTuple):
    """The end of a forged call: the kind of the answer, and its error's type and text."""

    kind: str
    error: str = ""
    text: str = ""


def ask(to: str, function: str, body: bytes, buffers: list[bytes] | None = None,
        **fields: Any) -> Outcome:  # fmt: skip
    """Send a forged call on this worker's own link, and wait for its answer."""
    return _exchange(to, Frame(Request(function, 0.0, **fields), next(_ids), body, buffers or []))


def ask_for(to: str, function: str, args: Any) -> Outcome:
    """Call a function by a name that the caller need not have, with honest arguments."""
    return ask(to, function, pickle.dumps((args, {})))


def everything_told_by(to: str, function: str, args: tuple[Any, ...]) -> str:
    """Call a function that fails; return all text of the answer."""
    return repr(
        _answer(to, Frame(Request(function, 0.0), next(_ids), b"\x01" + _strict((args, {}))))
    )


def carry(to: str, data: bytes) -> None:
    """Send the bytes of a frame on this worker's own link, and wait for the answer."""
    *_, meta, count, _call_id, length = HEADER.unpack_from(data)
    assert count == 0
    start = HEADER.size + meta
    message = msgspec.msgpack.decode(data[HEADER.size : start], type=Request)
    assert start + length == len(data)
    _exchange(to, Frame(message, next(_ids), data[start:]))


def method_without_asking(rref: Any, name: str) -> Callable[..., Any]:
    """Return a method of a remote value by any name, also by one that no honest caller asks for."""
    proxy = rref.rpc_sync()
    return RemoteMethod(proxy._Methods__invoke, name)


def guess_references(to: str, count: int) -> list[Any]:
    """Ask for values of other workers' references, by their numbers; return those that came."""
    agent = current_agent()
    peer = agent.directory.known(to)
    assert peer is not None
    owner = peer.worker
    found: list[Any] = []
    for maker in agent.directory.live():
        for number in range(1, count + 1):
            guess = Reference(
                maker.worker.incarnation,
                number.to_bytes(16, "big"),
                owner.incarnation,
                owner.name,
                owner.id,
            )
            fields = {"references": (guess,), "on_reference": True}
            outcome = ask(to, "farcall.rref:fetch", pickle.dumps(((), {})), **fields)
            if outcome.kind == "Reply":
                found.append(outcome)
    return found


def me() -> tuple[str, int, int]:
    """Return this worker's name, id and incarnation; the store has them, too."""
    worker = current_agent().me
    return worker.name, worker.id, worker.incarnation


def membership() -> bytes:
    """Return what this worker shows to those that it dials: a signature under the secret."""
    endpoint: Any = current_agent().endpoint
    shown: bytes = endpoint.me.membership
    return shown


def without_signature(key: str, value: bytes) -> bytes:
    """Return what a worker reads in the place of the record of w1: the same, unsigned."""
    if not key.endswith("/name/w1"):
        return value
    body, _ = msgspec.msgpack.decode(value)
    return msgspec.msgpack.encode([body, b""])


def signed_otherwise(key: str, value: bytes) -> bytes:
    """Return the same with a signature in which one bit is another."""
    if not key.endswith("/name/w1"):
        return value
    body, signature = msgspec.msgpack.decode(value)
    return msgspec.msgpack.encode([body, signature[:-1] + bytes([signature[-1] ^ 1])])


def _answer(to: str, frame: Frame) -> Frame:
    agent = current_agent()
    peer = agent.directory.known(to)
    assert peer is not None
    deadline = time.monotonic() + PATIENCE
    link = agent.links.connect(peer, deadline)
    return link.exchange(frame, deadline)


def _exchange(to: str, frame: Frame) -> Outcome:
    message: Message = _answer(to, frame).message
    if isinstance(message, Failure):
        return Outcome("Failure", message.type_name, message.message)
    return Outcome(type(message).__name__, "", "")


def punch_holes(least: int) -> int:
    """Free the pages of this worker's segments of so many bytes or more; return how many those are.

    They are sealed, so no process can make them smaller. But no seal that leaves them writable
    keeps their pages.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    count = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if "memfd:farcall" in line and end - start >= least:
            size = ctypes.c_size_t(end - start)
            assert libc.madvise(ctypes.c_void_p(start), size, MADV_REMOVE) == 0
            count += 1
    return count


# Values that a strict reader must refuse, as bytes of either format: a pickle, and strict values
# (docs/protocol.md), whose first byte is 1.

DEEP = 1_000_000


def nested_tuples() -> list[bytes]:
    """Return a million tuples, each in the other, as the key of a dict, for `hash` to go down."""
    in_pickle = b"\x80\x05})" + b"\x85" * DEEP + b"Ns."
    in_strict = b"\x01m\x01" + b"t\x01" * DEEP + b"NN"
    return [_as_arguments(in_pickle), in_strict]


def nested_slices() -> list[bytes]:
    """Return slices of slices, for `del` or `repr` to go down."""
    in_pickle = b"\x80\x05" + _pickled_slices(200_000) + b"."
    in_strict = b"\x01" + b":" * DEEP + b"N" * (2 * DEEP + 1)
    return [_as_arguments(in_pickle), in_strict]


def large_memo_index() -> list[bytes]:
    """Return 14 bytes that let a memo grow to 2^28 places, and counts of 2^62 things."""
    index = (1 << 28).to_bytes(4, "little")
    in_pickle = b"\x80\x05\x8c\x01xr" + index + b"."
    counts = [b"\x01" + tag + b"\xff" + (1 << 62).to_bytes(8, "little") for tag in _COUNTED]
    return [_as_arguments(in_pickle), *counts]


def equal_hashes() -> list[bytes]:
    """Return a set of numbers that all have one hash."""
    numbers = [n * ((1 << 61) - 1) for n in range(1, 5_000)]
    strict = [b"I\x10" + number.to_bytes(16, "little", signed=True) for number in numbers]
    count = b"\xff" + len(strict).to_bytes(8, "little")
    return [pickle.dumps((({*numbers},), {})), b"\x01e" + count + b"".join(strict)]


def repeated_elements() -> list[bytes]:
    """Return sparse tensors of 4 * 10^8 elements that are all the same one, by a stride of 0."""
    many = 4 * 10**8
    index = _no_elements_of_its_own(bytes(8), "int64", (1, many))
    ones = _no_elements_of_its_own(b"\0\0\x80?", "float32", (many,))
    coo = b"\x01T\x02t\x04" + index + ones + _strict((3,)) + b"0"
    rows = _no_elements_of_its_own(bytes(8), "int64", (many + 1,))
    none = _strict(torch.zeros(0, dtype=torch.int64)) + _strict(torch.zeros(0))
    csr = b"\x01T\x03t\x05" + _strict("sparse_csr") + rows + none + _strict((many, 1))
    return [coo, csr]


def _no_elements_of_its_own(element: bytes, dtype: str, shape: tuple[int, ...]) -> bytes:
    return b"T\x00" + _strict((bytearray(element), dtype, shape, (0,) * len(shape)))


def copied_buffers() -> list[bytes]:
    """Return values that read one buffer a thousand times, each of which would copy it."""
    size = _strict((BUFFER_SIZE,))
    array = b"a" + _strict("|u1") + size + b"x\x00"
    return [b"\x01l\xff" + COPIES.to_bytes(8, "little") + array * COPIES]


COPIES = 1000
BUFFER_SIZE = 1 << 20  # bytes


def chosen_keys() -> list[bytes]:
    """Return a dict of ints that have different hashes, and all meet each other in its table."""
    keys = [b"i" + key.to_bytes(8, "little") + b"N" for key in _keys_that_meet()]
    return [b"\x01m\xff" + len(keys).to_bytes(8, "little") + b"".join(keys)]


@functools.cache
def _keys_that_meet(bits: int = 18) -> list[int]:
    """Return numbers that fill a table of 2^18 places as far as Python lets them.

    The first are each in the place that the search of Python's dicts comes to after the one before,
    once it has used up the upper bits of a hash. The others are in none of the places that are free
    until then, and begin that walk at its first quarter.
    """
    size = 1 << bits
    walk = [0]
    while len(walk) < size * 3 // 5:
        walk.append((walk[-1] * 5 + 1) % size)
    number = torch.full((size,), size)
    number[torch.tensor(walk)] = torch.arange(len(walk))
    generator = torch.Generator().manual_seed(1)
    others: set[int] = set()
    while len(walk) + len(others) < size * 2 // 3:
        keys = place = torch.tensor(walk)
        # Each step reads five more bits of a hash: draw them then, and drop the keys that miss.
        for step in range(1, 14):
            at = min(bits + 5 * (step - 1), 60)
            most = 1 << min(5, 60 - at)
            keys, place = keys.repeat(4)[: 1 << 20], place.repeat(4)[: 1 << 20]
            keys = keys | torch.randint(most, keys.shape, generator=generator) << at
            place = (place * 5 + (keys >> 5 * step) + 1) % size
            meets = number[place] < (size if step < 13 else len(walk) // 4)
            keys, place = keys[meets], place[meets]
        others.update(keys.tolist())
    return [*walk, *sorted(others - {*walk})][: size * 2 // 3]


def _strict(value: Any) -> bytes:
    """Return the bytes of a value inside of a strict one."""
    return Serializer().dump(value, strict=True).body[1:]


_COUNTED = (b"I", b"s", b"b", b"B", b"l", b"t", b"e", b"f", b"m", b"o", b"z")


def _pickled_slices(count: int) -> bytes:
    opening = b"cbuiltins\nslice\n" * count
    return opening + b"N" + b"NN\x87R" * count


def _as_arguments(value: bytes) -> bytes:
    """Return the pickle ((value,), {})."""
    return b"\x80\x05" + value[2:-1] + b"\x85}\x86."


HOSTILE_VALUES = {
    "nested tuples": nested_tuples,
    "nested slices": nested_slices,
    "large memo index": large_memo_index,
    "equal hashes": equal_hashes,
    "repeated elements": repeated_elements,
    "copied buffers": copied_buffers,
    "chosen keys": chosen_keys,
}


def send_values(to: str, function: str, kind: str) -> list[Outcome]:
    """Call a function with each of the hostile values of a kind as its argument."""
    return [
        ask(to, function, _as_argument(body), [bytes(BUFFER_SIZE)])
        for body in HOSTILE_VALUES[kind]()
    ]


def _as_argument(body: bytes) -> bytes:
    return b"\x01t\x02t\x01" + body[1:] + b"m\x00" if body[:1] == b"\x01" else body


def answer_with(kind: str, number: int) -> int:
    """Answer every call with a hostile value from now on; return how many such values there are.

    Args:
        number: which of the values of this kind.
    """
    answers = current_agent().answers
    body = HOSTILE_VALUES[kind]()[number] if number >= 0 else b""
    send = type(answers).send

    def forge(job: Any, frame: Frame) -> bool | None:
        if number >= 0:
            frame = Frame(Reply(), frame.call_id, body, [bytes(BUFFER_SIZE)])
        return send(answers, job, frame)

    answers.send = forge  # type: ignore[method-assign]
    return len(HOSTILE_VALUES[kind]())


def answer_as_usual() -> None:
    """Answer from now on as before `answer_with` and the like."""
    vars(current_agent().answers).pop("send", None)


def answer_with_trap(path: str) -> None:
    """Answer every call with a pickle that runs code from now on."""
    answers = current_agent().answers
    send = type(answers).send
    body = pickle.dumps(Trap(path))

    def forge(job: Any, frame: Frame) -> bool | None:
        return send(answers, job, Frame(Reply(), frame.call_id, body))

    answers.send = forge  # type: ignore[method-assign]


class Forged(NamedTuple):
    """An error that is sent as an answer: a built-in exception, by its parts, and its frames."""

    type_name: str
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = {}
    frames: tuple[tuple[str, str, int], ...] = ()


def answer_with_error(forged: Forged) -> None:
    """Answer every call with a forged error from now on."""
    answers = current_agent().answers
    send = type(answers).send
    failure = Failure(forged.type_name, "forged", "forged", frames=forged.frames)
    body = b"\x01O" + _strict(f"builtins:{forged.type_name}")
    body += b"t\x02" + _strict(forged.args) + _strict(forged.state)

    def forge(job: Any, frame: Frame) -> bool | None:
        return send(answers, job, Frame(failure, frame.call_id, body))

    answers.send = forge  # type: ignore[method-assign]


def send_combinations(to: str, name: str, count: int) -> int:
    """Call with so many combinations of the flags of an enum; return how many were taken."""
    taken = 0
    for number in range(1, count + 1):
        flag = b"O" + _strict(name) + _strict(number * 2 + 1)
        taken += ask(to, "app:truth", _as_argument(b"\x01" + flag)).kind == "Reply"
    return taken


# Of a process that asks about a worker, and of one that is asked and is no worker.


def begin_to_ask(url: str) -> socket.socket:
    """Do the handshake of a process that asks, as one of the same user without the secret may."""
    sock = dial(url)
    try:
        me = Identity("", -1, 0, asks=True)
        deadline = time.monotonic() + PATIENCE
        handshake.connect(sock, me, Terms(is_local=True), expects=0, deadline=deadline)
    except BaseException:
        sock.close()
        raise
    return sock


def accept_asker(sock: socket.socket) -> None:
    """Do a worker's side of that handshake, and take the question."""
    me = Identity("impostor", 7, new_incarnation())
    conversation = handshake.accepting(me, Terms(is_local=True), admit=lambda peer: None)
    drive(sock, conversation, time.monotonic() + PATIENCE)
    sock.settimeout(PATIENCE)
    (length,) = LENGTH.unpack(sock.recv(LENGTH.size, socket.MSG_WAITALL))
    sock.recv(length, socket.MSG_WAITALL)
