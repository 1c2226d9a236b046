"""Only joins and leaves: it serves functions of another program."""

import sys

from farcall import rpc

if __name__ == "__main__":
    rpc.init_rpc(
        "other",
        rank=1,
        world_size=2,
        rpc_backend_options=rpc.RpcBackendOptions(init_method=sys.argv[1]),
    )
    rpc.shutdown()
