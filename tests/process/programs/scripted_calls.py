"""TorchScript code that makes remote calls, or takes references, as in PyTorch's documentation."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future


@torch.jit.script
def script_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@rpc.functions.async_execution
@torch.jit.script
def async_add(to: str, x: Tensor, y: Tensor) -> Future[Tensor]:
    return rpc.rpc_async(to, script_add, (x, y))


@torch.jit.script
def fetch(rref: rpc.RRef[Tensor]) -> Tensor:
    return rref.to_here()


class Adder(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return rpc.rpc_sync("w0", script_add, (x, x))


def outcome(call: Callable[[], object]) -> str:
    try:
        return str(call())
    except RuntimeError as error:
        explained = " explained" if "docs/migrate.md" in str(error) else ""
        return type(error).__name__ + explained


def main(init_method: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
    x = torch.ones(2)
    print(outcome(lambda: async_add("w0", x, x)))
    print(outcome(lambda: rpc.rpc_sync("w0", async_add, args=("w0", x, x))))
    print(outcome(lambda: fetch(rpc.RRef(x))))
    print(outcome(lambda: torch.jit.script(Adder())(x)))
    print(outcome(lambda: script_add(x)))
    print(outcome(lambda: script_add(x, x)))
    rpc.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
