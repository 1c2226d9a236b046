"""Handles of objects on other workers, and how they are made. A handle wraps an RRef."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, overload

from farcall import rpc
from farcall.actors.members import ObjectMember
from farcall.objects import describe_value, use_value
from farcall.rref import RRef, call_named
from farcall.runtime.agent import Agent
from farcall.runtime.calls.future import Future
from farcall.runtime.calls.graph_breaks import breaks_graphs, methods_break_graphs
from farcall.runtime.options.timeouts import UNSET_RPC_TIMEOUT
from farcall.runtime.references.handles import RefHandle
from farcall.serde import hide_own_frames, own_type
from farcall.supervision.following import FollowingRRef

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

_CONCURRENCY = "__farcall_concurrency__"
DESCRIBE_SECONDS = 1.0  # that the owner has to say what the object has, for `dir` and the like


@overload
def actor(cls: type[T], /) -> type[T]: ...
@overload
def actor(*, concurrency: int) -> Callable[[type[T]], type[T]]: ...
@breaks_graphs
def actor(cls: type[Any] | None = None, /, *, concurrency: int = 1) -> Any:
    """Mark a class whose objects `spawn` makes, and say how many calls of one run at once.

    The class stays as it is: made directly, its objects are ordinary ones.

    Args:
        cls: the class.
        concurrency: how many methods of one object run at once; 1 if it is not given.
    """

    def mark(cls: type[T]) -> type[T]:
        setattr(cls, _CONCURRENCY, concurrency)
        return cls

    return mark if cls is None else mark(cls)


@overload
def spawn(
    to: rpc.Worker,
    cls: Callable[..., T],
    /,
    *args: Any,
    name: str | None,
    concurrency: int | None = None,
    **kwargs: Any,
) -> Handle[T]: ...
@overload
def spawn(
    to: rpc.Worker,
    cls: Callable[..., T],
    /,
    *args: Any,
    name: str | None = None,
    concurrency: int | None,
    **kwargs: Any,
) -> Handle[T]: ...
@overload
def spawn(
    to: rpc.Worker, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> Handle[T]: ...
@breaks_graphs  # type: ignore[misc]  # mypy sees no place for a `ParamSpec` in `Any`
def spawn(
    to: rpc.Worker,
    cls: Callable[..., T],
    /,
    *args: Any,
    name: str | None = None,
    concurrency: int | None = None,
    **kwargs: Any,
) -> Handle[T]:
    """Make an object on a worker and return its handle at once. See `rpc.remote`.

    Args:
        to: name, id or `WorkerInfo` of a worker; may be this one.
        cls: its class, or a function that returns it.
        args, kwargs: of the class. Pass a `name` or `concurrency` of the class itself by position.
        name: see `rpc.remote`.
        concurrency: how many calls of its methods run at once; None for what `actor` says, or 1.

    Raises:
        ValueError, TypeError, UnknownWorker, NotInitialized: the call makes no sense.
    """
    at_once = getattr(cls, _CONCURRENCY, 1) if concurrency is None else concurrency
    made = handle(rpc.remote(to, cls, args, kwargs, name=name, concurrency=at_once))
    made._class = cls if isinstance(cls, type) else None
    return made


@breaks_graphs
def handle(rref: RRef[T]) -> Handle[T]:
    """Return a handle of the object of a reference, such as `rpc.get_object` returns.

    The handle of a reference that follows (`follow=True`) follows, too.
    """
    if isinstance(rref, FollowingHandle):
        return rref
    if isinstance(rref, FollowingRRef):
        return FollowingHandle.along(rref)
    return Handle.of(rref._handle)


@methods_break_graphs
class Handle(RRef[T]):
    """A reference whose attributes are those of the object.

    `handle.method(...)` is a future of the result, `handle.method.sync(...)` the result,
    `await handle.attribute` or `handle.attribute.get()` an attribute. `len`, `in`, indexing and
    iteration work, and wait, if the object has them. Attributes that an `RRef` has itself (`owner`,
    `to_here` and so on) are those of the reference. Everything else is as of an `RRef`: it may be
    passed in arguments and results, keeps the object, and raises what it raises. Thread-safe.

    `dir(handle)` lists the public attributes of the object, too. It asks the owner, for a second at
    most; without an answer it lists those of the class, if this worker knows it.
    """

    __slots__ = ("_class",)
    _class: type[Any] | None  # of the object, if it is known here

    @classmethod
    def of(cls, handle: RefHandle) -> Self:
        """Return the handle for a reference's handle of an agent."""
        made = super().of(handle)
        made._class = None
        return made

    def __getattr__(self, name: str) -> ObjectMember[..., Any]:
        if name[:1] == "_":
            raise AttributeError(f"{name!r} is private to the object that the handle leads to")
        if name == "getdoc" and not hasattr(self._class, name):
            raise AttributeError("'getdoc' is what IPython calls on all objects, if they have it")
        return ObjectMember(self, name)

    def __dir__(self) -> list[str]:
        names = set(super().__dir__())
        names.update(self._describe())
        if self._class is not None:
            names.update(name for name in dir(self._class) if name[0] != "_")
        return sorted(names)

    def _describe(self) -> tuple[str, ...]:
        """Ask the owner for the object's class, and its other public attributes."""
        try:
            reference = self._handle
            args: tuple[Any, ...] = ("", RRef.of(reference))
            asked = self._agent.call(reference.to, describe_value, args, None, DESCRIBE_SECONDS)
        except Exception:
            return ()  # the completion of a name wants no error
        self._class, names = asked
        return names  # type: ignore[no-any-return]

    def _find_class(self) -> type[Any] | None:
        """Return the class of the object, for the signatures and texts of its members."""
        if self._class is None:
            self._describe()
        return self._class

    def call(
        self, method: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        """`handle.method(...)` for type checkers: `handle.call(Buffer.sample, 3)`."""
        return call_named(self.rpc_async(), method.__name__, args, kwargs)  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return Handle.of, (self._handle,)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return int(self._use("len"))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._use("iter"))

    def __getitem__(self, key: Any) -> Any:
        return self._use("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._use("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self._use("delitem", key)

    def __contains__(self, item: object) -> bool:
        return bool(self._use("contains", item))

    def _use(self, use: str, *args: Any) -> Any:
        try:
            reference = self._handle
            return self._agent.call(reference.to, use_value, (reference, use, args))
        except BaseException as error:
            hide_own_frames(error)
            raise


own_type(Handle, lambda made: made._handle, RefHandle, Handle.of)


@methods_break_graphs
class FollowingHandle(Handle[T]):
    """A handle whose reference leads to the new object when it is made again. See `handle`."""

    __slots__ = ("_followed",)
    _followed: FollowingRRef[T]
    _follows = True

    @classmethod
    def along(cls, followed: FollowingRRef[T]) -> Self:
        """Return the handle for a reference that follows."""
        made = cls.__new__(cls)
        made._class = None
        made._followed = followed
        return made

    def __reduce__(self) -> Any:
        return FollowingHandle.along, (self._followed,)

    def __repr__(self) -> str:
        return f"<handle of {self._followed!r}>"

    @property
    def _handle(self) -> RefHandle:  # type: ignore[override]
        return self._followed._handle

    @property
    def _agent(self) -> Agent:
        return self._followed._agent

    def _present(self, seconds: float | None = None) -> RRef[T]:
        return self._followed._present(seconds)

    def _when_present(self, call: Callable[[RRef[T]], Future[Any]]) -> Future[Any]:
        return self._followed._when_present(call)

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """See `RRef.to_here`."""
        return self._followed.to_here(timeout)

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT, **more: Any) -> Any:
        """See `RRef.rpc_sync`; `retry` as of the reference that is followed."""
        return self._followed.rpc_sync(timeout, **more)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT, **more: Any) -> Any:
        """See `RRef.rpc_async`; `retry` as of the reference that is followed."""
        return self._followed.rpc_async(timeout, **more)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """See `RRef.remote`."""
        return self._followed.remote(timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """See `RRef.backward`."""
        self._followed.backward(dist_autograd_ctx_id, retain_graph)

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        return self._followed._get_type(timeout, blocking)


# Strict workers take it by the name of the object, as the reference that it follows along.
own_type(FollowingHandle, lambda made: made._followed, FollowingRRef, FollowingHandle.along)
