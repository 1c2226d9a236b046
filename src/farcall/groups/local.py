"""`farcall.local`: start workers here and now."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from typing import Any

from farcall.groups.arguments import check_options, check_place, names_of
from farcall.groups.crew import Crew
from farcall.groups.group import Group
from farcall.groups.in_process import Threads
from farcall.groups.program import NoGuard
from farcall.runtime.calls.graph_breaks import breaks_graphs

_TAKEN = {
    "init_method": "the workers meet in a private folder",
    "store": "the workers meet in a private folder",
    "listen": "the workers are on this machine",
}
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

    The workers end with the block, or with `close`, or with this process, however that ends. Inside
    the block, the functions of `farcall.rpc` work in driver and workers. The workers share this
    program's `__main__` as processes spawned by `multiprocessing` do. Their output is shown here.

    Args:
        n: how many workers.
        names: of the workers; by default "worker0", "worker1" and so on.
        processes: whether the workers are processes; if not, they are threads of this process, for
            tests and debuggers.
        options: those of `rpc.RpcBackendOptions`, for driver and workers. `rpc_timeout` (seconds)
            is 0 by default, no limit.

    Raises:
        RuntimeError: this process is in a group already, or is a worker; a worker can't start.
        TypeError, ValueError: an argument makes no sense; the message says which and why.
        InvalidName: a name can't be that of a worker.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise NoGuard(_NO_GUARD)
    check_place("farcall.local")
    names = names_of(n, names)
    check_options("farcall.local", _TAKEN, options)
    crew: Crew | Threads = (Crew if processes else Threads)(names, options)
    try:
        return Group(names, crew, crew.start())
    except BaseException:
        crew.close(0)
        raise
