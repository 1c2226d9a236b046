"""The values of `handle.name`: methods and attributes of an object on another worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, Protocol, TypeVar

from farcall.objects import read_attribute
from farcall.rref import RRef
from farcall.runtime.calls.future import Future
from farcall.runtime.calls.graph_breaks import breaks_graphs, methods_break_graphs
from farcall.runtime.calls.methods import OPERATORS
from farcall.serde import hide_own_frames

P = ParamSpec("P")
R = TypeVar("R")


class _Handle(Protocol):
    """The parts of its handle that a member uses."""

    def _present(self) -> RRef[Any]: ...
    def _when_present(self, call: Callable[[RRef[Any]], Future[Any]]) -> Future[Any]: ...
    def rpc_sync(self) -> Any: ...
    def rpc_async(self) -> Any: ...
    def _find_class(self) -> type[Any] | None: ...


class _OfTheMember:
    """An attribute of each member; the class `ObjectMember` has none, or a fixed one.

    Args:
        read: what a member has.
        of_class: what the class has; None for nothing.
    """

    def __init__(self, read: Callable[[ObjectMember[..., Any]], Any], of_class: str | None) -> None:
        self._read = read
        self._of_class = of_class

    def __get__(self, member: ObjectMember[..., Any] | None, owner: type[Any]) -> Any:
        found = self._of_class if member is None else self._read(member)
        if found is None and member is None:
            raise AttributeError("it belongs to members, not to their class")
        return found


def _signature_of(member: ObjectMember[..., Any]) -> inspect.Signature | None:
    """Return the parameters of the method; None where they are not known."""
    function = _function_of(member)
    try:
        return None if function is None else inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _text_of(member: ObjectMember[..., Any]) -> str | None:
    """Return the signature of the method, and its docstring."""
    function = _function_of(member)
    if function is None:
        return ObjectMember.__doc__
    signature = _signature_of(member) or "(...)"
    return f"{member._name}{signature}\n\n{inspect.getdoc(function) or ''}".rstrip()


def _function_of(member: ObjectMember[..., Any]) -> Any:
    """Return the method, as if bound to an object, by its class; None for an attribute."""
    cls = member._handle._find_class()
    found = inspect.getattr_static(cls, member._name, None)
    if not callable(found) and not isinstance(found, classmethod | staticmethod):
        return None
    try:
        return found.__get__(object(), cls)  # as an object has it: without `self`
    except (AttributeError, TypeError):
        return found


@methods_break_graphs
class ObjectMember(Generic[P, R]):
    """A method or an attribute of an object on another worker. Made by `Handle`s.

    `inspect.signature` and `help` tell of the method if its class can be imported here. They may
    ask the owner for that class, for a second at most.
    """

    __slots__ = ("_handle", "_name")
    __signature__ = _OfTheMember(_signature_of, None)

    def __init__(self, handle: _Handle, name: str) -> None:
        self._handle = handle
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name!r} of {self._handle!r}>"

    if not TYPE_CHECKING:  # type checkers know the attributes of a member

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"{name!r} is asked of {_how_to_use(self)}")

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call it as a method, and return a future of the result."""
        return getattr(self._handle.rpc_async(), self._name)(*args, **kwargs)  # type: ignore[no-any-return]

    def sync(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it as a method, and return the result."""
        return getattr(self._handle.rpc_sync(), self._name)(*args, **kwargs)  # type: ignore[no-any-return]

    def get(self) -> R:
        """Return a copy of it as an attribute."""
        present = self._handle._present()
        return self._read(present, present._agent.call)  # type: ignore[no-any-return]

    def __await__(self) -> Generator[Any, None, R]:
        future = self._handle._when_present(
            lambda present: self._read(present, present._agent.call_async)
        )
        return future.__await__()

    def _read(self, present: RRef[Any], call: Callable[..., Any]) -> Any:
        reference = present._handle
        try:
            return call(reference.to, read_attribute, (reference, self._name))
        except BaseException as error:
            hide_own_frames(error)
            raise


def _how_to_use(member: ObjectMember[..., Any]) -> str:
    name = member._name
    return (
        f"{name!r} of a handle, which was neither called nor read: handle.{name}(...) calls it and "
        f"returns a future, handle.{name}.sync(...) returns the result, and handle.{name}.get() "
        "reads an attribute"
    )


@breaks_graphs
def _refuse(self: ObjectMember[..., Any], *_: object) -> NoReturn:
    raise TypeError(f"an operator or a condition uses {_how_to_use(self)}")


for _operator in OPERATORS.split():
    setattr(ObjectMember, f"__{_operator}__", _refuse)

ObjectMember.__doc__ = _OfTheMember(_text_of, ObjectMember.__doc__)  # type: ignore[assignment]
