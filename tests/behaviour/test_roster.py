"""Know who is there: `rpc.workers`, `wait_for`, `on_join`, `on_leave`, `membership`."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from behaviour.helpers import PATIENCE, Box, echo, wait_until
from behaviour.open_group import OpenGroup
from farcall import rpc
from farcall.errors import Cancelled, PeerLost, RpcTimeout, UnknownWorker
from farcall.ids import Worker
from farcall.runtime.agent import Agent
from farcall.runtime.membership.lookup import StoreIsLate
from farcall.testing.cluster import acting_as
from farcall.transport.base import Event

SHORT = 0.3  # seconds in which no worker comes


@pytest.fixture
def group() -> Iterator[OpenGroup]:
    group = OpenGroup()
    yield group
    group.close()


@pytest.fixture
def boss(group: OpenGroup) -> Iterator[Agent]:
    agent = group.join("boss", "boss")
    with acting_as(agent):
        yield agent


def kinds(box: Box, count: int) -> list[tuple[str, str]]:
    return [(event.kind, event.worker.name) for event in box.wait_for(count)]


def die(agent: Agent) -> None:
    """Let the process die: its links end without a goodbye, and its address is free."""
    agent.endpoint.close()


# workers


def test_workers_says_name_id_role_host_and_pid(group: OpenGroup, boss: Agent) -> None:
    group.join("t0", "trainer")
    here = rpc.workers()
    assert [(one.name, one.id, one.role, one.pid) for one in here] == [
        ("boss", 0, "boss", boss.me.pid),
        ("t0", 1, "trainer", boss.me.pid),
    ]
    assert here[0].host == here[1].host != ""
    assert [one.name for one in rpc.workers("trainer")] == ["t0"]
    assert rpc.workers(role="none") == []


@pytest.mark.usefixtures("boss")
def test_a_member_stands_for_its_worker(group: OpenGroup) -> None:
    group.join("t0", "trainer")
    [member] = rpc.workers("trainer")
    assert rpc.rpc_sync(member, echo, args=(1,)) == 1
    assert member == rpc.get_worker_info("t0")
    assert hash(member) == hash(rpc.get_worker_info(member))
    again = pickle.loads(pickle.dumps(member))
    assert (again.role, again.host, again.pid) == (member.role, member.host, member.pid)


@pytest.mark.usefixtures("boss")
def test_one_that_left_or_died_is_no_worker(group: OpenGroup) -> None:
    """End workers that were never called, so that no link tells of their end."""
    leaves, dies = group.join("leaves"), group.join("dies")
    leaves.shutdown()
    die(dies)
    assert [one.name for one in rpc.workers()] == ["boss"]


@pytest.mark.usefixtures("boss")
def test_one_that_died_and_was_not_noticed_is_no_worker_later(group: OpenGroup) -> None:
    dies = group.join("dies")
    assert len(rpc.workers()) == 2
    die(dies)
    assert [one.name for one in rpc.workers()] == ["boss"]


def test_a_dialler_is_known_with_its_role(group: OpenGroup, boss: Agent) -> None:
    other = group.join("t0", "trainer")
    with acting_as(other):
        rpc.rpc_sync("boss", echo, args=(0,))
    boss.group.roster._roll_call._everybody = silent
    [member] = rpc.workers("trainer")
    assert (member.name, member.pid) == ("t0", boss.me.pid)


def silent(deadline: float) -> list[Worker]:
    raise StoreIsLate("it has not answered in time")


def test_workers_of_a_fixed_group(trio: list[Agent]) -> None:
    assert [one.name for one in rpc.workers()] == ["w0", "w1", "w2"]
    trio[1].close()
    assert [one.name for one in rpc.workers()] == ["w0", "w2"]


# wait_for


@pytest.mark.usefixtures("boss")
def test_wait_for_names_that_come_later(group: OpenGroup) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiter = pool.submit(waits, group.agents[0], "b", "a")
        group.join("a")
        group.join("b")
        assert [one.name for one in waiter.result(PATIENCE)] == ["b", "a"]


def waits(agent: Agent, *names: str, **more: object) -> list[rpc.Member]:
    with acting_as(agent):
        return rpc.wait_for(*names, timeout=PATIENCE, **more)  # type: ignore[arg-type]


def test_wait_for_so_many_of_a_role(group: OpenGroup, boss: Agent) -> None:
    group.join("t0", "trainer")
    group.join("other")
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(waits, boss, role="trainer", count=2)
        group.join("t1", "trainer")
        assert [one.name for one in waiter.result(PATIENCE)] == ["t0", "t1"]


@pytest.mark.usefixtures("boss")
def test_wait_for_names_the_missing_workers(group: OpenGroup) -> None:
    group.join("t0", "trainer")
    rpc.wait_for("t0", timeout=PATIENCE)  # it is known from now on
    with pytest.raises(RpcTimeout, match=r"0\.3 s for 'a', 'b'; there are 'boss' .*'t0' \(train"):
        rpc.wait_for("t0", "a", "b", timeout=SHORT)
    with pytest.raises(RpcTimeout, match="for 2 of 3 workers of role 'trainer'"):
        rpc.wait_for(role="trainer", count=3, timeout=SHORT)
    with pytest.raises(RpcTimeout, match=r"'t0' \(with role 'ps'\)"):
        rpc.wait_for("t0", role="ps", timeout=SHORT)


def test_wait_for_has_the_agents_timeout(group: OpenGroup) -> None:
    with acting_as(group.join("boss", rpc_timeout=SHORT)), pytest.raises(RpcTimeout):
        rpc.wait_for("a")


@pytest.mark.usefixtures("boss")
def test_wait_for_is_not_content_with_the_dead(group: OpenGroup) -> None:
    """Wait although the store has the record of a worker that died, until it comes back."""
    die(group.join("a"))
    with pytest.raises(RpcTimeout, match="'a'"):
        rpc.wait_for("a", timeout=SHORT)
    again = group.join("a")
    [member] = rpc.wait_for("a", timeout=PATIENCE)
    assert rpc.rpc_sync(member, echo, args=(1,)) == 1
    assert again.status.is_closed is False


def test_wait_for_ends_with_the_agent(group: OpenGroup, boss: Agent) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(waits, boss, "nobody")
        wait_until(lambda: boss.group.roster._awaited == 1)
        boss.close()
        with pytest.raises(Cancelled):
            waiter.result(PATIENCE)


def test_wait_for_in_a_fixed_group_says_at_once_that_no_worker_will_come(trio: list[Agent]) -> None:
    assert [one.id for one in rpc.wait_for("w2", "w1")] == [2, 1]
    assert len(rpc.wait_for(count=3)) == 3
    with pytest.raises(UnknownWorker, match="'w9'"):
        rpc.wait_for("w1", "w9", timeout=0)
    with pytest.raises(UnknownWorker, match="1 of 4 workers"):
        rpc.wait_for(count=4, timeout=0)
    trio[1].close()
    with pytest.raises(PeerLost, match="'w1'"):
        rpc.wait_for("w1", timeout=0)


@pytest.mark.usefixtures("boss")
@pytest.mark.parametrize(
    ("names", "more"),
    [((), {}), (("a",), {"count": 1}), ((), {"count": 0}), ((), {"count": True}), (("a b",), {})],
)
def test_wait_for_refuses_nonsense(names: tuple[str, ...], more: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        rpc.wait_for(*names, **more)  # type: ignore[arg-type]


# on_join, on_leave


@pytest.mark.usefixtures("boss")
def test_joins_and_leaves_are_told_once_and_in_order(group: OpenGroup) -> None:
    group.join("before")
    box = Box()
    rpc.on_join(box.put)
    rpc.on_leave(box.put)
    leaves = group.join("leaves", "trainer")
    assert kinds(box, 1) == [("joined", "leaves")]
    leaves.shutdown()
    assert kinds(box, 2)[1] == ("left", "leaves")
    dies = group.join("dies")
    box.wait_for(3)
    wait_until(lambda: bool(group.agents[0].links._endpoint.linked(dies.me)))
    die(dies)
    assert kinds(box, 4)[2:] == [("joined", "dies"), ("lost", "dies")]
    group.join("dies")
    assert kinds(box, 5)[4:] == [("joined", "dies")]
    assert box.things[0].worker.role == "trainer"
    assert box.things[1].why in ("it has shut down", "it has left the group")
    assert box.things[3].why


@pytest.mark.usefixtures("boss")
def test_workers_that_were_there_before_are_told_of_if_wanted(group: OpenGroup) -> None:
    group.join("before")
    box = Box()
    with rpc.on_join(box.put, present=True):
        assert kinds(box, 1) == [("joined", "before")]


@pytest.mark.usefixtures("boss")
def test_a_refused_worker_has_gone_so(group: OpenGroup) -> None:
    other = group.join("other")
    other.losses.admit = lambda *_: "the test says so"  # type: ignore[method-assign]
    box = Box()
    rpc.on_leave(box.put)
    assert kinds(box, 1) == [("refused", "other")]
    assert "the test says so" in box.things[0].why


@pytest.mark.usefixtures("boss")
@pytest.mark.parametrize("end", ["call", "with"])
def test_a_subscription_ends(group: OpenGroup, end: str) -> None:
    box, others = Box(), Box()
    subscription = rpc.on_join(box.put)
    rpc.on_join(others.put)
    if end == "call":
        subscription()
    else:
        with subscription:
            pass
    group.join("late")
    others.wait_for(1)
    assert box.things == []
    assert "closed" in repr(subscription)


def test_an_error_of_a_function_is_logged(
    group: OpenGroup, boss: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    box = Box()
    rpc.on_join(fail)
    rpc.on_join(box.put)
    group.join("a")
    group.join("b")
    assert kinds(box, 2) == [("joined", "a"), ("joined", "b")]
    assert "the test says so" in caplog.text
    assert boss.status.is_closed is False


def fail(event: rpc.MemberEvent) -> None:
    raise SystemExit("the test says so")


def test_functions_may_call_and_hold_no_lock(group: OpenGroup, boss: Agent) -> None:
    box, tried = Box(), threading.Event()

    def hear(event: rpc.MemberEvent) -> None:
        box.put((rpc.rpc_sync(event.worker, echo, args=(1,)), threading.current_thread().name))
        box.put(rpc.workers())
        assert tried.wait(PATIENCE)

    rpc.on_join(hear)
    group.join("a")
    (answer, thread), here = box.wait_for(2)
    assert answer == 1
    assert thread.startswith("farcall-members-boss")
    assert [one.name for one in here] == ["boss", "a"]
    assert threading.current_thread().name != thread
    # Another thread may have the lock for a moment; this function goes on meanwhile.
    assert boss.group.roster._changed.acquire(timeout=PATIENCE / 2)
    boss.group.roster._changed.release()
    tried.set()


@pytest.mark.usefixtures("boss")
def test_no_thread_asks_the_store_when_no_program_listens(group: OpenGroup) -> None:
    roster = group.agents[0].group.roster
    subscription = rpc.on_join(print)
    wait_until(lambda: roster._is_looking)
    subscription()
    wait_until(lambda: not roster._is_looking)


def test_leaves_in_a_fixed_group(trio: list[Agent]) -> None:
    box = Box()
    rpc.on_join(box.put)
    rpc.on_leave(box.put)
    rpc.rpc_sync("w2", echo, args=(0,))  # both ends have the link, so w2 says goodbye by it
    trio[2].close()
    assert kinds(box, 1) == [("left", "w2")]


@pytest.mark.usefixtures("boss")
def test_one_that_leaves_while_its_link_is_made_has_left(group: OpenGroup) -> None:
    box = Box()
    rpc.on_leave(box.put)
    late = group.join("late")
    rpc.rpc_sync("late", echo, args=(0,))
    late._teardown._on_close()  # its record is gone, and the new link hears no goodbye
    die(late)
    assert kinds(box, 1) == [("left", "late")]


def test_one_that_refuses_a_link_since_it_shuts_down_has_left(trio: list[Agent]) -> None:
    trio[2].status.is_closed = True
    box = Box()
    rpc.on_leave(box.put)
    assert [(*one[:1], one.worker.name, one.why) for one in box.wait_for(1)] == [
        ("left", "w2", "it has shut down")
    ]
    trio[2].status.is_closed = False


def test_one_whose_goodbye_is_not_read_yet_has_left(
    trio: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look for links to it in the moment between the end of its link and the news of that."""
    first, second, _ = trio
    goes_on, read, gone = threading.Event(), first.handle, Box()

    def read_later(event: Event) -> None:
        assert goes_on.wait(PATIENCE)
        read(event)

    with acting_as(first), rpc.on_leave(gone.put):
        assert rpc.rpc_sync("w1", echo, args=(1,)) == 1
        monkeypatch.setattr(first, "handle", read_later)
        second.shutdown(graceful=False)
        rpc.workers()
        goes_on.set()
        assert kinds(gone, 1) == [("left", "w1")]


# membership


@pytest.mark.usefixtures("boss")
def test_events_can_be_awaited(group: OpenGroup) -> None:
    group.join("before")
    events = rpc.membership(present=True)

    async def listen(joins: Callable[[], object]) -> list[tuple[str, str]]:
        seen: list[tuple[str, str]] = []
        async for event in events:
            seen.append((event.kind, event.worker.name))
            if len(seen) == 1:
                joins()
            if len(seen) == 2:
                group.agents[-1].shutdown()
            if len(seen) == 3:
                events.close()
        return seen

    seen = asyncio.run(listen(lambda: group.join("late")))
    assert seen == [("joined", "before"), ("joined", "late"), ("left", "late")]


def test_the_iterator_ends_with_the_agent(boss: Agent) -> None:
    events = rpc.membership()

    async def listen() -> None:
        task = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        await asyncio.to_thread(boss.close)
        with pytest.raises(StopAsyncIteration):
            await task

    asyncio.run(listen())


def test_an_iterator_that_is_dropped_hears_nothing(boss: Agent) -> None:
    events = rpc.membership()
    [listener] = boss.group.roster._listeners
    del events
    gc.collect()
    assert listener.is_open is False
    wait_until(lambda: not boss.group.roster._is_looking)
