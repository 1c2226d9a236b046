"""A worker and its child that were given a secret, and show it nowhere."""

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
    options = rpc.RpcBackendOptions(init_method=f"file://{folder}/alone{rank}", listen="::")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    assert secret not in shown()
    rpc.shutdown()
    # Now nothing is in the environment any more.
    for turn in range(2):
        options = rpc.RpcBackendOptions(init_method=f"file://{folder}/{turn}")
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        for other in ("w0", "w1"):
            assert secret not in rpc.rpc_sync(other, shown), other
        rpc.shutdown()


if __name__ == "__main__":
    known = Path(sys.argv[2]).read_bytes().strip()
    child = mp.get_context("spawn").Process(target=work, args=(1, sys.argv[1], known), daemon=True)
    child.start()
    work(0, sys.argv[1], known)
    child.join()
    assert child.exitcode == 0
    print("nothing is shown")
