"""Checks of what a group is started with, and where: the same for each function that starts one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farcall import rpc
from farcall.groups.joining import DRIVER
from farcall.ids import check_name
from farcall.plain import whole_number
from farcall.runtime.context import current_context
from farcall.runtime.current import current_agent, default_agent


def check_place(starter: str) -> None:
    """Raise if no group can begin in this process.

    Args:
        starter: the function that is to start it.

    Raises:
        RuntimeError: this process is in a group already.
    """
    if default_agent() is None and current_context() is None:
        return
    name = current_agent().me.name
    if name == DRIVER:
        raise RuntimeError(
            "this process has a group already: use that one, or end it with group.close() first"
        )
    raise RuntimeError(
        f"{starter}() starts workers from a driver, but this process is the worker {name!r} of "
        "a group: start as many workers as are needed there, and call them from here with "
        "rpc.rpc_sync(name, ...)"
    )


def check_options(starter: str, taken: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Raise an error if options of a group are wrong.

    Args:
        starter: the function that is to start it.
        taken: the options that it chooses itself, and why.
        options: what the user has given.

    Raises:
        TypeError: one is unknown, or of the wrong type.
        ValueError: one makes no sense.
    """
    for name, reason in taken.items():
        if name in options:
            raise TypeError(f"{starter}() takes no {name}: {reason}")
    rpc.RpcBackendOptions(**options)


def names_of(n: int, names: Sequence[str] | None) -> list[str]:
    """Return the names of n workers: those that are given, or "worker0", "worker1" and so on.

    Raises:
        TypeError, ValueError, InvalidName: the message names the mistake.
    """
    n = whole_number("n", n, 1)
    if names is None:
        return [f"worker{number}" for number in range(n)]
    if isinstance(names, str):
        raise TypeError("names must be a list of names, not one text")
    names = list(names)
    if len(names) != n:
        raise ValueError(f"names must be {n}, one for each worker, not {len(names)}")
    names = [check_name(name) for name in names]
    if DRIVER in names:
        raise ValueError(f"no worker can be called {DRIVER!r}: that is the driver")
    if len(set(names)) != n:
        raise ValueError(f"names must differ: {names}")
    return names
