"""A group and its workers, as the driver's program sees them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, Protocol, Self, TypeVar

from farcall import rpc
from farcall.errors import NotInitialized, PeerLost, RpcTimeout
from farcall.groups.endings import OBITUARY_SECONDS
from farcall.groups.mapping import each_or_raise, hand_out
from farcall.ids import WorkerInfo
from farcall.log import get_logger
from farcall.rref import RRef
from farcall.runtime.agent import Agent
from farcall.runtime.calls.future import Future
from farcall.runtime.options.timeouts import UNSET_RPC_TIMEOUT

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

CLOSE_SECONDS = 5.0  # that calls in flight have when a group ends

logger = get_logger("farcall")


class Workers(Protocol):
    """The runner of a group's workers: processes (`Crew`), threads (`Threads`), or Ray."""

    def ended(self) -> set[int]: ...
    def how_it_ended(self, number: int, seconds: float) -> str | None: ...
    def show_output(self) -> None: ...
    def logs(self, name: str, last: int | None) -> list[str]: ...
    def leave(self, patience: float) -> None: ...
    def close(self, patience: float) -> None: ...


class GroupWorker(WorkerInfo):
    """One worker of a group: `group[0]`. Thread-safe.

    Equal to the `WorkerInfo` of the same worker, and accepted wherever a worker is named.

    Attributes:
        name: of the worker.
        id: its number in the group, and its rank.
    """

    _group: Group
    _timeout: float

    def __init__(
        self, group: Group, name: str, number: int, timeout: float = UNSET_RPC_TIMEOUT
    ) -> None:
        super().__init__(name, number)
        object.__setattr__(self, "_group", group)  # a `WorkerInfo` is immutable
        object.__setattr__(self, "_timeout", timeout)

    def __repr__(self) -> str:
        return f"<worker {self.name!r} of {self._group!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "the workers of a group can be used in its driver only; elsewhere call "
            f"rpc.rpc_sync({self.name!r}, ...)"
        )

    def with_timeout(self, seconds: float) -> GroupWorker:
        """Return this worker, with a limit for each call.

        Args:
            seconds: 0 for no limit. A call that takes longer raises `RpcTimeout`.
        """
        return GroupWorker(self._group, self.name, self.id, seconds)

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on the worker and return its result. Its output is shown before.

        Raises:
            BaseException: what the function raised, or what `rpc.rpc_sync` raises. `PeerLost` says
                how the worker's process ended.
        """
        self._group.check_open()
        try:
            result: T = rpc.rpc_sync(self.name, function, args, kwargs, self._timeout)
            return result
        except PeerLost as error:
            self._group.explain(error)
            raise
        finally:
            self._group.show_output()

    def call_async(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Call as `call` does, but return a future at once, which can be awaited and cancelled."""
        self._group.check_open()
        call = rpc.rpc_async(self.name, function, args, kwargs, self._timeout)
        future = call.then(self._explained)
        future.call = call
        return future

    def _explained(self, future: Any) -> Any:
        try:
            return future.value()
        except PeerLost as error:
            self._group.explain(error)
            raise

    def remote(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> RRef[T]:
        """Run a function, or make an object, and leave it on the worker; return a reference.

        `reference.rpc_sync().method(...)` calls its methods there.
        """
        self._group.check_open()
        return rpc.remote(self.name, function, args, kwargs, self._timeout)

    def logs(self, last: int | None = None) -> str:
        """Return what the worker has printed: see `Group.logs`."""
        return self._group.logs(self.id, last)

    @property
    def ended(self) -> str | None:
        """The end of the worker's process, in words; None while it runs."""
        return self._group.how_it_ended(self.id)


class AllWorkers:
    """All workers of a group at once: `group.all`. Thread-safe."""

    def __init__(self, workers: Sequence[GroupWorker], show_output: Callable[[], None]) -> None:
        self._workers = workers
        self._show_output = show_output

    def with_timeout(self, seconds: float) -> AllWorkers:
        """Return all workers, with a limit for each call; 0 for none."""
        workers = [worker.with_timeout(seconds) for worker in self._workers]
        return AllWorkers(workers, self._show_output)

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Run a function on each worker, all at once; return their results, by worker.

        Raises:
            BaseException: what the first worker raised that failed, once all have ended. A note
                says which one.
        """
        futures = self.call_async(function, *args, **kwargs)
        try:
            return each_or_raise(futures, lambda number: f"on {self._workers[number].name!r}")
        finally:
            self._show_output()

    def call_async(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[Future[T]]:
        """Call as `call` does, but return a future for each worker at once."""
        return [worker.call_async(function, *args, **kwargs) for worker in self._workers]

    def remote(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[RRef[T]]:
        """Make an object on each worker; return a reference to each."""
        return [worker.remote(function, *args, **kwargs) for worker in self._workers]


class Group:
    """Workers that `farcall.local` or `farcall.ray.start` has started. Thread-safe.

    `group[0]`, or by name, is a worker, `group.all` all of them. They end with the group: use it as
    a block, or call `close` at the end; a program that ends closes it.

    Attributes:
        all: all workers at once.
    """

    def __init__(self, names: Sequence[str], crew: Workers, agent: Agent) -> None:
        self._crew = crew
        self._agent = agent
        self._pid = os.getpid()
        self._workers = [GroupWorker(self, name, number) for number, name in enumerate(names)]
        self._numbers = {name: number for number, name in enumerate(names)}
        self._is_closed = False
        self.all = AllWorkers(self._workers, crew.show_output)
        atexit.register(self.close)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self)} workers"
        return f"<farcall group, {state}>"

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[GroupWorker]:
        return iter(self._workers)

    def __getitem__(self, which: int | str) -> GroupWorker:
        """Return a worker by its number, from the end if it is negative, or by its name."""
        number = which
        if isinstance(which, str):
            if which not in self._numbers:
                raise KeyError(f"no worker is called {which!r}; there are {list(self._numbers)}")
            number = self._numbers[which]
        try:
            return self._workers[number]  # type: ignore[index]
        except IndexError:
            raise IndexError(f"there is no worker {which}: the group has {len(self)}") from None

    def map(
        self,
        function: Callable[[S], T],
        items: Iterable[S],
        *,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> list[T]:
        """Call a function with each item, on whichever worker is free; return results in order.

        A worker has one item at a time. When a call fails no more items are handed out, the calls
        that run are waited for, and the error of the first item that failed is raised, with a note
        that says which. Ctrl-C, or an error of `items`, cancels the calls that run. No item is
        tried twice. Workers that have died before get no items.

        Args:
            function: is called with one item.
            items: are taken when a worker is free for them.
            timeout: seconds for each call; 0 for no limit.

        Raises:
            PeerLost: a worker died with an item, or all have died.
            BaseException: what the function raised.
        """
        self.check_open()
        ended = self._crew.ended()
        workers = [one.with_timeout(timeout) for one in self._workers if one.id not in ended]
        if not workers:
            self[0].call(int)  # raises how it ended
        try:
            return hand_out(workers, function, items)
        finally:
            self.show_output()

    def logs(self, which: int | str, last: int | None = None) -> str:
        """Return the last lines that a worker has printed, of stdout and stderr; at most 1000.

        With `processes=False` there are none: workers print as the driver does.

        Args:
            which: number or name of the worker.
            last: how many lines; None for all that are kept.
        """
        return "\n".join(self._crew.logs(self[which].name, last))

    def how_it_ended(self, which: int | str) -> str | None:
        """Return how a worker's process ended, in words; None while it runs."""
        return self._crew.how_it_ended(self[which].id, 0)

    def show_output(self) -> None:
        """Show what workers have printed so far."""
        self._crew.show_output()

    def explain(self, error: PeerLost) -> None:
        """Add to an error how the process of the lost worker ended, if that is known soon.

        The driver's own errors say it already (`Losses.obituary`), those that other workers met
        with do not.
        """
        number = self._numbers.get(error.worker)
        if number is None or "its process" in error.cause:
            return
        words = self._crew.how_it_ended(number, OBITUARY_SECONDS)
        if words is not None:
            error.cause = f"{error.cause}; its process ended: {words}"
            error.args = (error.worker, error.cause)

    def check_open(self) -> None:
        """Raise if this group has ended.

        Raises:
            NotInitialized: it has.
        """
        if self._is_closed:
            raise NotInitialized("this group is closed: start a new one")

    def close(self) -> None:
        """End all workers, once the calls in flight have ended, but after 5 seconds anyway.

        May be called again.
        """
        self._end(CLOSE_SECONDS)

    def _end(self, patience: float) -> None:
        if self._is_closed or os.getpid() != self._pid:  # a fork of the driver has its copy
            return
        self._is_closed = True
        atexit.unregister(self.close)
        try:
            if patience and not self._agent.status.is_closed:
                self._crew.leave(patience)
        except RpcTimeout as error:
            logger.warning("functions are still running, the group ends all the same: %s", error)
            patience = 0
        finally:
            try:
                if not self._agent.status.is_closed:
                    rpc.shutdown(graceful=False)
            finally:
                self._crew.close(patience)

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the group: at once if the block failed."""
        self._end(CLOSE_SECONDS if kind is None else 0)
