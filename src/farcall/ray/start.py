"""`farcall.ray.start`: start workers on the nodes of a cluster of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farcall.groups.arguments import check_options, check_place, names_of
from farcall.groups.group import Group
from farcall.ray.actors import Actors
from farcall.ray.crew import RayCrew
from farcall.ray.placement import ONE_CORE, Resources, wishes_of
from farcall.runtime.calls.graph_breaks import breaks_graphs

_TAKEN = {
    "init_method": "the workers meet at a store of the driver",
    "store": "the workers meet at a store of the driver",
    "listen": "the workers listen at the addresses of their nodes",
}


@breaks_graphs
def start(
    n: int,
    *,
    resources: Resources = ONE_CORE,
    strategy: str = "PACK",
    names: Sequence[str] | None = None,
    address: str | None = None,
    start_timeout: float = 300.0,
    **options: Any,
) -> Group:
    """Start n workers as actors of Ray; this process becomes their driver, the worker "main".

        with farcall.ray.start(4, resources={"CPU": 1, "GPU": 1}) as group:
            print(group[0].call(max, 1, 2))

    They end with the block, or with `close`, or with this process, however that ends. Inside, the
    functions of `farcall.rpc` work in driver and workers, and so does Ray. Ray shows what they
    print. A cluster that Ray is connected to already is used, and stays connected.

    Args:
        n: how many workers.
        resources: what each worker needs, by the names that Ray has for it: "CPU", "GPU", "memory"
            (bytes), and those that the nodes were started with; or a list of that, for each worker.
        strategy: of the placement group: "PACK" (on few nodes, if that can be), "SPREAD" (on many),
            "STRICT_PACK" (on one) or "STRICT_SPREAD" (each on another one).
        names: of the workers; by default "worker0", "worker1" and so on.
        address: of the cluster, as `ray.init` takes it, if Ray is not connected yet: "auto",
            "host:port". With None, Ray takes `RAY_ADDRESS` or this machine's, or starts one here.
        start_timeout: seconds that Ray has to find room and to start the workers; 0 for no limit.
        options: those of `rpc.RpcBackendOptions`, for driver and workers. `rpc_timeout` (seconds)
            is 0 by default, no limit.

    Raises:
        RuntimeError: this process is in a group already, or is a worker; Ray has no room, or is
            connected elsewhere; a worker can't start.
        ConnectionError: there is no cluster at the address.
        TypeError, ValueError: an argument makes no sense; the message says which and why.
        InvalidName: a name can't be one.
    """
    check_place("farcall.ray.start")
    names = names_of(n, names)
    wishes = wishes_of(n, resources, strategy, start_timeout, address)
    check_options("farcall.ray.start", _TAKEN, options)
    crew = RayCrew(Actors(names, wishes), options)
    try:
        return Group(names, crew, crew.start())
    except BaseException:
        crew.close(0)
        raise
