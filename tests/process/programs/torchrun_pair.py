"""Started by torchrun: everything comes from the environment."""

import os
import sys

import torch

from farcall import rpc

rank = int(os.environ["RANK"])


def greet(name):
    return f"worker{rank} greets {name}"


if __name__ == "__main__":
    rpc.init_rpc(f"worker{rank}")
    greeting = rpc.rpc_sync(f"worker{1 - rank}", greet, args=(f"worker{rank}",))
    # One write: torchrun's workers share the output, and print may write line and end apart.
    sys.stdout.write(f"{greeting}\n")
    assert rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
    rpc.shutdown()
