"""Calls a function of its own that the other program does not have."""

import sys

from farcall import rpc

FACTOR = 7


class Point:
    def __init__(self, x):
        self.x = x


def scaled(point):
    return Point(point.x * FACTOR)


if __name__ == "__main__":
    rpc.init_rpc(
        "one",
        rank=0,
        world_size=2,
        rpc_backend_options=rpc.RpcBackendOptions(init_method=sys.argv[1]),
    )
    print(rpc.rpc_sync("other", scaled, args=(Point(6),)).x, flush=True)
    print(rpc.rpc_async("other", lambda x: x + FACTOR, args=(1,)).wait(), flush=True)
    rref = rpc.remote("other", Point, args=(5,))
    print(rref.to_here().x, flush=True)
    del rref
    rpc.shutdown()
