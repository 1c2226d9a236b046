"""farcall's own handlers: how messages name their calls. Runs no code of the user.

The layers above register theirs with `own_handler`, and are named nowhere below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

# The call that a deadline is inherited from: the function of its request, what `method_of` gives
# for it, and the name of its caller.
Served = tuple[str, str, str]

F = TypeVar("F", bound=Callable[..., Any])


class _Handler(NamedTuple):
    """The names in messages of requests for one of farcall's own handlers."""

    call: str
    result: str
    users_arguments: int | None
    checks_itself: bool
    on_reference: bool


# By the name in requests. Filled while farcall's modules are imported, and never changed.
_HANDLERS: dict[str, _Handler] = {"": _Handler("a function sent by value", "", None, False, False)}
# Handlers whose second argument is the name of a method.
OF_METHODS: dict[str, str] = {}


def own_handler(
    call: str,
    *,
    of_method: str = "",
    users_arguments: int | None = None,
    result: str = "",
    checks_itself: bool = False,
    on_reference: bool = False,
) -> Callable[[F], F]:
    """Register a function of farcall's that other workers call: how messages name its calls.

    Args:
        call: what a call of it is to the user.
        of_method: the same, as a format of the method's name, if the second argument is that.
        users_arguments: where the arguments of the user are: the index of the positional ones,
            which the keyword arguments follow.
        result: what its result is to the user, as a format of the name of the result's type, if
            that is not "the result of" `call`.
        checks_itself: it checks what it is asked to call, so every `Policy` allows it.
        on_reference: it checks itself, and its first argument is the slot of a reference that the
            caller has. Under a policy nothing else that a caller may send gets there.
    """

    def register(function: F) -> F:
        name = f"{function.__module__}:{function.__qualname__}"
        _HANDLERS[name] = _Handler(
            call, result, users_arguments, checks_itself or on_reference, on_reference
        )
        if of_method:
            OF_METHODS[name] = of_method
        return function

    return register


def checks_itself(function: str) -> bool:
    """Return whether a function of this name is a handler that every policy allows."""
    handler = _HANDLERS.get(function)
    return handler is not None and handler.checks_itself


def works_on_slot(function: str) -> bool:
    """Return whether a function of this name is a handler whose first argument is a slot."""
    handler = _HANDLERS.get(function)
    return handler is not None and handler.on_reference


def readable(function: str, method: str = "") -> str:
    """Return what a call asked for, for messages.

    Args:
        function: the name in its request.
        method: what `method_of` gives, where the arguments of the call are known.
    """
    if method:
        return OF_METHODS[function].format(method)
    handler = _HANDLERS.get(function)
    return function if handler is None else handler.call


def readable_result(function: str, method: str, type_name: str) -> str:
    """Return what the result of a call, which has a type, is to the user, for messages."""
    handler = _HANDLERS.get(function)
    if handler is None or not handler.result:
        return f"the result of {readable(function, method)}"
    return handler.result.format(type_name)


def method_of(function: str, args: Sequence[Any]) -> str:
    """Return which method a call of one of farcall's handlers is to call; "" for other functions.

    Args:
        function: the name in the request.
        args: all positional arguments of the function.
    """
    if function not in OF_METHODS or len(args) < 2 or type(args[1]) is not str:
        return ""
    return args[1]


def arguments_of_user(
    function: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return those arguments of a call that the user gave, and can tell from a message about them.

    Args:
        function: the name in the request.
        args, kwargs: all arguments of the function, as they are sent.
    """
    handler = _HANDLERS.get(function)
    if handler is None or handler.users_arguments is None:
        return args, kwargs
    index = handler.users_arguments
    return args[index], args[index + 1]


def inherited_from(served: Served) -> str:
    """Say, for messages, from which call a deadline was inherited."""
    function, method, caller = served
    return (
        "; the deadline is inherited: this was called while serving the call of "
        f"{readable(function, method)} by worker {caller!r}. Pass timeout= to that call, "
        "or rpc_timeout= in the options of its worker's init_rpc, for more"
    )
