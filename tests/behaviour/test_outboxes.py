"""Whatever a peer does, only a thread that waits for an answer waits for the network.

Nothing here has a timeout: a call that waited would wait forever, and the test with it.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from functools import partial
from typing import Any

import pytest
import torch
from threads_left import check_no_threads_left

from behaviour.helpers import (
    PATIENCE,
    Account,
    Gate,
    by_async,
    by_remote,
    echo,
    in_threads,
    wait_at,
    wait_until,
)
from farcall import autograd, rpc
from farcall.errors import AuthenticationFailed, BadFrame, LinkError, SerializationError
from farcall.protocol.admission import Bounds
from farcall.runtime.agent import Agent
from farcall.runtime.calls import outboxes
from farcall.runtime.membership.peers import Peer
from farcall.testing.cluster import TRANSPORTS, acting_as
from farcall.transport.base import Link, NotSent
from farcall.wire import frames
from farcall.wire.frames import Frame, Limits

FOREVER = {"timeout": 0}


class Stuck:
    """While it is shut, an agent's peers take nothing: their links are not made, or are full."""

    def __init__(self, agent: Agent, *, links: bool) -> None:
        self._agent = agent
        self._opened = threading.Event()
        self._loss_cause: str | None = None
        self._connect = agent.links.connect
        self._linked = agent.links.linked
        self.waiting = threading.Semaphore(0)
        agent.links.connect = self.connect  # type: ignore[method-assign]
        agent.links.linked = self.linked if links else lambda _: None  # type: ignore[method-assign]

    def connect(self, peer: Peer, deadline: float) -> Any:
        if peer.worker is self._agent.me:
            return self._connect(peer, deadline)
        self.wait(deadline)
        return self._connect(peer, deadline)

    def linked(self, peer: Peer) -> Any:
        link = self._linked(peer)
        return FullLink(self, link) if link is not None and peer.name != "w0" else link

    def wait(self, deadline: float) -> None:
        self.waiting.release()
        left = min(max(0.0, deadline - outboxes.time.monotonic()), PATIENCE)
        if not self._opened.wait(left):
            raise NotSent("it takes nothing")
        if self._loss_cause is not None:
            raise LinkError(self._loss_cause)

    def open(self) -> None:
        self._opened.set()
        self._agent.outboxes.flush(outboxes.time.monotonic() + PATIENCE)
        self._agent.links.connect = self._connect  # type: ignore[method-assign]
        self._agent.links.linked = self._linked  # type: ignore[method-assign]

    def break_all(self, cause: str) -> None:
        self._loss_cause = cause
        self._opened.set()


class FullLink:
    """A link that takes a frame only when the one around it is open."""

    def __init__(self, stuck: Stuck, link: Link) -> None:
        self._stuck = stuck
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def send(self, frame: Frame, deadline: float) -> None:
        self._stuck.wait(min(deadline, outboxes.time.monotonic() + outboxes.GRACE))
        self._link.send(frame, deadline)


@pytest.fixture(params=["no link", "full link"])
def shut(request: pytest.FixtureRequest, pair: list[Agent]) -> Iterator[Callable[[], Stuck]]:
    """Makes the other worker take nothing from now on."""
    rpc.rpc_sync("w1", echo, args=(1,))
    made: list[Stuck] = []

    def shut() -> Stuck:
        made.append(Stuck(pair[0], links=request.param == "full link"))
        return made[0]

    yield shut
    for stuck in made:
        stuck.open()


@pytest.fixture
def stuck(shut: Callable[[], Stuck]) -> Stuck:
    return shut()


def test_a_message_without_an_answer_does_not_wait(
    pair: list[Agent], gate: Gate, shut: Callable[[], Stuck]
) -> None:
    kept, dropped = rpc.remote("w1", Account), rpc.remote("w1", Account)
    assert kept.rpc_sync().deposit(1) == dropped.rpc_sync().deposit(1) == 1
    running = rpc.rpc_async("w1", wait_at, args=(gate,), timeout=0.1)
    stuck = shut()
    # Each returns though nothing can be sent.
    value = rpc.rpc_async("w1", echo, args=(2,), **FOREVER)
    made = rpc.remote("w1", Account, args=(5,), **FOREVER)
    method = kept.rpc_async(timeout=0).deposit(3)
    of_method = kept.remote(timeout=0).itself()
    on_made = made.rpc_async(timeout=0).deposit(1)
    del dropped
    gc.collect()
    with pytest.raises(rpc.RpcTimeout):
        running.wait()  # and a CANCEL is to be sent
    assert not any(future.done() for future in (value, method, on_made))
    stuck.open()
    assert value.wait() == 2
    assert method.wait() == 4
    assert on_made.wait() == 6
    assert of_method.rpc_sync().deposit(1) == 5
    gate.open()
    wait_until(lambda: len(pair[1].references._values) <= 3)  # the one that was dropped is gone


def test_a_call_that_waits_for_its_answer_overtakes_nothing(
    pair: list[Agent], stuck: Stuck
) -> None:
    """Use a reference that is made by a request that waits."""
    made = rpc.remote("w1", Account, args=(5,), **FOREVER)
    with in_threads(lambda: made.rpc_sync(timeout=0).deposit(1)) as results:
        wait_until(lambda: len(pair[0].directory.resolve("w1").outbox) > 0)
        stuck.open()
    assert results == [6]


def test_arguments_may_be_changed_at_once(pair: list[Agent], stuck: Stuck) -> None:
    tensor = torch.zeros(10_000)
    future = rpc.rpc_async("w1", echo, args=(tensor,), **FOREVER)
    tensor += 1
    stuck.open()
    assert future.wait().sum() == 0


def test_calls_that_wait_end_at_their_deadline(pair: list[Agent], stuck: Stuck) -> None:
    """End each call at its own deadline, also behind a call that has more time."""
    first = rpc.rpc_async("w1", echo, args=(1,), **FOREVER)
    for _ in range(5):
        others = [rpc.rpc_async("w1", echo, args=(1,), timeout=0.05) for _ in range(300)]
        for future in others:
            with pytest.raises(rpc.RpcTimeout):
                future.wait()
    assert not first.done()
    last = rpc.rpc_async("w1", echo, args=(3,), **FOREVER)
    assert len(pair[0].directory.resolve("w1").outbox) < 1_000  # those that are over don't pile up
    stuck.open()
    assert first.wait() == 1
    assert last.wait() == 3
    seen = pair[1].directory.resolve("w0").incoming
    assert rpc.rpc_sync("w1", echo, args=(4,)) == 4
    assert seen._seen_to < 20  # the others were never sent


@pytest.mark.parametrize("way", [by_async, by_remote])
def test_a_full_box_is_waited_for_until_the_timeout(
    pair: list[Agent], stuck: Stuck, way: Callable[..., Any]
) -> None:
    box = pair[0].directory.resolve("w1").outbox
    box.most = 3_000
    numbers = bytes(2_000)
    sent = [rpc.rpc_async("w1", echo, args=(numbers,), **FOREVER)]
    wait_until(lambda: not box.waiting_bytes)  # it is being sent
    sent.append(rpc.rpc_async("w1", echo, args=(numbers,), **FOREVER))
    with pytest.raises(rpc.RpcTimeout, match=r"max_in_flight_bytes is 3000|it was not sent"):
        way("w1", echo, (numbers,), timeout=0.05)
    call = copy_context().copy  # the acting agent is a variable of the context
    with in_threads(
        lambda: call().run(lambda: rpc.rpc_async("w1", echo, args=(7,), **FOREVER).wait())
    ) as results:
        stuck.open()
    assert results == [7]
    assert [future.wait() for future in sent] == [numbers, numbers]


def test_a_loss_ends_waiting_calls(pair: list[Agent], stuck: Stuck) -> None:
    futures = [rpc.rpc_async("w1", echo, args=(number,), **FOREVER) for number in range(20)]
    made = rpc.remote("w1", Account, **FOREVER)
    stuck.break_all("it is gone")
    pair[0].losses.declare_lost(pair[0].directory.resolve("w1"), "it is gone")
    for future in futures:
        with pytest.raises(rpc.PeerLost, match="it is gone"):
            future.wait()
    with pytest.raises((rpc.OwnerDied, rpc.PeerLost)):
        made.to_here()


def test_a_frame_that_is_too_large_is_refused_at_once(
    pair: list[Agent], stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Limits(meta=4_000, body=6_000, buffers=5, buffer=10_000, frame=30_000)
    monkeypatch.setattr(frames, "SENDING_LIMITS", small)
    with pytest.raises(SerializationError, match="bytes"):
        rpc.rpc_async("w1", echo, args=("x" * 10_000,), **FOREVER)
    with pytest.raises(SerializationError, match="bytes"):
        rpc.remote("w1", echo, args=("x" * 10_000,), **FOREVER)
    stuck.open()
    assert rpc.rpc_sync("w1", echo, args=(1,)) == 1


@pytest.mark.parametrize("transport", ["native"])
@pytest.mark.skipif("native" not in TRANSPORTS, reason="one transport is enough")
def test_shutdown_ends_waiting_calls_and_their_thread(
    start: Callable[..., list[Agent]], pair: list[Agent]
) -> None:
    stuck = Stuck(pair[0], links=False)
    with check_no_threads_left("farcall-send-w0"):
        future = rpc.rpc_async("w1", echo, args=(1,), **FOREVER)
        assert stuck.waiting.acquire(timeout=PATIENCE)
        stuck.break_all("this worker has shut down")  # as the endpoint does
        pair[0].shutdown(graceful=False)
        with pytest.raises((rpc.Cancelled, rpc.PeerLost)):
            future.wait()


def test_an_error_while_sending_ends_its_own_call_only(pair: list[Agent], stuck: Stuck) -> None:
    connect = pair[0].links.connect
    broken = iter([True])

    def fail_once(*args: Any) -> Any:
        link = connect(*args)
        with contextlib.suppress(StopIteration):
            if next(broken):
                raise SystemExit
        return link

    pair[0].links.connect = fail_once  # type: ignore[method-assign]
    pair[0].links.linked = lambda _: None  # type: ignore[method-assign]
    first = rpc.rpc_async("w1", echo, args=(1,), **FOREVER)
    second = rpc.rpc_async("w1", echo, args=(2,), **FOREVER)
    stuck.open()
    assert second.wait() == 2
    with pytest.raises(rpc.Cancelled, match="SystemExit"):
        first.wait()


@pytest.mark.parametrize("error", [NotSent, AuthenticationFailed, BadFrame])
def test_callbacks_of_calls_that_could_not_be_sent_may_call(
    pair: list[Agent], error: type[Exception]
) -> None:
    """Call also the same worker: callbacks don't run in the thread that sends to it."""
    connect, linked = pair[0].links.connect, pair[0].links.linked
    may_fail = Gate()

    def fail(*_: Any) -> Any:
        may_fail.wait()
        pair[0].links.connect = connect  # type: ignore[method-assign]
        pair[0].links.linked = linked  # type: ignore[method-assign]
        raise error("for the test")

    pair[0].links.connect = fail  # type: ignore[method-assign]
    pair[0].links.linked = lambda _: None  # type: ignore[method-assign]
    future = rpc.rpc_async("w1", echo, args=(1,), **FOREVER)
    after = future.then(lambda _: rpc.rpc_sync("w1", echo, args=(2,), timeout=0))
    may_fail.open()
    assert after.wait() == 2


# Answers that their caller does not read.


def large(size: int = 1 << 20) -> torch.Tensor:
    return torch.ones(size // 4)


class Answered:
    """Each answer of w1 to w0 waits until it is let out."""

    def __init__(self, agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
        self.agents = agents
        self.opened = threading.Event()
        self.waiting = 0
        callee = agents[1]
        on_request = Agent._on_request
        full = self

        class Full:
            def __init__(self, link: Link) -> None:
                self._link = link

            def __getattr__(self, name: str) -> Any:
                return getattr(self._link, name)

            def send(self, frame: Frame, deadline: float) -> None:
                if not full.opened.is_set():
                    full.waiting += 1
                    left = deadline - outboxes.time.monotonic()
                    if not full.opened.wait(min(max(left, 0.0), PATIENCE)):
                        raise NotSent
                self._link.send(frame, deadline)

        def taken(self: Agent, peer: Peer, link: Any, frame: Frame, request: Any) -> None:
            if self is callee and peer.name == "w0":
                link = Full(link)
            on_request(self, peer, link, frame, request)

        monkeypatch.setattr(Agent, "_on_request", taken)

    @property
    def caller(self) -> Peer:
        peer = self.agents[1].directory.of_incarnation(self.agents[0].me.incarnation)
        assert peer is not None
        return peer


@pytest.fixture
def unread(
    start: Callable[..., list[Agent]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Answered]:
    """Yield the second of three workers, whose answers to the first one wait."""
    agents = start(3, num_worker_threads=2, bounds=Bounds(4 << 20))
    made = Answered(agents, monkeypatch)
    yield made
    made.opened.set()


COUNT = 40
MOST_WAITING = (4 << 20) + 3 * ((1 << 20) + 2 * outboxes.OVERHEAD)


def ask_for_much(unread: Answered, function: Callable[..., Any] = large) -> list[Any]:
    """Make calls whose answers are not read, until functions are held."""
    futures = [rpc.rpc_async("w1", function, **FOREVER) for _ in range(COUNT)]
    wait_until(lambda: len(unread.caller.admission) > 0)
    return futures


def nothing_is_left(unread: Answered) -> bool:
    caller = unread.caller
    return not len(caller.admission) and not caller.admission.waiting_bytes


def test_a_caller_that_does_not_read_costs_the_others_nothing(unread: Answered) -> None:
    futures = ask_for_much(unread)
    # All threads of the callee are free: this would wait forever if both waited for w0.
    with acting_as(unread.agents[2]):
        for _ in range(10):
            assert rpc.rpc_sync("w1", echo, args=(7,), **FOREVER) == 7
    assert 4 << 20 <= unread.caller.admission.waiting_bytes <= MOST_WAITING
    assert not any(future.done() for future in futures)
    unread.opened.set()
    for future in futures:
        assert torch.equal(future.wait(), large())
    wait_until(lambda: nothing_is_left(unread))
    assert not unread.agents[1].coordinator.active


_kept = torch.zeros(1 << 18)


def kept() -> torch.Tensor:
    return _kept


def test_an_answer_that_waits_is_as_it_was_when_the_function_returned(unread: Answered) -> None:
    _kept.zero_()
    futures = ask_for_much(unread, kept)
    _kept.fill_(1.0)
    unread.opened.set()
    values = [float(future.wait().max()) for future in futures]
    assert values.count(0.0) >= 4  # as many as may wait; those held ran later
    assert values.count(1.0) >= 1


_runs: list[None] = []


def count_and_answer() -> torch.Tensor:
    _runs.append(None)
    return large()


def test_answers_that_wait_when_their_caller_is_lost_end(unread: Answered) -> None:
    _runs.clear()
    futures = ask_for_much(unread, count_and_answer)
    caller, callee = unread.caller, unread.agents[1]
    callee.losses.declare_lost(caller, "the test")
    unread.opened.set()
    for future in futures:
        with pytest.raises(rpc.PeerLost):
            future.wait()
    wait_until(lambda: not callee.coordinator.active)
    assert len(_runs) <= 8  # those held did not run
    assert not len(caller.admission)
    assert not caller.admission.waiting_bytes
    with acting_as(unread.agents[2]):
        assert rpc.rpc_sync("w1", echo, args=(7,), **FOREVER) == 7


def test_answers_that_wait_beyond_their_deadline_end(unread: Answered) -> None:
    futures = [rpc.rpc_async("w1", large, timeout=0.5) for _ in range(COUNT)]
    for future in futures:
        with pytest.raises(rpc.RpcTimeout):
            future.wait()
    unread.opened.set()
    wait_until(lambda: nothing_is_left(unread))
    wait_until(lambda: not unread.agents[1].coordinator.active)
    assert rpc.rpc_sync("w1", echo, args=(7,), **FOREVER) == 7


def test_values_that_stay_here_are_made_for_a_caller_that_does_not_read(
    unread: Answered,
) -> None:
    """Make them, since other workers may wait for them."""
    _ = ask_for_much(unread)
    made = rpc.remote("w1", Account)
    owner = unread.agents[1].references
    wait_until(lambda: any(type(value) is Account for value in values_of(owner)))
    unread.opened.set()
    assert type(made.to_here()) is Account


def values_of(references: Any) -> list[Any]:
    return [place._value for place in list(references._values.values())]


class Owned:
    """A value of the callee."""


def owned() -> Any:
    return rpc.RRef(Owned())


def test_references_in_answers_that_are_never_read_are_let_go(unread: Answered) -> None:
    _ = ask_for_much(unread)
    with_references = [rpc.rpc_async("w1", owned, **FOREVER) for _ in range(3)]
    callee = unread.agents[1]
    callee.losses.declare_lost(unread.caller, "the test")
    unread.opened.set()
    for future in with_references:
        with pytest.raises(rpc.PeerLost):
            future.wait()
    wait_until(lambda: not callee.coordinator.active)
    gc.collect()
    wait_until(lambda: not callee.references.statistics()["owned"])


def double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def test_gradients_that_their_worker_does_not_read_cost_the_others_nothing(
    unread: Answered,
) -> None:
    passes = 2 * 2  # twice as many as functions may run at once
    unread.opened.set()
    forward = threading.Barrier(passes + 1)

    def train() -> Any:
        with autograd.context() as context:
            weight = torch.ones(3, requires_grad=True)
            loss = rpc.rpc_sync("w1", double, args=(weight,)).sum()
            forward.wait(PATIENCE)
            forward.wait(PATIENCE)
            autograd.backward(context, [loss])
            return autograd.get_gradients(context)[weight]

    threads = [partial(copy_context().run, train) for _ in range(passes)]
    with in_threads(*threads) as gradients:
        forward.wait(PATIENCE)
        unread.opened.clear()
        before = unread.waiting
        forward.wait(PATIENCE)
        wait_until(lambda: unread.waiting >= before + passes)
        with acting_as(unread.agents[2]):
            assert rpc.rpc_sync("w1", echo, args=(7,), **FOREVER) == 7
        unread.opened.set()
    assert [gradient.tolist() for gradient in gradients] == [[2.0] * 3] * passes


def test_errors_wait_as_values_do(unread: Answered) -> None:
    futures = ask_for_much(unread)
    failing = rpc.rpc_async("w1", echo, **FOREVER)
    unread.opened.set()
    with pytest.raises(TypeError):
        failing.wait()
    for future in futures:
        future.wait()


def test_shutdown_does_not_wait_for_a_caller_that_does_not_read(
    unread: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    _runs.clear()
    endpoint = unread.agents[1].endpoint
    drop = endpoint.drop

    def end_sends(incarnation: int, cause: str) -> None:
        drop(incarnation, cause)
        unread.opened.set()  # as a link that is lost ends what waits for it

    monkeypatch.setattr(endpoint, "drop", end_sends)
    with check_no_threads_left("farcall-send-w1"):
        futures = ask_for_much(unread, count_and_answer)
        unread.agents[1].shutdown(graceful=False)
    for future in futures:
        with pytest.raises(rpc.PeerLost):
            future.wait()
    assert len(_runs) <= 8  # those held did not run
