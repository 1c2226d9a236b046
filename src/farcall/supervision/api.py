"""`rpc.supervise`, and `rpc.get_object`, whose references follow supervised objects."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from farcall.errors import RpcTimeout, UnknownWorker
from farcall.ids import WorkerInfo
from farcall.objects import checked, look_up_object
from farcall.plain import plain_text, whole_number
from farcall.protocol.supervision import Strategy
from farcall.rref import RRef
from farcall.runtime.agent import Agent
from farcall.runtime.calls.call_checks import check_concurrency
from farcall.runtime.calls.future import Future
from farcall.runtime.calls.graph_breaks import breaks_graphs
from farcall.runtime.current import current_agent
from farcall.runtime.options.timeouts import UNSET_RPC_TIMEOUT, seconds_or_default, validate_timeout
from farcall.serde import hide_own_frames
from farcall.supervision.children import Child, Snapshot
from farcall.supervision.following import FollowingRRef, learn
from farcall.supervision.handlers import supervisors_of
from farcall.supervision.plans import ChildSpec, Spec

T = TypeVar("T")


@breaks_graphs
def get_object(name: str, timeout: float = UNSET_RPC_TIMEOUT, *, follow: bool = False) -> RRef[Any]:
    """Return a reference to the object that was made with `remote(..., name=name)`.

    The reference counts as any other: the object lives as long as there is a reference to it. This
    worker asks all others; between workers that have met, neither rank 0 nor the store is needed.

    Args:
        name: of the object.
        timeout: seconds; 0 for no limit, -1 for the default given to `init_rpc`.
        follow: for a supervised object: when the object is made again, the reference leads to the
            new one, and waits meanwhile. Other references raise OwnerDied then.

    Raises:
        UnknownObject: no worker has an object of that name, or, with `follow`, supervises one.
        RpcTimeout: no worker that answered in time has such an object; the message names the
            others.
        NotInitialized: before `init_rpc` or after `shutdown`.
    """
    try:
        agent = current_agent()
        agent.executor.collecting.refuse("get_object")
        seconds = seconds_or_default(timeout)
        if not follow:
            return look_up_object(agent, name, seconds)
        name = checked(name)
        if supervisors_of(agent).state_of(name) is None:
            learn(agent, name, agent.limits.of_call(seconds)[0])
        return FollowingRRef.to(agent, name)
    except BaseException as error:
        hide_own_frames(error)
        raise


@overload
def supervise(
    factory: Sequence[Child],
    *,
    restarts: int = 3,
    per: float = 60.0,
    strategy: str = "one_for_one",
    wait: float = 10.0,
    follow: bool = False,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> list[RRef[Any]]: ...
@overload
def supervise(
    factory: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    on: str | WorkerInfo,
    name: str | None = None,
    restarts: int = 3,
    per: float = 60.0,
    strategy: str = "one_for_one",
    snapshot: float | Snapshot | None = None,
    concurrency: int | None = None,
    wait: float = 10.0,
    follow: bool = False,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[T]: ...
@breaks_graphs
def supervise(
    factory: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    on: str | WorkerInfo = "",
    name: str | None = None,
    restarts: int = 3,
    per: float = 60.0,
    strategy: str = "one_for_one",
    snapshot: float | Snapshot | None = None,
    concurrency: int | None = None,
    wait: float = 10.0,
    follow: bool = False,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Make an object on a worker, and make it again whenever its worker dies or leaves.

    The calling worker becomes the supervisor, and keeps the object alive. If the supervisor dies or
    leaves, too, another worker takes over: the one that has been in the group longest. `supervise`
    returns only when another worker could take over, unless this worker is alone, or no other one
    can. The object is made again on the worker of the same name, if that is started again; else on
    another worker of its role. Changes of the object since its last snapshot are lost. `rpc.kill`
    ends the object, and nothing is made again.

    Args:
        factory: what makes the object: a class or function. Or a list of `Child`, each with the
            arguments up to `concurrency` that belong to one object: then a list of references is
            returned, in that order, and they are made in that order.
        args, kwargs: of the factory. They are kept, to make the object again.
        on: the name of a worker; if none that is there has it, a role: any worker with it will do.
        name: by which every worker finds the object, see `get_object`; None: one is made up.
        restarts: how many restarts are allowed within `per` seconds. With one more, all is given
            up: living objects are dropped, and their users get OwnerDied. A death counts once, and
            so does each failed attempt to make an object.
        per: seconds.
        strategy: the objects that are made again when one of several is lost: "one_for_one": that
            one; "all": all, each from its last snapshot; "rest": that one and those after it.
        snapshot: seconds between two copies of the object, or a `Snapshot`, which says how its
            state is read and restored. They are kept by this worker and two others that do not
            own the object; None: the object is made from scratch.
        concurrency: see `remote`. With 1, a snapshot is taken between two calls, not during one.
        wait: seconds that a worker has to come back if `on` is its name, before another one of its
            role gets the object. In a group of fixed size none comes back.
        follow: return references that lead to the new object when it is made again: see
            `get_object`.
        timeout: seconds until all has been made the first time, and another worker could take
            over; 0 for no limit.

    Raises:
        The exception of the factory, if an object can't be made the first time.
        DuplicateName: another object has the name.
        UnknownWorker: there is no such worker, and no such role.
        RpcTimeout: not all objects were made in time; those that were made are dropped.
        ValueError, TypeError, NotInitialized: the arguments make no sense.
    """
    try:
        several = isinstance(factory, list | tuple)
        only = Child(factory, args, kwargs, on, name, snapshot, concurrency)
        if several and only != Child(factory):
            raise TypeError("what belongs to one object is said in its Child")
        children = factory if several else [only]
        agent = current_agent()
        agent.executor.collecting.refuse("supervise")
        spec = _spec_of(agent, children, restarts, per, strategy, validate_timeout(wait))
        references = _start(agent, spec, seconds_or_default(timeout), follow=follow)
        return references if several else references[0]
    except BaseException as error:
        hide_own_frames(error)
        raise


def _start(agent: Agent, spec: Spec, seconds: float | None, *, follow: bool) -> list[RRef[Any]]:
    supervisors = supervisors_of(agent)
    started: Future[None] = Future()
    _, limit, _ = agent.limits.of_call(seconds)
    supervisors.begin(spec, started)
    if limit:
        late = RpcTimeout(f"supervise: not all was made, and known elsewhere, within {limit:g} s")
        agent.group.later.post(lambda: supervisors.fail_start(spec.key, late), limit)
    started.wait()
    names = [child.name for child in spec.children]
    if follow:
        return [FollowingRRef.to(agent, name) for name in names]
    return [FollowingRRef.to(agent, name)._present(seconds) for name in names]


def _spec_of(
    agent: Agent,
    children: Sequence[Child],
    restarts: object,
    per: float,
    strategy: str,
    wait: float,
) -> Spec:
    if not children:
        raise ValueError("supervise needs an object to supervise")
    restarts = whole_number("restarts", restarts, 0)
    if validate_timeout(per) <= 0:
        raise ValueError("per must be a number of seconds above 0")
    if strategy not in [one.value for one in Strategy]:
        known = ", ".join(repr(one.value) for one in Strategy)
        raise ValueError(f"strategy must be one of {known}, not {strategy!r}")
    strategy = Strategy(strategy).value
    specs = tuple(_child_spec(agent, child) for child in children)
    names = [child.name for child in specs]
    if len(set(names)) < len(names):
        raise ValueError(f"two objects have one name: {', '.join(names)}")
    return Spec(secrets.randbits(62), specs, strategy, restarts, float(per), wait)


def _child_spec(agent: Agent, child: Child) -> ChildSpec:
    if not isinstance(child, Child):
        raise TypeError(f"supervise takes a function or Child objects, not {type(child).__name__}")
    if not callable(child.factory):
        raise TypeError(f"the factory must be callable, not {type(child.factory).__name__}")
    kind = getattr(child.factory, "__name__", "object")
    name = f"{kind}-{secrets.token_hex(4)}" if child.name is None else checked(child.name)
    snapshot = child.snapshot
    if snapshot is not None and not isinstance(snapshot, Snapshot):
        snapshot = Snapshot(snapshot)
    return ChildSpec(
        name,
        child.factory,
        tuple(child.args),
        dict(child.kwargs or {}),
        _target(agent, child.on),
        check_concurrency(child.concurrency),
        float(snapshot.every) if snapshot else 0.0,
        (snapshot and snapshot.save) or "",
        (snapshot and snapshot.load) or "",
    )


def _target(agent: Agent, on: object) -> tuple[str, str]:
    """Return the name and the role of the workers that are meant: see `Target`."""
    if isinstance(on, WorkerInfo):
        on = on.name
    if not isinstance(on, str) or not on:
        raise TypeError("supervise needs on=, the name of a worker or a role")
    on = plain_text(on)
    there = agent.group.roster.workers(None)
    named = next((worker for worker in there if worker.name == on), None)
    if named is not None:
        return on, named.role
    if any(worker.role == on for worker in there):
        return "", on
    known = ", ".join(f"{one.name!r} ({one.role or 'no role'})" for one in there)
    raise UnknownWorker(f"no worker has the name or the role {on!r}; there are {known}")
