"""After calls that failed, however they did, no table of either side is larger than before."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from interrupts import Interrupt, needs_its_bytecode
from patience import PATIENCE

from behaviour.helpers import Gate, by_async, by_remote, by_sync, echo, wait_at, wait_until
from farcall import rpc
from farcall.errors import AuthenticationFailed
from farcall.runtime.agent import Agent
from farcall.testing.faults import Fault, inject, of_type
from farcall.threads import is_main_thread
from farcall.transport.base import NotSent
from farcall.wire.frames import Frame
from farcall.wire.messages import Cancel, Request

Way = Callable[..., Any]
WAYS = (by_sync, by_async, by_remote)
# The tables are the same on every transport.
pytestmark = pytest.mark.parametrize("transport", ["native"])


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("can't be pickled")


def unpicklable() -> Any:
    return Unpicklable()


def unloadable() -> Any:
    raise RuntimeError("raised while it is loaded")


class Unloadable:
    def __reduce__(self) -> Any:
        return unloadable, ()


def tables(agent: Agent) -> dict[str, int]:
    """Return the sizes of the tables of an agent that grow with calls."""
    references = agent.references
    sizes = dict(references.statistics())
    sizes |= {
        "values": len(references._values),
        "creation errors": len(references._creation_errors),
        "parked": len(agent.machine._parked),
        "confirmations": len(agent.machine._confirmations),
        "waiting for references": len(agent.completion.waiting),
        "active": agent.coordinator.active,
    }
    for peer in agent.directory.all():
        sizes |= {
            f"open to {peer.name}": len(peer.outgoing),
            f"abandoned to {peer.name}": len(peer.outgoing._abandoned),
            f"free to {peer.name}": len(peer.outgoing._free),
            f"running for {peer.name}": len(peer.incoming),
            f"seen of {peer.name}": len(peer.incoming._seen_above),
            f"waiting for {peer.name}": len(peer.outbox) + len(peer.back_outbox),
        }
    return sizes


def wait_until_small(*agents: Agent, at_most: int = 8) -> None:
    """Wait until all tables are small. Some entries may stay, such as free numbers."""

    def sizes() -> list[tuple[str, str, int]]:
        return [
            (agent.me.name, table, size)
            for agent in agents
            for table, size in tables(agent).items()
            if size > at_most
        ]

    try:
        wait_until(lambda: not sizes())
    except AssertionError:
        raise AssertionError(sizes()) from None


@contextlib.contextmanager
def dials_that_fail(agent: Agent, error: Callable[[], Exception]) -> Iterator[None]:
    """Let no link of this agent come about inside the block."""
    connect, linked = agent.endpoint.connect, agent.endpoint.linked

    def fail(*_: Any) -> Any:
        raise error()

    agent.endpoint.connect = fail  # type: ignore[method-assign]
    agent.endpoint.linked = lambda _: None  # type: ignore[method-assign]
    try:
        yield
        agent.outboxes.flush(math.inf)
    finally:
        agent.endpoint.connect = connect  # type: ignore[method-assign]
        agent.endpoint.linked = linked  # type: ignore[method-assign]


def fail_often(count: int, call: Way, *args: Any, **options: Any) -> None:
    for _ in range(count):
        with pytest.raises(Exception) as raised:
            call("w1", *args, **options)
        # Else the error, and with it all frames, live until the garbage collector runs.
        assert raised.value not in (raised.value.__cause__, raised.value.__context__)
        del raised


def succeed_often(count: int) -> None:
    for number in range(count):
        assert rpc.rpc_sync("w1", echo, args=(number,)) == number


@pytest.mark.parametrize("call", WAYS)
@pytest.mark.parametrize("error", [NotSent, lambda: AuthenticationFailed("another secret")])
def test_calls_whose_link_could_not_be_dialled(
    pair: list[Agent], call: Way, error: Callable[[], Exception]
) -> None:
    with dials_that_fail(pair[0], error):
        fail_often(200, call, echo, (1,))
    succeed_often(200)
    wait_until_small(*pair)


@pytest.mark.parametrize("call", WAYS)
def test_calls_between_those_that_could_not_be_sent(pair: list[Agent], call: Way) -> None:
    for _ in range(100):
        with dials_that_fail(pair[0], NotSent):
            fail_often(3, call, echo, (1,))
        succeed_often(3)
    wait_until_small(*pair)


def test_references_dropped_before_their_creation_fails(pair: list[Agent]) -> None:
    at_once = 200  # at most, if no dial fails before the last call is made
    for _ in range(5):
        with dials_that_fail(pair[0], NotSent):
            for _ in range(at_once):
                rpc.remote("w1", echo, args=(1,))
        succeed_often(10)
    wait_until_small(*pair, at_most=at_once)


@pytest.mark.parametrize("call", [by_sync, by_async])
def test_calls_that_were_given_up(pair: list[Agent], gate: Gate, call: Way) -> None:
    fail_often(200, call, wait_at, (gate,), timeout=0.001)
    gate.open()
    succeed_often(100)
    wait_until_small(*pair)


def test_calls_that_were_given_up_while_they_were_sent(pair: list[Agent]) -> None:
    """Let the deadline pass while a thread is about to write the request."""
    agent = pair[0]
    connect, linked = agent.endpoint.connect, agent.endpoint.linked
    expired = threading.Event()
    expire = agent.completion.expire

    def expire_and_tell(pending: Any) -> None:
        expire(pending)
        expired.set()

    agent.completion.expire = expire_and_tell  # type: ignore[method-assign]
    sends = [True, False]

    def connect_late(*args: Any) -> Any:
        assert expired.wait(PATIENCE)
        if sends[0]:
            return connect(*args)
        raise NotSent

    for sends_it in (True, False) * 30:
        sends[0] = sends_it
        expired.clear()
        agent.endpoint.connect = connect_late  # type: ignore[method-assign]
        agent.endpoint.linked = lambda _: None  # type: ignore[method-assign]
        future = rpc.rpc_async("w1", echo, args=(1,), timeout=0.001)
        with pytest.raises(rpc.RpcTimeout):
            future.wait()
        agent.outboxes.flush(math.inf)
        agent.endpoint.connect = connect  # type: ignore[method-assign]
        agent.endpoint.linked = linked  # type: ignore[method-assign]
        succeed_often(3)
    wait_until_small(*pair, at_most=2)


@pytest.mark.parametrize("call", WAYS)
def test_requests_that_a_peer_does_not_take(pair: list[Agent], call: Way) -> None:
    fault = Fault(of_type(Request), losses=1_000_000)
    inject(pair[0], [fault])
    fail_often(200, call, echo, (1,))
    fault.losses = 0
    succeed_often(200)
    wait_until_small(*pair)


@pytest.mark.parametrize("call", WAYS)
def test_calls_with_values_that_can_not_be_sent(pair: list[Agent], call: Way) -> None:
    fail_often(100, call, echo, (Unpicklable(),))
    fail_often(100, call, echo, (Unloadable(),))
    fail_often(100, call, unpicklable)
    fail_often(100, call, echo, timeout=-1.0)
    succeed_often(100)
    wait_until_small(*pair)


def interrupt_in(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    """Ctrl-C comes at the beginning of this method, or at its end."""
    method = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if after:
            method(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("call", WAYS)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["begin", "pin", "watch", "connect", "dial", "send"])
def test_calls_that_were_interrupted_while_they_were_made(
    pair: list[Agent], call: Way, after: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = pair[0]
    arguments = rpc.RRef(1)  # its owner is not the callee, so it is pinned
    rpc.rpc_sync("w1", echo, args=(arguments,))
    to = agent.directory.resolve("w1")
    link = agent.links.connect(to, math.inf)
    owners = {
        "begin": (to.outgoing, "begin") if after else (agent.coordinator, "begin"),
        "pin": (agent.references, "pin"),
        "watch": (agent.completion, "watch"),
        "connect": (agent.links, "connect" if call is by_sync else "linked"),
        "dial": (agent.endpoint, "connect" if call is by_sync else "linked"),
        "send": (link, "exchange" if call is by_sync else "send"),
    }
    owner, name = owners[method]
    for _ in range(30):
        with monkeypatch.context() as patch:
            if owner is to.outgoing:
                monkeypatch_begin(to, patch)
            elif owner is link:
                interrupt_on_link(agent, name, patch, after)
            else:
                interrupt_in(owner, name, patch, after)
            agent.completion.deadlines.next = math.inf  # else `watch` is called for the first only
            if (call, method) != (by_sync, "watch"):
                with pytest.raises(KeyboardInterrupt):
                    call("w1", echo, (arguments,))
        succeed_often(3)
    del arguments
    wait_until_small(*pair, at_most=2)


def monkeypatch_begin(peer: Any, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes when a number was taken, and before anybody knows which."""
    outgoing = peer.outgoing

    class Interrupting:
        def __getattr__(self, name: str) -> Any:
            return getattr(outgoing, name)

        def begin(self, record: Any) -> Any:
            outgoing.begin(record)
            raise KeyboardInterrupt

    patch.setattr(peer, "outgoing", Interrupting())


def interrupt_on_link(agent: Agent, name: str, patch: pytest.MonkeyPatch, after: bool) -> None:
    connect, linked = agent.links.connect, agent.links.linked

    class Interrupting:
        def __init__(self, link: Any) -> None:
            self.link = link

        def __getattr__(self, called: str) -> Any:
            return getattr(self.link, called)

    def interrupted(link: Any, frame: Frame, *args: Any) -> Any:
        if after or type(frame.message) is not Request:
            getattr(link, name)(frame, *args)
        if type(frame.message) is Request:
            raise KeyboardInterrupt

    def wrapped(link: Any) -> Any:
        wrapping: Any = Interrupting(link)
        setattr(wrapping, name, functools.partial(interrupted, link))
        return wrapping

    patch.setattr(agent.links, "connect", lambda *args: wrapped(connect(*args)))
    patch.setattr(agent.links, "linked", lambda peer: wrapped(linked(peer)))


def test_remote_that_was_interrupted_and_whose_request_is_late(  # WRK-3
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the question whether the value was made go another way, but not come first."""
    caller, owner = pair
    owner.call("w0", echo, (1,))  # that is the other way
    to = caller.directory.resolve("w1")
    link = caller.links.connect(to, math.inf)
    late: list[Frame] = []

    class Late:
        def send(self, frame: Frame, _: float) -> None:
            late.append(frame)
            if type(frame.message) is Request:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(caller.links, "linked", lambda _: Late())
        with pytest.raises(KeyboardInterrupt):
            rpc.remote("w1", echo, (1,))
        for _ in range(3):
            owner.call("w0", echo, (1,))  # the answers come after what went the other way
    for frame in late:
        link.send(frame, math.inf)
    succeed_often(1)
    wait_until(lambda: not owner.references._values)
    wait_until(lambda: caller.references.statistics()["held"] == 0)


class Full:
    """A link that takes nothing at once: only threads that wait for it, and so not the main one."""

    def __init__(self, link: Any) -> None:
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def send(self, *args: Any) -> None:
        if is_main_thread():
            raise NotSent
        self._link.send(*args)


@needs_its_bytecode
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_calls_that_were_interrupted_anywhere(
    pair: list[Agent], call: Way, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, wherever it comes, also in a call whose request waits in its outbox."""
    succeed_often(10)
    if full:
        linked = pair[0].links.linked
        monkeypatch.setattr(pair[0].links, "linked", lambda peer: Full(linked(peer)))
    interrupts = 0
    for number in itertools.count(1):
        interrupt = Interrupt(number)
        interrupts += interrupt.run(functools.partial(call, "w1", echo, args=(number,), timeout=0))
        if not interrupt.where:
            break
    assert interrupts > 20
    monkeypatch.undo()
    succeed_often(1_000)
    wait_until_small(*pair)
    wait_until(lambda: tables(pair[1])["seen of w0"] < 8)  # though 1,000 calls followed


def test_answers_to_cancels_that_could_not_be_written(pair: list[Agent], gate: Gate) -> None:
    """Answer a cancel late, but answer it: a caller forgets an abandoned call only then."""
    agent = pair[1]
    answer = agent.control.answer
    lost: list[Any] = []

    class Full:
        """A link that takes nothing."""

        def send(self, *_: Any) -> None:
            raise NotSent

    def answer_badly(to: int, *message: Any) -> None:
        peer = agent.directory.of_incarnation(to)
        assert peer is not None
        link, peer.back_link = peer.back_link, Full()  # type: ignore[assignment]
        answer(to, *message)
        peer.back_link = link
        lost.append(message)

    agent.control.answer = answer_badly  # type: ignore[method-assign]
    outgoing = pair[0].directory.resolve("w1").outgoing
    succeed_often(5)
    outgoing._abandoned.add(3)  # as if its answer had not come
    pair[0].links.connect(pair[0].directory.resolve("w1"), math.inf).send(
        Frame(Cancel(), 3), math.inf
    )
    wait_until(lambda: bool(lost))
    wait_until(lambda: not outgoing._abandoned)
