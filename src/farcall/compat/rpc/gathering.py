"""How all workers exchange objects: `torch.distributed.rpc.api._all_gather`, and its parts.

The first worker by name collects, and tells the others. With torch, who waits for a worker that
died waits for ever; here all hear of it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

from farcall import rpc as farcall_rpc
from farcall.errors import PeerLost, RpcTimeout
from farcall.runtime.agent import Agent
from farcall.runtime.context import waiting
from farcall.runtime.current import current_agent


class AllGatherStates:
    """What is known of one gathering."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()
        self.error: RuntimeError | None = None

    def fail(self, error: RuntimeError) -> None:
        """End it, if it has not ended."""
        if not self.proceed_signal.is_set():
            self.error = error
            self.proceed_signal.set()


all_worker_names: set[str] = set()
lock = threading.RLock()
numbers: dict[str, int] = {}  # how many gatherings there were, by the names that take part
states_by_id: defaultdict[str, AllGatherStates] = defaultdict(AllGatherStates)


def begin(names: set[str]) -> None:
    """An agent was started, in a group of these workers."""
    all_worker_names.clear()
    all_worker_names.update(names)


def end() -> None:
    """The agent was shut down."""
    numbers.clear()
    states_by_id.clear()


def gather(
    obj: Any, worker_names: set[str] | None, call_seconds: float, wait_seconds: float | None
) -> dict[str, Any]:
    """See `farcall.compat.rpc.api._all_gather`.

    Args:
        call_seconds: limit of each call; 0 for none.
        wait_seconds: limit of the wait for the others; None for none.
    """
    agent = current_agent()
    names = set(worker_names or all_worker_names)
    leader, me = min(names), agent.me.name
    with lock:
        key = "".join(sorted(names))
        number = numbers.get(key, 0)
        numbers[key] = number + 1
    sequence_id = f"{key}{number}"
    call = (sequence_id, me, obj, names)
    if leader != me:
        farcall_rpc.rpc_sync(leader, gather_to_leader, args=call, timeout=call_seconds)
        _wait(agent, sequence_id, {leader}, wait_seconds)
        return _take(sequence_id)
    gather_to_leader(*call)
    _wait(agent, sequence_id, names - {me}, wait_seconds)
    _tell_followers(names - {me}, sequence_id, call_seconds)
    return _take(sequence_id)


def gather_to_leader(
    sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None
) -> None:
    """At the leader: somebody has come."""
    with lock:
        expected = worker_names or all_worker_names
        if worker_name not in expected:
            raise AssertionError(f"{worker_name} is not expected by leader.")
        states = states_by_id[sequence_id]
        if worker_name in states.gathered_objects:
            raise AssertionError(f"{worker_name} reported intent sequence id {sequence_id} twice. ")
        states.gathered_objects[worker_name] = obj
        if expected == set(states.gathered_objects):
            states.proceed_signal.set()


def broadcast_to_followers(
    sequence_id: str, objects_map: dict[str, Any], error: RuntimeError | None = None
) -> None:
    """At a follower: all have come, or they won't."""
    with lock:
        states = states_by_id[sequence_id]
        if states.proceed_signal.is_set():
            raise AssertionError(f"Termination signal sequence id {sequence_id} got set twice.")
        states.gathered_objects = objects_map
        states.error = error
        states.proceed_signal.set()


def _wait(agent: Agent, sequence_id: str, others: set[str], seconds: float | None) -> None:
    """Until it has ended: all have come, one of the others died, or the time is over."""
    with lock:
        states = states_by_id[sequence_id]

    def lost(error: PeerLost) -> None:
        with lock:
            if error.worker in others and error.worker not in states.gathered_objects:
                states.fail(error)

    with agent.losses.hearing(lost), waiting():
        for name in others:
            try:
                peer = agent.directory.resolve(name)
            except PeerLost as error:
                lost(error)
            else:
                if seconds is None:
                    agent.control.watch(peer.incarnation)
        in_time = states.proceed_signal.wait(seconds)
    if not in_time:
        with lock:
            missing = sorted(others - set(states.gathered_objects))
            states.fail(RpcTimeout(f"_all_gather: {missing} did not come within {seconds} s"))


def _tell_followers(names: set[str], sequence_id: str, seconds: float) -> None:
    states = states_by_id[sequence_id]
    # Of one that has failed the objects are of no use, and late ones may still come.
    told = (sequence_id, {} if states.error else states.gathered_objects, states.error)
    futures = {
        name: farcall_rpc.rpc_async(name, broadcast_to_followers, args=told, timeout=seconds)
        for name in names
    }
    errors = []
    for name, future in futures.items():
        try:
            future.wait()
        except RuntimeError as error:
            errors.append((name, error))
    if errors and states.error is None:
        states.error = RuntimeError(
            f"Followers {[name for name, _ in errors]} timed out in _all_gather "
            f"after {seconds:.2f} seconds. The first exception is {errors[0][1]}"
        )


def _take(sequence_id: str) -> dict[str, Any]:
    with lock:
        states = states_by_id.pop(sequence_id)
    if states.error is not None:
        raise states.error
    return states.gathered_objects
