"""Calls to the owners of an optimizer's parameters: to all at once, waiting for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from farcall.rref import RRef
from farcall.runtime.context import CallContext, current, current_agent
from farcall.runtime.future import Future

# Methods that are called without a message on a part of this worker.
CALLED_HERE = frozenset(("step", "norms", "scale"))


class Call(Protocol):
    """Makes a call: waits for its value, or gives a future of it."""

    def __call__(self, wait: bool) -> Any: ...


def attempt(calls: Mapping[str, Call]) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Make calls to owners, and wait for all of them: results and errors, by owner."""
    futures: dict[str, Future[Any]] = {}
    results: dict[str, Any] = {}
    failures: dict[str, Exception] = {}
    last = next(reversed(list(calls)), None)
    for owner, call in calls.items():
        try:
            # Who waits for a single call receives the reply itself; a future's has to be handed
            # over by another thread, which takes longer than all else that a small call does.
            if owner == last:
                results[owner] = call(wait=True)
            else:
                futures[owner] = call(wait=False)
        except Exception as error:  # whatever the owner raised, or is wrong with the arguments
            failures[owner] = error
    for owner, future in futures.items():
        try:
            results[owner] = future.wait()
        except Exception as error:
            failures[owner] = error
    in_order = {owner: results[owner] for owner in calls if owner in results}
    return in_order, {owner: failures[owner] for owner in calls if owner in failures}


def gather(what: str, calls: Mapping[str, Call]) -> dict[str, Any]:
    """The results of `attempt`.

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
    """The first error, with a note that names its worker, the others' errors, and who did it."""
    (owner, error), *others = failures.items()
    note(error, f"{what} failed on worker {owner!r}")
    for other, failure in others:
        note(error, f"... and on worker {other!r}: {type(failure).__name__}: {failure}")
    if done:
        note(error, f"... but not on {', '.join(map(repr, done))}")
    return error


def note(error: BaseException, text: str) -> None:
    """Add a note; once, also if the same error is raised several times, as a reference's is."""
    if text not in getattr(error, "__notes__", ()):
        error.add_note(text)


class Owners:
    """References to an optimizer's parts, by owner, in the order of the parameters."""

    def __init__(self, parts: Mapping[str, RRef[Any]]) -> None:
        self.parts = dict(parts)

    def call(self, what: str, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of all parts with the same arguments: the results by owner."""
        # Our own part last: it can work while the others do.
        owners = sorted(self.parts, key=lambda owner: self.parts[owner].is_owner())
        return gather(what, self.calls(method, dict.fromkeys(owners, args)))

    def call_each(
        self, what: str, method: str, args: Mapping[str, Sequence[Any]]
    ) -> dict[str, Any]:
        """Call a method of some parts, each with arguments of its own."""
        return gather(what, self.calls(method, args))

    def calls(self, method: str, args: Mapping[str, Sequence[Any]]) -> dict[str, Call]:
        """What calls a method of some parts."""
        return {owner: self._call(owner, method, own) for owner, own in args.items()}

    def _call(self, owner: str, method: str, args: Sequence[Any]) -> Call:
        part = self.parts[owner]

        def call(wait: bool) -> Any:
            if wait and method in CALLED_HERE and part.is_owner():
                return getattr(part.local_value(), method)(*args)
            proxy = part.rpc_sync() if wait else part.rpc_async()
            return getattr(proxy, method)(*args)

        return call


def call_workers(
    what: str, function: Callable[..., Any], args: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Call a function on workers, each with arguments of its own: the results by worker."""
    agent = current_agent()

    def call(name: str, own: Sequence[Any], wait: bool) -> Any:
        return (agent.call if wait else agent.call_async)(name, function, own)

    return gather(what, {name: partial(call, name, own) for name, own in args.items()})


@contextmanager
def inside(context_id: int) -> Iterator[None]:
    """Calls made in the block are part of this context, whatever the thread is in otherwise.

    An owner of which the forward pass had no need learns of the context in this way: it has no
    gradients there. Only where a context ended is its id unknown.
    """
    outer = current.get() or CallContext(current_agent())
    token = current.set(outer._replace(gradients=context_id))
    try:
        yield
    finally:
        current.reset(token)
