"""References that are made by a worker which is not known yet: only a thread that needs
the value, or the owner, waits for the store.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from behaviour.helpers import PATIENCE, echo, wait_until
from behaviour.unmet import Store
from farcall import rpc
from farcall.errors import PeerLost, RpcTimeout, SerializationError, UnknownWorker
from farcall.runtime.agent import Agent
from farcall.testing.cluster import acting_as


class Recorder:
    def __init__(self) -> None:
        self.values: list[Any] = []

    def note(self, value: Any) -> list[Any]:
        self.values.append(value)
        return self.values.copy()


def read(recorder: rpc.RRef[Recorder], value: Any) -> Any:
    return recorder.rpc_sync().note(value)


def give_back(value: Any) -> Any:
    return value


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def agents(start: Callable[..., list[Agent]], store: Store) -> list[Agent]:
    """Return three agents, of which the first does not know the second."""
    agents = start(3, find=store.find)
    store.part(agents[0], agents[1].me)
    for agent in agents:
        store.workers |= {agent.me.name: agent.me, agent.me.id: agent.me}
    return agents


def settle(agents: list[Agent]) -> None:
    """Wait until no reference is left, and no call waits."""
    for agent in agents:
        wait_until(lambda agent=agent: not agent.coordinator.active)
        wait_until(lambda agent=agent: not agent.machine.inquiries.open)
    gc.collect()
    for agent in agents:
        wait_until(lambda agent=agent: not any(agent.references.statistics().values()))
        wait_until(lambda agent=agent: not agent.references._values)
        assert not agent.references._sought
        assert not agent.references._creation_errors


@pytest.mark.parametrize("to", ["w1", 1, rpc.WorkerInfo("w1", 1)])
def test_calls_by_a_reference_come_after_the_call_that_makes_it(
    agents: list[Agent], store: Store, to: Any
) -> None:
    recorder = rpc.remote(to, Recorder, concurrency=1)
    futures = [recorder.rpc_async().note(0)]
    noted = recorder.remote().note(1)
    futures.append(rpc.rpc_async(to, read, args=(recorder, 2)))
    futures.append(recorder.rpc_async().note(3))
    assert not any(future.done() for future in futures)
    assert not recorder.is_owner()
    assert not recorder.confirmed_by_owner()
    assert "not confirmed yet" in repr(recorder)
    store.answers.set()
    first, through_itself, last = (future.wait() for future in futures)
    assert first == [0]
    assert noted.to_here() == through_itself[:2] == last[:2] == [0, 1]
    assert (through_itself[-1], last[-1]) == (2, 3)  # either may come first
    assert recorder.owner() == rpc.WorkerInfo("w1", 1)
    assert recorder.owner_name() == "w1"
    assert "owner='w1', confirmed" in repr(recorder)
    del recorder, noted
    settle(agents)


@pytest.mark.parametrize("to", ["w1", 1])
@pytest.mark.parametrize(
    "use",
    [
        lambda rref: rref.to_here(),
        lambda rref: rref.rpc_sync().copy(),
        lambda rref: rpc.rpc_sync("w1", give_back, args=(rref,)).to_here(),
        lambda rref: rpc.rpc_sync("w2", give_back, args=(rref,)).to_here(),
        lambda rref: rref.owner() == rpc.WorkerInfo("w1", 1) and [5],
        lambda rref: rref.owner_name() == "w1" and [5],
        lambda rref: rref._get_type() is list and [5],
    ],
)
def test_uses_that_need_the_owner_wait(
    agents: list[Agent], store: Store, to: Any, use: Callable[[Any], Any]
) -> None:
    rref = rpc.remote(to, echo, args=([5],))
    threading.Timer(0.05, store.answers.set).start()
    assert use(rref) == [5]
    del rref
    settle(agents)


def test_the_name_of_the_owner_is_known_at_once(agents: list[Agent], store: Store) -> None:
    assert rpc.remote("w1", echo, args=(5,)).owner_name() == "w1"
    assert rpc.remote(rpc.WorkerInfo("w1", 1), echo, args=(5,)).owner_name() == "w1"
    store.answers.set()
    settle(agents)


def test_a_reference_that_no_variable_has_any_more(agents: list[Agent], store: Store) -> None:
    recorder = rpc.remote("w1", Recorder)
    last = recorder.rpc_async().note(1)
    del recorder
    gc.collect()
    store.answers.set()
    assert last.wait() == [1]
    settle(agents)


def test_a_third_worker_gets_it_later(agents: list[Agent], store: Store) -> None:
    recorder = rpc.remote("w1", Recorder, concurrency=1)
    futures = [rpc.rpc_async("w2", read, args=(recorder, number)) for number in range(3)]
    nested = rpc.remote("w2", give_back, args=({"in it": recorder},))
    mine = rpc.remote("w0", give_back, args=(recorder,))
    of_nested = nested.rpc_async().get("in it")
    assert mine.is_owner()
    assert not any(future.done() for future in (*futures, of_nested))
    assert rpc.rpc_sync("w2", echo, args=(1,)) == 1  # which does not wait
    store.answers.set()
    assert sorted(len(future.wait()) for future in futures) == [1, 2, 3]
    assert nested.to_here()["in it"].owner_name() == "w1"
    assert mine.to_here().owner_name() == "w1"
    assert sorted(of_nested.wait().rpc_sync().note(3)) == [0, 1, 2, 3]
    del recorder, nested, mine, of_nested, futures
    settle(agents)


def make(to: str) -> Any:
    return rpc.remote(to, echo, args=(5,))


def test_an_answer_waits_for_it(agents: list[Agent], store: Store) -> None:
    with acting_as(agents[2]):
        future = rpc.rpc_async("w0", make, args=("w1",))
        assert not future.done()
        store.answers.set()
        assert future.wait().to_here() == 5
        del future
    settle(agents)


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_an_answer_that_can_not_have_it(agents: list[Agent], store: Store, seconds: float) -> None:
    threading.Timer(seconds, store.answers.set).start()
    text = "result of .*make can't be sent: .* find destination name 'absent'"
    with acting_as(agents[2]), pytest.raises(SerializationError, match=text):
        rpc.rpc_sync("w0", make, args=("absent",))
    settle(agents)


@pytest.mark.parametrize("to", ["nobody", 77])
def test_a_worker_that_there_is_not(agents: list[Agent], store: Store, to: Any) -> None:
    rref = rpc.remote(to, echo, args=(1,))
    later = rpc.rpc_async("w2", give_back, args=(rref,))
    of_method = rref.rpc_async().copy()
    made_of_it = rpc.remote("w2", give_back, args=(rref,))
    store.answers.set()
    text = f"could not find destination .* {to!r}; known workers: 'w0'"
    for future in (later, of_method):
        with pytest.raises(UnknownWorker, match=text):
            future.wait()
    for use in (rref.to_here, rref.owner, made_of_it.to_here, rref.rpc_sync().copy):
        with pytest.raises(UnknownWorker, match=text):
            use()
    with pytest.raises(UnknownWorker, match=text):
        rpc.rpc_sync("w2", give_back, args=(rref,))
    assert "failed: farcall.errors.UnknownWorker" in repr(rref)
    del rref, made_of_it, use
    settle(agents)


def test_a_store_that_is_gone(agents: list[Agent], store: Store) -> None:
    store.is_gone = True
    with pytest.raises(UnknownWorker, match="could not be asked: no process hosts it"):
        rpc.remote("w1", echo, args=(1,)).to_here()
    settle(agents)


def test_a_store_that_is_silent(agents: list[Agent], store: Store) -> None:
    hasty = rpc.remote("w1", echo, args=(1,), timeout=0.1)
    patient = rpc.remote("w1", echo, args=(2,), timeout=0)
    for _ in range(2):
        with pytest.raises(RpcTimeout, match=r"creation .* timed out: .* set timeout \(100 ms\)"):
            hasty.to_here()
    with pytest.raises(RpcTimeout, match="not answered in time"):
        patient.to_here(timeout=0.1)
    with pytest.raises(RpcTimeout, match="set timeout"):
        rpc.rpc_sync("w2", give_back, args=(patient,), timeout=0.1)
    with pytest.raises(RpcTimeout, match=r"set timeout \(100 ms\)"):
        rpc.rpc_async("w2", give_back, args=(patient,), timeout=0.1).wait()
    store.answers.set()
    assert patient.to_here() == 2
    with pytest.raises(RpcTimeout, match="creation"):
        hasty.to_here()
    del hasty, patient
    settle(agents)


def test_an_unknown_name_in_a_group_of_fixed_size(pair: list[Agent]) -> None:
    with pytest.raises(UnknownWorker, match="'nobody'"):
        rpc.remote("nobody", echo, args=(1,))


def test_a_worker_that_is_lost_in_the_moment_of_the_answer(
    agents: list[Agent], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = agents[0].directory.look_up

    def look_up_and_declare_lost(*call: Any) -> Any:
        peer = look_up(*call)
        agents[0].losses.declare_lost(peer, "a test said so")
        return peer

    monkeypatch.setattr(agents[0].directory, "look_up", look_up_and_declare_lost)
    rref = rpc.remote("w1", echo, args=(1,))
    future = rref.rpc_async().copy()
    store.answers.set()
    for use in (rref.to_here, future.wait):
        with pytest.raises(PeerLost, match="a test said so"):
            use()
    assert rref.owner() == rpc.WorkerInfo("w1", 1)


def test_arguments_that_can_not_be_sent(agents: list[Agent], store: Store) -> None:
    store.answers.set()
    with pytest.raises(TypeError, match=r"argument 0 \(generator\)"):
        rpc.remote("w1", echo, args=((n for n in range(3)),))
    settle(agents)


def test_the_error_of_the_function(agents: list[Agent], store: Store) -> None:
    rref = rpc.remote("w1", int, args=("five",))
    store.answers.set()
    with pytest.raises(ValueError, match="five"):
        rref.to_here()
    del rref
    settle(agents)


def test_graceful_shutdown_waits_for_it(agents: list[Agent], store: Store) -> None:
    recorder = rpc.remote("w1", Recorder, timeout=0)
    future = recorder.rpc_async(timeout=0).note(1)
    leaving = threading.Thread(target=agents[0].shutdown)
    leaving.start()
    wait_until(lambda: agents[0].status.is_leaving)
    store.answers.set()
    leaving.join(PATIENCE)
    assert not leaving.is_alive()
    assert future.wait() == [1]


def test_shutdown_ends_it(agents: list[Agent], store: Store) -> None:
    rref = rpc.remote("w1", echo, args=(1,), timeout=0)
    errors: list[BaseException] = []

    def wait() -> None:
        with acting_as(agents[0]):
            try:
                rref.to_here(timeout=0)
            except BaseException as error:
                errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: len(agents[0].machine.inquiries.open.get("w1", ())) == 2)
    agents[0].close()
    waiting.join(PATIENCE)
    assert [type(error) for error in errors] == [rpc.Cancelled]
    for use in (rref.to_here, rref.owner):
        with pytest.raises((rpc.Cancelled, rpc.NotInitialized)):
            use()
