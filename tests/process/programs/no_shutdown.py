"""Ends without `shutdown`, with calls in flight and references held."""

import sys
import threading

from farcall import rpc

never = threading.Event()


def wait_for_ever():
    never.wait()


if __name__ == "__main__":
    how = sys.argv[2]
    rpc.init_rpc(
        "alone",
        rank=0,
        world_size=1,
        rpc_backend_options=rpc.RpcBackendOptions(init_method=sys.argv[1]),
    )
    future = rpc.rpc_async("alone", wait_for_ever)
    rref = rpc.remote("alone", dict)
    print("the end", flush=True)
    if how == "raises":
        raise ValueError("a mistake of the user")
    if how == "exits":
        sys.exit(5)
