"""`farcall.rpc`'s functions for the group as a whole: its workers, and their joins and leaves.

As those of `farcall.rpc` they may be called from any thread, and timeouts are in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from farcall.errors import PeerLost
from farcall.ids import Member, WorkerInfo, check_name
from farcall.plain import whole_number
from farcall.runtime.agent import Agent
from farcall.runtime.calls.call_names import own_handler
from farcall.runtime.calls.deferred import Deferred
from farcall.runtime.calls.graph_breaks import breaks_graphs
from farcall.runtime.context import allowed_now, current_context
from farcall.runtime.current import current_agent
from farcall.runtime.inspection import paths
from farcall.runtime.inspection.reports import ARRIVAL, MemberReport
from farcall.runtime.membership.gatherings import Ident
from farcall.runtime.membership.lookup import LOOKUP_SECONDS
from farcall.runtime.membership.roster import Listener, MemberEvent
from farcall.runtime.membership.subscriptions import Membership, Subscription
from farcall.runtime.options.timeouts import UNSET_RPC_TIMEOUT, validate_timeout

__all__ = [
    "all_gather",
    "barrier",
    "explain",
    "gather",
    "membership",
    "on_join",
    "on_leave",
    "wait_for",
    "workers",
]


def __dir__() -> list[str]:
    return __all__


@breaks_graphs
def workers(role: str | None = None) -> list[Member]:
    """Return the workers that are there, this one included, by id.

    In a group whose workers come and go, the store is asked which workers have joined, and the
    workers to which this one has no link are asked whether they are still there. Both take two
    seconds at most: if the store does not answer, newcomers are missing; workers that do not answer
    count as there.

    Args:
        role: only those with this role; None: all.

    Raises:
        NotInitialized: before `init_rpc` or after `shutdown`.
    """
    agent = current_agent()
    agent.executor.collecting.refuse("workers")
    return agent.group.roster.workers(role)


@breaks_graphs
def wait_for(
    *names: str,
    role: str | None = None,
    count: int | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> list[Member]:
    """Block until workers are there, and return them.

        rpc.wait_for("w1", "w2", timeout=30)
        trainers = rpc.wait_for(role="trainer", count=3)

    Args:
        names: the workers to wait for. They are returned in this order.
        role: without names: wait for workers of this role, and return all that are there then, by
            id. With names: a worker of another role does not count.
        count: without names: how many to wait for, this worker included if it has the role; 1 by
            default.
        timeout: seconds; 0 for no limit.

    Raises:
        RpcTimeout: some workers have not come in time; the message names them.
        UnknownWorker, PeerLost: in a group of fixed size: there is no such worker, or it is gone.
        Cancelled: this worker was shut down meanwhile.
        ValueError, TypeError, NotInitialized: the question makes no sense.
    """
    if not names and role is None and count is None:
        raise TypeError("wait_for needs names, or role= or count=")
    if names and count is not None:
        raise TypeError("wait_for takes names or count=, not both")
    names = tuple(check_name(name) for name in names)
    if count is not None:
        count = whole_number("count", count, 1)
    agent = current_agent()
    agent.executor.collecting.refuse("wait_for")
    seconds = _seconds_of(agent, timeout)
    return agent.group.roster.wait_for(names, role, count or 1, seconds)


def _seconds_of(agent: Agent, timeout: float) -> float:
    seconds = validate_timeout(timeout, allow_unset=True)
    return agent.status.rpc_timeout if seconds == UNSET_RPC_TIMEOUT else seconds


@breaks_graphs
def explain(
    to: str | int | WorkerInfo, *, measure: bool = False, timeout: float = UNSET_RPC_TIMEOUT
) -> MemberReport:
    """Return a report on a worker and the path that calls take there; print it to read it.

        print(rpc.explain("w1", measure=True))

    The worker may be lost; then the result says why. If it lives and there is no link yet, a link
    is made, as for a call; if that fails, the result says so.

    Args:
        to: name, id or `WorkerInfo` of a worker; may be this one.
        measure: also measure latency and bandwidth, by calls that run nothing of the user's: for
            some tenths of a second, with up to 64 MB.
        timeout: for the link, and for each of these calls, in seconds; 0 for no limit.

    Raises:
        UnknownWorker: there is no such worker, and there was none.
        RpcTimeout: the worker is not known here, and the store does not answer in time.
        ValueError, TypeError, NotInitialized: the question makes no sense.
    """
    agent = current_agent()
    seconds = _seconds_of(agent, timeout)
    agent.executor.collecting.refuse("explain")
    try:
        peer = agent.directory.resolve(to, seconds or LOOKUP_SECONDS)
    except PeerLost:
        lost = agent.directory.of_key(to)
        if lost is None:
            raise
        return paths.look_at(agent, lost)
    return (paths.measured if measure else paths.reached)(agent, peer, seconds)


@breaks_graphs
def on_join(function: Callable[[MemberEvent], object], *, present: bool = False) -> Subscription:
    """Have a function called with a `MemberEvent` for each worker that joins from now on.

    Functions are called one after the other, without locks, in a thread of the agent that serves
    them alone; they may use the functions of this module. Their exceptions are logged. For each
    name, joins and leaves alternate, and a join comes first. A newcomer is noticed within some
    tenths of a second. There are no events about this worker itself.

    Args:
        function: the function. It is kept until the returned subscription is closed, or the agent
            is shut down.
        present: call the function first for the workers that are there already.

    Returns:
        A subscription, which ends the calls: call it, or use it in a `with` block.

    Raises:
        NotInitialized: before `init_rpc` or after `shutdown`.
        TypeError: `function` is not callable.
    """
    return _subscribe(function, joins=True, present=present)


@breaks_graphs
def on_leave(function: Callable[[MemberEvent], object]) -> Subscription:
    """Have a function called with a `MemberEvent` for each worker that is gone: see `on_join`.

    The event's `kind` says how: "left" after its shutdown, "lost" if it died or was cut off,
    "refused" if one of the two workers does not want the other; `why` has the reason in words. To
    notice losses, this worker makes a link to every other one.
    """
    return _subscribe(function, leaves=True)


def _subscribe(
    function: Callable[[MemberEvent], object],
    *,
    joins: bool = False,
    leaves: bool = False,
    present: bool = False,
) -> Subscription:
    if not callable(function):
        raise TypeError(f"a function is needed, not {type(function).__name__}")
    agent = current_agent()
    agent.executor.collecting.refuse("on_join" if joins else "on_leave")
    listener = Listener(function, joins=joins, leaves=leaves)
    agent.group.roster.listen(listener, present=present)
    return Subscription(agent.group.roster, listener)


@breaks_graphs
def membership(*, present: bool = False) -> Membership:
    """Return an iterator over the events from now on: `async for event in rpc.membership()`.

    The events are those of `on_join` and `on_leave`, in order; none is missed between two steps.
    The iterator ends when the agent is shut down, or by its `close`. One task at a time may use it.

    Args:
        present: begin with a "joined" for each other worker that is there already.

    Raises:
        NotInitialized: before `init_rpc` or after `shutdown`.
    """
    agent = current_agent()
    agent.executor.collecting.refuse("membership")
    return Membership(agent.group.roster, present=present)


GRACE_SECONDS = 0.5  # of the leader of a gathering beyond its end, to name the missing


@breaks_graphs
def all_gather(
    value: object,
    workers: Sequence[str | WorkerInfo] | None = None,
    *,
    role: str | None = None,
    key: str = "",
    timeout: float = UNSET_RPC_TIMEOUT,
) -> dict[str, Any]:
    """Return the values that some workers pass, by name, once all of them have called this.

        losses = rpc.all_gather(loss, role="trainer")

    All must name the same workers, themselves included. They may call this again and again: the
    first calls of all belong together, then the second calls, and so on, whatever other workers do.
    Threads of one worker that gather at the same time, with the same workers, each need a `key`.

    Args:
        value: anything that a call can take.
        workers: the workers that take part; None: the workers with the role.
        role: without `workers`: all workers that have this role now; None: all that are there.
            Where workers come and go, call `wait_for` first: workers that see different members
            never meet.
        key: tells gatherings of the same workers apart.
        timeout: seconds; 0 for no limit.

    Raises:
        RpcTimeout: not all have come in time, and all get this error; the message names the
            missing.
        PeerLost: one of the workers died or left, and all the others get this error.
        UnknownWorker, Cancelled, SerializationError: as for a call.
        ValueError, TypeError, NotInitialized: the call makes no sense.
    """
    gathered: dict[str, Any] = _gather("all_gather", value, workers, role, key, None, timeout)
    return gathered


@breaks_graphs
def gather(
    value: object,
    to: str | WorkerInfo,
    workers: Sequence[str | WorkerInfo] | None = None,
    *,
    role: str | None = None,
    key: str = "",
    timeout: float = UNSET_RPC_TIMEOUT,
) -> dict[str, Any] | None:
    """Gather as `all_gather` does, but for one of the workers; the others get None.

    Args:
        to: the worker that gets the values, one of those that take part.
    """
    gathered: dict[str, Any] | None = _gather("gather", value, workers, role, key, to, timeout)
    return gathered


@breaks_graphs
def barrier(
    workers: Sequence[str | WorkerInfo] | None = None,
    *,
    role: str | None = None,
    key: str = "",
    timeout: float = UNSET_RPC_TIMEOUT,
) -> None:
    """Block until all of some workers have called this. Arguments and errors: see `all_gather`."""
    _gather("barrier", None, workers, role, key, None, timeout)


def _gather(
    kind: str,
    value: object,
    workers: Sequence[str | WorkerInfo] | None,
    role: str | None,
    key: str,
    to: str | WorkerInfo | None,
    timeout: float,
) -> Any:
    agent = current_agent()
    agent.executor.collecting.refuse(kind)
    seconds = _seconds_of(agent, timeout)
    names = _names(agent, workers, role)
    leader = min(names) if to is None else _name_of(to)
    for name in (agent.me.name, leader):
        if name not in names:
            raise ValueError(f"{kind}: {name!r} is none of {', '.join(sorted(names))}")
    ident = agent.group.gatherings.begin(f"{kind} {key}", names, leader)
    wants_all = kind == "all_gather" or (kind == "gather" and leader == agent.me.name)
    arguments = (tuple(ident), value, seconds, wants_all)
    return agent.call(leader, arrive, arguments, None, seconds and seconds + GRACE_SECONDS)


def _names(
    agent: Agent, workers: Sequence[str | WorkerInfo] | None, role: str | None
) -> Sequence[str]:
    if workers is None:
        return [member.name for member in agent.group.roster.workers(role)]
    if isinstance(workers, str) or role is not None:
        raise TypeError("pass a list of workers, or role=, which is one word")
    names = [_name_of(worker) for worker in workers]
    if len(set(names)) < len(names):
        raise ValueError(f"a worker is named twice: {', '.join(names)}")
    return names


def _name_of(worker: str | WorkerInfo) -> str:
    return worker.name if isinstance(worker, WorkerInfo) else check_name(worker)


@own_handler(ARRIVAL, checks_itself=True)
def arrive(ident: Any, value: object, seconds: float, wants_all: bool) -> Deferred:
    """Note, at the leader of a gathering, that the caller has come. It can't come as another."""
    only, context = allowed_now(), current_context()
    assert context is not None
    assert context.served is not None
    name = context.served.peer.name
    meant = Ident.of(ident, name)
    if only is not None:
        only.check(f"{__name__}:{meant.kind}")
    seconds = validate_timeout(seconds)
    gatherings = current_agent().group.gatherings
    return Deferred(gatherings.arrive(meant, name, value, seconds, wants_all=wants_all))
