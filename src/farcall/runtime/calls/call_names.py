"""How messages name the calls that users make. Runs no code of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# The call that a deadline is inherited from: the function of its request, what `method_of` gives
# for it, and the name of its caller.
Served = tuple[str, str, str]

FETCH = "farcall.rref:fetch"

# How farcall's own handlers are called in messages.
_OWN_NAMES = {
    "": "a function sent by value",
    FETCH: "to_here",
    "farcall.rref:type_of": "the type of a remote value",
    "farcall.rref:call_method": "a method of a remote value",
    "farcall.rref:run_backward": "the backward pass of a remote value",
    "farcall.nn.owner:make": "the making of a RemoteModule",
    "farcall.nn.owner:make_scripted": "the making of a RemoteModule",
    "farcall.nn.owner:run": "a method of a RemoteModule",
    "farcall.nn.owner:named": "the parameters or buffers of a RemoteModule",
    "farcall.nn.owner:state_dict": "state_dict of a RemoteModule",
    "farcall.nn.owner:load_state_dict": "load_state_dict of a RemoteModule",
    "farcall.nn.owner:apply_method": "a method of a RemoteModule",
    "farcall.nn.owner:move": "a method of a RemoteModule",
    "farcall.optim.part:build": "the making of an optimizer",
    "farcall.optim.part:build_parameters": "the making of an optimizer",
    "farcall.autograd.handlers:survey": "a part of a backward pass",
    "farcall.autograd.handlers:prepare": "a part of a backward pass",
    "farcall.autograd.handlers:cause": "the cause of a failed backward pass",
    "farcall.autograd.handlers:abort": "the news of a failed backward pass",
}
# Handlers whose second argument is the name of a method.
OF_METHODS = {
    "farcall.rref:call_method": "method {!r} of a remote value",
    "farcall.nn.owner:run": "{} of a RemoteModule",
    "farcall.nn.owner:named": "{} of a RemoteModule",
    "farcall.nn.owner:apply_method": "{} of a RemoteModule",
    "farcall.nn.owner:move": "{} of a RemoteModule",
}
# Where handlers have the arguments of the user: the index of the positional ones, which the
# keyword arguments follow.
_USERS_ARGUMENTS = {
    "farcall.rref:call_method": 2,
    "farcall.nn.owner:run": 3,
    "farcall.nn.owner:make": 1,
    "farcall.nn.owner:make_scripted": 1,
}


def readable(function: str, method: str = "") -> str:
    """Return what a call asked for, for messages.

    Args:
        function: the name in its request.
        method: what `method_of` gives, where the arguments of the call are known.
    """
    if method:
        return OF_METHODS[function].format(method)
    return _OWN_NAMES.get(function, function)


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
    index = _USERS_ARGUMENTS.get(function)
    if index is None:
        return args, kwargs
    return args[index], args[index + 1]


def inherited_from(served: Served) -> str:
    """Say, for messages, from which call a deadline was inherited."""
    function, method, caller = served
    return (
        "; the deadline is inherited: this was called while serving the call of "
        f"{readable(function, method)} by worker {caller!r}. Pass timeout= to that call, "
        "or rpc_timeout= in the options of its worker's init_rpc, for more"
    )
