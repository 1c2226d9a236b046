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
from farcall.runtime.context import current_agent


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


_all_worker_names: set[str] = set()
_lock = threading.RLock()
_numbers: dict[str, int] = {}  # how many gatherings there were, by the names that take part
_states: defaultdict[str, AllGatherStates] = defaultdict(AllGatherStates)


def begin(names: set[str]) -> None:
    """An agent was started, in a group of these workers."""
    global _all_worker_names  # noqa: PLW0603
    _all_worker_names = names


def end() -> None:
    """The agent was shut down."""
    _numbers.clear()
    _states.clear()


def gather(
    obj: Any, worker_names: set[str] | None, call_seconds: float, wait_seconds: float | None
) -> dict[str, Any]:
    """See `farcall.compat.rpc.api._all_gather`.

    Args:
        call_seconds: limit of each call; 0 for none.
        wait_seconds: limit of the wait for the others; None for none.
    """
    agent = current_agent()
    names = set(worker_names or _all_worker_names)
    leader, me = min(names), agent.me.name
    with _lock:
        key = "".join(sorted(names))
        number = _numbers.get(key, 0)
        _numbers[key] = number + 1
    sequence_id = f"{key}{number}"
    call = (sequence_id, me, obj, names)
    if leader != me:
        farcall_rpc.rpc_sync(leader, _gather_to_leader, args=call, timeout=call_seconds)
        _wait(agent, sequence_id, {leader}, wait_seconds)
        return _take(sequence_id)
    _gather_to_leader(*call)
    _wait(agent, sequence_id, names - {me}, wait_seconds)
    _tell_followers(names - {me}, sequence_id, call_seconds)
    return _take(sequence_id)


def _gather_to_leader(
    sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None
) -> None:
    """At the leader: somebody has come."""
    with _lock:
        expected = worker_names or _all_worker_names
        if worker_name not in expected:
            raise AssertionError(f"{worker_name} is not expected by leader.")
        states = _states[sequence_id]
        if worker_name in states.gathered_objects:
            raise AssertionError(f"{worker_name} reported intent sequence id {sequence_id} twice. ")
        states.gathered_objects[worker_name] = obj
        if expected == set(states.gathered_objects):
            states.proceed_signal.set()


def _broadcast_to_followers(
    sequence_id: str, objects_map: dict[str, Any], error: RuntimeError | None = None
) -> None:
    """At a follower: all have come, or they won't."""
    with _lock:
        states = _states[sequence_id]
        if states.proceed_signal.is_set():
            raise AssertionError(f"Termination signal sequence id {sequence_id} got set twice.")
        states.gathered_objects = objects_map
        states.error = error
        states.proceed_signal.set()


def _wait(agent: Agent, sequence_id: str, others: set[str], seconds: float | None) -> None:
    """Until it has ended: all have come, one of the others died, or the time is over."""
    with _lock:
        states = _states[sequence_id]

    def lost(error: PeerLost) -> None:
        with _lock:
            if error.worker in others and error.worker not in states.gathered_objects:
                states.fail(error)

    with agent.hearing_of_losses(lost), agent.waiting():
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
        with _lock:
            missing = sorted(others - set(states.gathered_objects))
            states.fail(RpcTimeout(f"_all_gather: {missing} did not come within {seconds} s"))


def _tell_followers(names: set[str], sequence_id: str, seconds: float) -> None:
    states = _states[sequence_id]
    # Of one that has failed the objects are of no use, and late ones may still come.
    told = (sequence_id, {} if states.error else states.gathered_objects, states.error)
    futures = {
        name: farcall_rpc.rpc_async(name, _broadcast_to_followers, args=told, timeout=seconds)
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
    with _lock:
        states = _states.pop(sequence_id)
    if states.error is not None:
        raise states.error
    return states.gathered_objects
