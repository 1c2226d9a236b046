"""Questions of supervising workers to others, and a worker's knowledge of supervisions."""

from __future__ import annotations

from typing import Any

from farcall.objects import ask_for_name, check_reference
from farcall.protocol.standing import Edition, Number, SupervisionState
from farcall.rref import RRef
from farcall.runtime.agent import Agent
from farcall.runtime.calls.call_names import own_handler
from farcall.runtime.calls.deferred import Deferred
from farcall.runtime.calls.future import Future, complete_with
from farcall.runtime.calls.policy import check_maker, method_of
from farcall.runtime.context import allowed_now, current_context
from farcall.runtime.current import current_agent
from farcall.runtime.references.values import ValueSlot
from farcall.supervision.plans import Remote, Spec, is_usable
from farcall.supervision.supervisors import Supervisors

SUPERVISE = "farcall.supervision.api:supervise"  # what a policy lists


def supervisors_of(agent: Agent) -> Supervisors:
    """Return what an agent knows of supervisions."""
    return agent.group.extension(Supervisors, lambda: Supervisors(agent, REMOTE))


def _here() -> Supervisors:
    only = allowed_now()
    if only is not None:
        only.check(SUPERVISE)
    return supervisors_of(current_agent())


@own_handler("the making of a supervised object", checks_itself=True)
def make(
    at: tuple[int, tuple[int, int, int], str, str],
    state: tuple[Any, ...],
    factory: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    saved: tuple[bool, Any],
) -> Any:
    """Make a child: with a factory, or from its last snapshot."""
    child, edition, name, load = at
    heard = SupervisionState.of(state)
    context = current_context()
    assert context is not None
    assert context.served is not None
    ref = context.served.result_ref
    assert ref is not None
    here, agent = _here(), current_agent()
    check_maker(allowed_now(), factory)
    here.make(heard, child, Edition(*edition), ref)
    agent.names.take(name, ref)
    try:
        if edition[2] == 1:  # later ones follow an object that had the name
            ask_for_name(agent, name)
        agent.names.confirm(name, ref)
        is_saved, snapshot = saved
        if is_saved and not load:
            return snapshot
        made = factory(*args, **kwargs)
        if is_saved:
            method_of(allowed_now(), made, load)(snapshot)
    except BaseException:
        agent.names.give_up(name, ref)
        raise
    return made


@own_handler("the making of a supervised object", checks_itself=True)
def wait_until_made(_: str, rref: RRef[Any]) -> Any:
    """Return when a child is made; raise why it could not be. The reference waits for no turn."""
    check_reference(rref)
    future: Future[None] = Future()

    def made(slot: ValueSlot) -> None:
        try:
            slot.get()
        except BaseException as error:
            complete_with(future, error)
        else:
            future.set_result(None)

    rref._slot.when_ready(made)
    return Deferred(future)


@own_handler("a snapshot of a supervised object", on_reference=True)
def save(slot: ValueSlot, method: str) -> Any:
    """Return the state of a child. In its turn, if the object lets only some calls run at once."""
    _here()
    value = slot.get()
    return method_of(allowed_now(), value, method)() if method else value


@own_handler("a snapshot of a supervised object", checks_itself=True)
def keep(key: int, child: int, number: Number, state: Any) -> None:
    """Keep a snapshot, in case the supervisor dies."""
    _here().keep(key, child, (number[0], number[1], number[2], number[3]), state)


@own_handler("a supervision", checks_itself=True)
def adopt(spec: tuple[Any, ...], state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Keep the plan of a supervision; return a `SupervisionAnswer`."""
    return _here().adopt(SupervisionState.of(state), Spec.of(spec)).plain()


@own_handler("a supervision", checks_itself=True)
def hear(state: tuple[Any, ...], passes_on: bool) -> tuple[Any, ...]:
    """Hear how a supervision is; return a `SupervisionAnswer`.

    Args:
        passes_on: see `Knowledge.hear`.
    """
    return _here().hear(SupervisionState.of(state), passes_on=passes_on).plain()


@own_handler("a supervision", checks_itself=True)
def killed(key: int, child: int, edition: tuple[int, int, int]) -> None:
    """Hear that the user has killed a child."""
    _here().killed(key, child, Edition(*edition))


@own_handler("a supervision", checks_itself=True)
def state_of(name: str) -> tuple[Any, ...] | None:
    """Return how the supervision of an object is, if it is known here."""
    state = _here().state_of(name)
    return None if state is None else state.plain(is_usable)


REMOTE = Remote(make, wait_until_made, save, keep, adopt, hear, killed, state_of)
