"""TorchScript code that was compiled for torch's own RPC, before farcall stood in for it."""

import importlib
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import rpc as torch_rpc

import farcall.compat


@torch.jit.script
def script_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@torch.jit.script
def calls(to: str, x: Tensor) -> Tensor:
    return torch_rpc.rpc_sync(to, script_add, (x, x))


@torch.jit.script
def fetch(rref: torch_rpc.RRef[Tensor]) -> Tensor:
    return rref.to_here()


class Adder(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch_rpc.rpc_sync("w0", script_add, (x, x))


def outcome(call: Callable[[], object]) -> str:
    try:
        return str(call())
    except RuntimeError as error:
        explained = " explained" if "docs/migrate.md" in str(error) else ""
        return type(error).__name__ + explained


def main(init_method: str) -> None:
    adder = torch.jit.script(Adder())
    farcall.compat.install()
    rpc = importlib.import_module("torch.distributed.rpc")
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
    x = torch.ones(2)
    print(outcome(lambda: calls("w0", x)))
    print(outcome(lambda: fetch(rpc.RRef(x))))
    print(outcome(lambda: adder(x)))
    print(outcome(lambda: script_add(x)))
    print(outcome(lambda: script_add(x, x)))
    rpc.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
