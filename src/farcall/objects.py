"""Objects with a name, and their end by force: `remote(name=)`, `kill`."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch

from farcall.errors import (
    Cancelled,
    DuplicateName,
    FarcallError,
    PeerLost,
    RpcTimeout,
    UnknownObject,
)
from farcall.ids import RefId
from farcall.plain import plain_text
from farcall.rref import RRef, awaited
from farcall.runtime.agent import Agent
from farcall.runtime.calls.call_names import own_handler
from farcall.runtime.calls.deferred import result_of
from farcall.runtime.calls.graph_breaks import breaks_graphs
from farcall.runtime.calls.policy import check_maker, method_of
from farcall.runtime.calls.server_call import ServerCall
from farcall.runtime.context import CallBeingServed, allowed_now, current_context, waiting
from farcall.runtime.current import current_agent
from farcall.runtime.membership.peers import Peer
from farcall.runtime.options.timeouts import UNSET_RPC_TIMEOUT, seconds_or_default
from farcall.runtime.references.values import ValueSlot
from farcall.serde import hide_own_frames, name_of_class
from farcall.wire.messages import Reference

MOST_CHARACTERS = 200
GAP = 8  # so many ids without a worker, one after the other, and there are no more workers
# Statements and builtins that use an object: the special method that each takes, and a function.
_USES: dict[str, tuple[str, Callable[..., Any]]] = {
    "len": ("__len__", len),
    "iter": ("__iter__", list),
    "getitem": ("__getitem__", operator.getitem),
    "setitem": ("__setitem__", operator.setitem),
    "delitem": ("__delitem__", operator.delitem),
    "contains": ("__contains__", operator.contains),
}
STORE_SECONDS = 1.0  # that the store has to say who has an id


def look_up_object(agent: Agent, name: str, seconds: float | None) -> RRef[Any]:
    """Do the work of `rpc.get_object`. Timeouts are in seconds; 0: no limit, None: the default."""
    name = checked(name)
    deadline, seconds, _ = agent.limits.of_call(seconds)
    here = agent.names.find(name)
    found = None if here is None else _reference_to(agent, here)
    if found is not None:
        return found
    silent = []
    for worker, answer in ask_all(agent, find_object, (name,), deadline):
        if isinstance(answer, RRef):
            return answer
        if isinstance(answer, RpcTimeout):
            silent.append(worker)
    if silent:
        workers = ", ".join(map(repr, silent))
        raise RpcTimeout(
            f"no object of the name {name!r} was found within {seconds:g} s; no answer of {workers}"
        )
    raise UnknownObject(f"no worker has an object of the name {name!r}")


@breaks_graphs
def kill(rref: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Drop the object of a reference at once, whichever workers have references to it.

    Every later use of a reference to the object raises `Cancelled`, which names the worker that has
    killed it; so do calls of its methods that wait for their turn. A method that is running goes on
    to its end. The name of the object is free again. The call has no effect if the object could not
    be made or was killed before.

    An object that `remote` is still making is cancelled. If the function or class has not been
    called yet, it is not called any more. A function that is running can see the cancellation by
    `rpc.cancelled()`; its calls are cancelled with it, and its result is dropped.

    Args:
        rref: any reference to the object.
        timeout: seconds; 0 for no limit, -1 for the default given to `init_rpc`.

    Raises:
        OwnerDied: the owner of the object is gone, and the object with it.
        RpcTimeout: the owner did not answer in time.
        Refused: a policy of the owner does not list `rpc.kill`.
    """
    try:
        seconds = seconds_or_default(timeout)
        if not isinstance(rref, RRef):
            raise TypeError(f"rref must be an RRef, not {type(rref).__name__}")
        rref._agent.executor.collecting.refuse("kill")
        rref = rref._present(seconds)
        if rref.is_owner():
            _end(rref, current_agent().me.name)
        else:
            agent = rref._agent
            agent.references.check_usable(rref._handle)
            agent.call(rref._handle.to, kill_object, ("", rref), None, seconds)
    except BaseException as error:
        hide_own_frames(error)
        raise


def _end(rref: RRef[Any], killer: str) -> None:
    """Drop an object of this worker, and stop the call that is to make it."""
    calls = rref._agent.coordinator.going_on  # before the drop: it ends the wait for a future
    rref._slot.kill(Cancelled(f"the object of this reference was killed by {killer}"))
    for call in calls:
        if isinstance(call, ServerCall) and call.result_ref == rref._handle.ref:
            call.cancel(by_user=True)
    rref._agent.names.on_killed(rref._handle.ref)


def checked(name: object) -> str:
    """Return a name that a user gave.

    Raises:
        TypeError, ValueError: it can't be the name of an object.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of an object must be a str, not {type(name).__name__}")
    if not 0 < len(name) <= MOST_CHARACTERS:
        raise ValueError(f"the name of an object has 1 to {MOST_CHARACTERS} characters: {name!r}")
    return plain_text(name)


def named(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the call that makes an object with a name: the function, and its arguments."""
    return make_named, (checked(name), function, tuple(args), dict(kwargs or {}))


def ask_all(
    agent: Agent, function: Callable[..., Any], args: tuple[Any, ...], deadline: float
) -> Iterator[tuple[str, Any]]:
    """Ask all other workers. Yield what each answers, or its error, in the order of arrival."""
    asked = {agent.me.incarnation}
    for more in (agent.directory.live, partial(_unmet, agent)):
        answers: SimpleQueue[tuple[Peer, torch.futures.Future[Any]]] = SimpleQueue()
        to_come = 0
        for peer in more():
            if peer.worker.incarnation not in asked:
                asked.add(peer.worker.incarnation)
                left = max(deadline - time.monotonic(), 1e-3)
                future = agent.call_async(peer.name, function, args, None, left)
                future.add_done_callback(partial(_note, answers, peer))
                to_come += 1
        for _ in range(to_come):
            with waiting():
                peer, answered = answers.get()
            try:
                answer = answered.value()
            except PeerLost:
                continue  # and its objects with it
            except FarcallError as error:
                answer = error
            yield peer.name, answer


def _note(answers: SimpleQueue[Any], peer: Peer, future: torch.futures.Future[Any]) -> None:
    answers.put((peer, future))


def _unmet(agent: Agent) -> Iterator[Peer]:
    """Yield the workers that only the store knows, of a group that is not fixed."""
    missing = 0
    for id in count():
        if missing == GAP or not agent.directory.can_ask(id):
            return
        try:
            began = time.monotonic()
            yield agent.directory.resolve(id, STORE_SECONDS)
            missing = 0
        except RpcTimeout:
            return
        except FarcallError:
            if time.monotonic() - began >= STORE_SECONDS:
                return  # the store is gone
            missing += 1


# Functions that run on the workers that are asked.


def _call_being_served() -> CallBeingServed:
    context = current_context()
    assert context is not None
    assert context.served is not None
    return context.served


@own_handler("the object of a name", checks_itself=True)
def find_object(name: str) -> RRef[Any] | None:
    """Handler of `look_up_object`."""
    only = allowed_now()
    if only is not None:
        only.check("farcall.supervision.api:get_object")
    agent = current_agent()
    ref = agent.names.find(name)
    return None if ref is None else _reference_to(agent, ref)


def _reference_to(agent: Agent, ref: RefId) -> RRef[Any] | None:
    me = agent.me
    reference = Reference(ref.minted_by, ref.number, me.incarnation, me.name, me.id)
    (handle,) = agent.references.handles((reference,))
    return RRef.of(handle) if agent.references.slot_of(ref) is not None else None


@own_handler("whether a name of objects is free", checks_itself=True)
def is_free(name: str, rival: str, rival_id: int) -> bool:
    """Return whether a name is free here: a worker asks that has taken it."""
    return current_agent().names.is_free(name, rival, rival_id)


@own_handler("the making of an object with a name", checks_itself=True, users_arguments=2)
def make_named(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Handler of `remote(name=)`."""
    ref = _call_being_served().result_ref
    agent = current_agent()
    assert ref is not None
    check_maker(allowed_now(), function)
    agent.names.take(name, ref)
    try:
        ask_for_name(agent, name)
        agent.names.confirm(name, ref)
    except BaseException:
        agent.names.give_up(name, ref)
        raise
    return result_of(function, function(*args, **kwargs))


def ask_for_name(agent: Agent, name: str) -> None:
    """Ask all other workers for a name that was taken here.

    Raises:
        DuplicateName: one of them has it.
        RpcTimeout: one of them does not say.
    """
    me = agent.me
    deadline, _, _ = agent.limits.of_call(None)
    for worker, answer in ask_all(agent, is_free, (name, me.name, me.id), deadline):
        if answer is False:
            raise DuplicateName(f"the name {name!r} is in use by an object of worker {worker!r}")
        if isinstance(answer, FarcallError):
            raise answer


def check_reference(given: object) -> None:
    """Raise TypeError unless a caller has sent a reference: handlers use the slot that it has."""
    if not issubclass(type(given), RRef):
        raise TypeError(f"a reference is needed here, not {type(given).__name__}")


@own_handler("the end of an object", checks_itself=True)
def kill_object(_: str, rref: RRef[Any]) -> None:
    """Handler of `kill`. The reference is not the first argument: so it waits for no turn."""
    only = allowed_now()
    if only is not None:
        only.check("farcall.objects:kill")
    check_reference(rref)
    _end(rref, _call_being_served().peer.name)


@own_handler("the use of a remote value", on_reference=True)
def use_value(slot: ValueSlot, use: str, args: tuple[Any, ...]) -> Any:
    """Handler of the statements and builtins that take a handle of `farcall.actors`."""
    method, function = _USES[use]
    value = slot.get() if slot.is_ready else awaited(slot)
    only = allowed_now()
    if only is not None:
        method_of(only, value, method)
    return function(value, *args)


@own_handler("an attribute of a remote value", on_reference=True)
def read_attribute(slot: ValueSlot, name: str) -> Any:
    """Handler of the attributes of handles of `farcall.actors`."""
    value = slot.get() if slot.is_ready else awaited(slot)
    only = allowed_now()
    if only is not None:
        only.check(f"{name_of_class(type(value))}.{name}")
    return getattr(value, name)


@own_handler("what a remote value has", checks_itself=True)
def describe_value(_: str, rref: RRef[Any]) -> tuple[type[Any], tuple[str, ...]]:
    """Handler of `dir` of a handle: its class, and the public attributes that the value itself has.

    The reference is not the first argument: so it waits for no turn.
    """
    check_reference(rref)
    value = awaited(rref._slot)
    names = () if allowed_now() is not None else tuple(getattr(value, "__dict__", ()))
    return type(value), tuple(name for name in names if name[:1] != "_")
