"""`farcall.local`: start workers here and now."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from typing import Any

from farcall.groups.crew import Crew
from farcall.groups.group import Group
from farcall.groups.in_process import Threads
from farcall.groups.joining import DRIVER, check
from farcall.groups.program import NoGuard
from farcall.ids import check_name
from farcall.runtime.calls.graph_breaks import breaks_graphs
from farcall.runtime.context import current_context
from farcall.runtime.current import current_agent, default_agent

_NO_GUARD = """\
farcall.local() was called while a worker imports this program's main module.

Workers import the script that started them, to find its functions. So what starts workers has to
stand behind this line, which is true in the driver only:

    if __name__ == "__main__":
        with farcall.local(4) as group:
            ...
"""


@breaks_graphs
def local(
    n: int, *, names: Sequence[str] | None = None, processes: bool = True, **options: Any
) -> Group:
    """Start n workers on this machine; this process becomes their driver, the worker "main".

        with farcall.local(4) as group:
            print(group[0].call(max, 1, 2))

    They end with the block, or with `close`, or with this process, however that ends. Inside, the
    functions of `farcall.rpc` work in driver and workers. The workers share this program's
    `__main__` as processes spawned by `multiprocessing` do. What they print is shown here.

    Args:
        n: how many workers.
        names: of the workers; by default "worker0", "worker1" and so on.
        processes: False: the workers are threads of this process, for tests and debuggers.
        options: those of `rpc.RpcBackendOptions`, for driver and workers. `rpc_timeout` (seconds)
            is 0 by default, no limit.

    Raises:
        RuntimeError: this process is in a group already, or is a worker; a worker can't start.
        TypeError, ValueError: an argument makes no sense; the message says which and why.
        InvalidName: a name can't be one.
    """
    _check_place()
    names = _check_names(n, names)
    check(options)
    crew: Crew | Threads = (Crew if processes else Threads)(names, options)
    try:
        return Group(names, crew, crew.start())
    except BaseException:
        crew.close(0)
        raise


def _check_place() -> None:
    """Raise if no group can begin here."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise NoGuard(_NO_GUARD)
    if default_agent() is None and current_context() is None:
        return
    name = current_agent().me.name
    if name == DRIVER:
        raise RuntimeError(
            "this process has a group already: use that one, or end it with group.close() first"
        )
    raise RuntimeError(
        f"farcall.local() starts workers from a driver, but this process is the worker {name!r} of "
        "a group: start as many workers as are needed there, and call them from here with "
        "rpc.rpc_sync(name, ...)"
    )


def _check_names(n: int, names: Sequence[str] | None) -> list[str]:
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"n must be the number of workers, not {type(n).__name__}")
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    if names is None:
        return [f"worker{number}" for number in range(n)]
    if isinstance(names, str):
        raise TypeError("names must be a list of names, not one text")
    names = list(names)
    if len(names) != n:
        raise ValueError(f"names must be {n}, one for each worker, not {len(names)}")
    for name in names:
        check_name(name)
    if DRIVER in names:
        raise ValueError(f"no worker can be called {DRIVER!r}: that is the driver")
    if len(set(names)) != n:
        raise ValueError(f"names must differ: {names}")
    return names
