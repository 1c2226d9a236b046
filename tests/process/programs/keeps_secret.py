"""A worker that was given a secret, and shows it nowhere."""

import os
import subprocess
import sys
from pathlib import Path

import torch.multiprocessing as mp

from farcall import rpc


def shown():
    """Return all that the system and a child show of this process."""
    child = subprocess.run(["env"], capture_output=True, check=True).stdout
    seen = [child, *(Path("/proc/self", name).read_bytes() for name in ("environ", "cmdline"))]
    return b"\n".join([*seen, repr(dict(os.environ)).encode()])


def work(rank, folder, secret):
    # The second time nothing is in the environment any more.
    for turn in range(2):
        options = rpc.RpcBackendOptions(init_method=f"file://{folder}/{turn}")
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        for other in ("w0", "w1"):
            assert secret not in rpc.rpc_sync(other, shown), other
        rpc.shutdown()


if __name__ == "__main__":
    known = Path(sys.argv[2]).read_bytes().strip()
    if sys.argv[3] == "alone":
        options = rpc.RpcBackendOptions(init_method=f"file://{sys.argv[1]}/alone", listen="::")
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        assert known not in shown()
        rpc.shutdown()
    else:
        mp.spawn(work, (sys.argv[1], known), nprocs=2)
    print("nothing is shown")
