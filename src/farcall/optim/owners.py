"""Calls to the owners of an optimizer's parameters: to all at once, waiting for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from farcall.rref import RRef, call_method
from farcall.runtime.calls.future import Future
from farcall.runtime.context import CallContext, current_context, reset_context, set_context
from farcall.runtime.current import current_agent
from farcall.serde import add_note, message_of, notes_of

R = TypeVar("R")

# Methods that are called without a message on a part of this worker.
CALLED_HERE = frozenset(("step", "norms", "scale"))


class OwnerCall(Protocol):
    """A call to an owner."""

    is_here: bool  # it is no message: it works in this thread

    def wait(self, meanwhile: Callable[[], None] | None = None) -> Any:
        """Make it: its value. `meanwhile` is called while the owner works."""

    def start(self) -> Future[Any]:
        """Make it: a future of its value."""


def attempt(calls: Mapping[str, OwnerCall]) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Make calls to owners, and wait for all of them: results and errors, by owner.

    The calling thread does its own part while the others work. Of those it waits for one by itself:
    a future's value has to be handed over by another thread, which takes longer than all else that
    a small call does.
    """
    results: dict[str, Any] = {}
    failures: dict[str, Exception] = {}
    here: list[str] = []
    others: list[str] = []
    for owner, call in calls.items():
        (here if call.is_here else others).append(owner)

    def make(owner: str, wait: Callable[..., Any], *args: Any) -> None:
        try:
            results[owner] = wait(*args)
        except Exception as error:  # whatever the owner raised, or is wrong with the arguments
            failures[owner] = error

    def do_own() -> None:
        while here:
            owner = here.pop()
            make(owner, calls[owner].wait)

    futures: dict[str, Future[Any]] = {}
    for owner in others[:-1]:
        try:
            futures[owner] = calls[owner].start()
        except Exception as error:  # the arguments are wrong
            failures[owner] = error
    if others:
        make(others[-1], calls[others[-1]].wait, do_own)
    do_own()  # if it could not be sent
    for owner, future in futures.items():
        make(owner, future.wait)
    if len(calls) > 1:
        results = {owner: results[owner] for owner in calls if owner in results}
        failures = {owner: failures[owner] for owner in calls if owner in failures}
    return results, failures


def gather(what: str, calls: Mapping[str, OwnerCall]) -> dict[str, Any]:
    """Return the results of `attempt`.

    Args:
        what: is done there, for errors.

    Raises:
        Exception: what the first owner that failed raised; see `explained`.
    """
    results, failures = attempt(calls)
    if failures:
        raise explained(what, failures, list(results))
    return results


def explained(what: str, failures: Mapping[str, Exception], done: Sequence[str]) -> Exception:
    """Return the first error, with notes of its worker, other errors, and the workers done."""
    (owner, error), *others = failures.items()
    note(error, f"{what} failed on worker {owner!r}")
    for other, failure in others:
        note(error, f"... and on worker {other!r}: {type(failure).__name__}: {message_of(failure)}")
    if done:
        note(error, f"... but not on {', '.join(map(repr, done))}")
    return error


def note(error: BaseException, text: str) -> None:
    """Add a note; once, also if the same error is raised several times, as a reference's is."""
    if text not in notes_of(error):
        add_note(error, text)


class Owners:
    """References to an optimizer's parts, by owner, in the order of the parameters."""

    def __init__(self, parts: Mapping[str, RRef[Any]]) -> None:
        self.parts = dict(parts)

    def call(self, what: str, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of all parts with the same arguments: the results by owner."""
        return gather(what, self.calls(method, dict.fromkeys(self.parts, args)))

    def call_each(
        self, what: str, method: str, args: Mapping[str, Sequence[Any]]
    ) -> dict[str, Any]:
        """Call a method of some parts, each with arguments of its own."""
        return gather(what, self.calls(method, args))

    def calls(self, method: str, args: Mapping[str, Sequence[Any]]) -> dict[str, OwnerCall]:
        """Return functions that call a method of some parts."""
        return {owner: _PartCall(self.parts[owner], method, own) for owner, own in args.items()}


class _PartCall:
    """A call of a method of a part."""

    def __init__(self, part: RRef[Any], method: str, args: Sequence[Any]) -> None:
        self.is_here = method in CALLED_HERE and part.is_owner()
        self._part = part
        self._method = method
        self._args = args

    def wait(self, meanwhile: Callable[[], None] | None = None) -> Any:
        if self.is_here:
            return getattr(self._part.local_value(), self._method)(*self._args)
        handle = self._part._handle
        call: tuple[Any, ...] = (handle, self._method, self._args, {})
        agent = handle.references.agent
        return agent.call(handle.to, call_method, call, meanwhile=meanwhile)

    def start(self) -> Future[Any]:
        future: Future[Any] = getattr(self._part.rpc_async(), self._method)(*self._args)
        return future


class _WorkerCall:
    """A call of a function on a worker."""

    is_here = False

    def __init__(self, worker: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self._call = worker, function, args

    def wait(self, meanwhile: Callable[[], None] | None = None) -> Any:
        return current_agent().call(*self._call, meanwhile=meanwhile)

    def start(self) -> Future[Any]:
        return current_agent().call_async(*self._call)


def call_workers(
    what: str, function: Callable[..., Any], args: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Call a function on workers, each with arguments of its own: the results by worker."""
    return gather(what, {name: _WorkerCall(name, function, own) for name, own in args.items()})


def call_inside(context_id: int, function: Callable[..., R], *args: Any) -> R:
    """Call it: calls that it makes are part of this context, whatever the thread is in otherwise.

    An owner of which the forward pass had no need learns of the context in this way: it has no
    gradients there. Only where a context ended is its id unknown.
    """
    outer = current_context() or CallContext(current_agent())
    if outer.gradients == context_id:
        return function(*args)
    token = set_context(replace(outer, gradients=context_id))
    try:
        return function(*args)
    finally:
        reset_context(token)
