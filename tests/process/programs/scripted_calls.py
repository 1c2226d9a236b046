"""TorchScript code that makes remote calls, as in PyTorch's documentation, and more.

Two workers. Prints a line for each thing that was tried.
"""

import io
import sys
from collections.abc import Callable
from typing import Any, Dict, List, Tuple  # noqa: UP035 - as TorchScript wants them

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.futures import Future

# The example of async_execution in PyTorch's documentation.


@torch.jit.script
def script_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@rpc.functions.async_execution
@torch.jit.script
def async_add(to: str, x: Tensor, y: Tensor) -> Future[Tensor]:
    return rpc.rpc_async(to, script_add, (x, y))


# Calls.


@torch.jit.script
def nothing_in(x: Tensor, count: int = 0) -> Dict[str, List[int]]:  # noqa: UP006
    return {"none": list(range(count))}


@torch.jit.script
def several(to: str, x: Tensor) -> Tuple[Tensor, Dict[str, List[int]]]:  # noqa: UP006
    futures = [rpc.rpc_async(to, script_add, (x, x), {}, 30.0) for _ in range(3)]
    total = torch.zeros_like(x)
    for future in futures:
        total += future.wait()
    if bool(total.sum() > 0):
        total += rpc.rpc_sync(to, script_add, (x, x))
    return total, rpc.rpc_sync(to, nothing_in, (x,), {"count": 0})


@torch.jit.script
def raises(x: Tensor) -> Tensor:
    if x.numel() > 0:
        raise ValueError("too many")
    return x


@torch.jit.script
def waits_for_error(to: str, x: Tensor) -> Tensor:
    return rpc.rpc_async(to, raises, (x,)).wait()


@torch.jit.script
def waits(future: Future[Tensor]) -> Tensor:
    return future.wait() + 1


@torch.jit.script
def waits_for_all(futures: List[Future[Tensor]]) -> List[Tensor]:  # noqa: UP006
    return [future.wait() for future in futures]


class Adder(torch.nn.Module):
    def forward(self, x: Tensor, to: str) -> Tensor:
        return self.compiled_when_needed(x, to) + self.two

    def compiled_when_needed(self, x: Tensor, to: str) -> Tensor:
        return rpc.rpc_sync(to, script_add, (x, x))

    @property
    def two(self) -> int:
        return 2


def remote_before(self, given: Tuple[Tensor]) -> Tensor:  # noqa: UP006
    return rpc.rpc_sync("w1", script_add, (given[0], given[0]))


def remote_after(self, given: Tuple[Tensor], result: Tensor) -> Tensor:  # noqa: UP006
    return rpc.rpc_async("w1", script_add, (given[0], result)).wait()


class Hooked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.square = Square()
        self.square.register_forward_pre_hook(remote_before)
        self.square.register_forward_hook(remote_after)

    def forward(self, x: Tensor) -> Tensor:
        return self.square(x) + 1


class Square(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


@torch.jit.script
class Client:
    def __init__(self, to: str):
        self.to = to

    def doubled(self, x: Tensor) -> Tensor:
        return rpc.rpc_sync(self.to, script_add, (x, x))


@torch.jit.script
def by_client(to: str, x: Tensor) -> Tensor:
    return Client(to).doubled(x)


class Forks(torch.nn.Module):
    """Nothing remote: it may be saved."""

    def forward(self, x: Tensor) -> Tensor:
        forked = [torch.jit.fork(self.doubled, x) for _ in range(3)]
        return torch.stack([each.wait() for each in forked]).sum()

    def doubled(self, x: Tensor) -> Tensor:
        return x * 2


def saved_and_loaded(module: torch.nn.Module) -> torch.nn.Module:
    stream = io.BytesIO()
    torch.jit.save(module, stream)
    stream.seek(0)
    return torch.jit.load(stream)


@torch.jit.script
def remote_twice(to: str, x: Tensor) -> Tensor:
    return rpc.rpc_async(to, script_add, (x, x)).wait()


@torch.jit.script
def forks(to: str, x: Tensor) -> Tensor:
    forked = torch.jit.fork(remote_twice, to, x)
    return torch.jit.wait(forked) * 3


@torch.jit.script
def leaf_of_forks(to: str, x: Tensor) -> Tensor:
    return rpc.rpc_async(to, script_add, (x, x)).wait()


@torch.jit.script
def forks_and_waits(to: str, x: Tensor) -> Tensor:
    forked = [torch.jit.fork(leaf_of_forks, to, x) for _ in range(4)]
    return torch.stack([each.wait() for each in forked]).sum()


@torch.jit.script
def forks_that_fork(to: str, x: Tensor) -> Tensor:
    forked = [torch.jit.fork(forks_and_waits, to, x) for _ in range(4)]
    return torch.stack([each.wait() for each in forked]).sum()


@torch.jit.script
def takes_long(x: Tensor) -> Tensor:
    square = torch.ones(400, 400)
    for _ in range(30):
        square = square @ square / 400
    return x + square[0, 0]


@torch.jit.script
def goes_on(to: str, x: Tensor) -> Tensor:
    waited = rpc.rpc_async(to, takes_long, (torch.ones(2),)).wait()
    return rpc.rpc_sync(to, script_add, (x, waited))  # in a thread of torch's own


@torch.jit.script
def gradients_of(context_id: int, loss: Tensor) -> Dict[Tensor, Tensor]:  # noqa: UP006
    dist_autograd.backward(context_id, [loss])
    return dist_autograd.get_gradients(context_id)


@torch.jit.script
def third(x: Tensor) -> Tensor:
    return x + 1


@torch.jit.script
def second(to: str, x: Tensor) -> Tensor:
    return rpc.rpc_async(to, third, (x,)).wait() + 1


@torch.jit.script
def first(to: str, back: str, x: Tensor) -> Tensor:
    return rpc.rpc_async(back, second, (to, x)).wait() + 1


def outcome(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except RuntimeError as error:
        explained = " explained" if "docs/migrate.md" in str(error) else ""
        return f"{type(error).__name__}{explained} {'too many' in str(error)}"


def trainer() -> None:
    x = torch.ones(2)
    print("documented", rpc.rpc_sync("w1", async_add, args=("w0", x, x)))
    print("documented, remote", rpc.remote("w1", async_add, args=("w0", x, x)).to_here())
    print("several", *several("w1", x))
    print("method", torch.jit.script(Adder())(x, "w1"))
    hooked = torch.jit.script(Hooked())
    print("hooks", hooked(x), hooked.square(x))
    print("class", by_client("w1", x))
    print("saved", saved_and_loaded(torch.jit.script(Forks()))(x))
    print("error", outcome(lambda: waits_for_error("w1", x)))
    print("future", waits(rpc.rpc_async("w1", script_add, args=(x, x))))
    failing = rpc.rpc_async("w1", raises, args=(x,))
    print("failing future", outcome(lambda: waits(failing)), outcome(lambda: waits(future=failing)))
    some = [rpc.rpc_async("w1", script_add, args=(x, x)) for _ in range(2)]
    print("futures", waits_for_all(some))
    print("forks", forks_that_fork("w1", x))
    with dist_autograd.context() as context_id:
        leaf = torch.ones(2, requires_grad=True)
        loss = forks("w1", leaf).sum() + goes_on("w1", leaf).sum()
        print("gradients", gradients_of(context_id, loss)[leaf])
    # More than there are threads, each waits for one that waits for a third.
    nested = [rpc.rpc_async("w1", first, args=("w1", "w0", x)) for _ in range(10)]
    print("nested", sum(future.wait() for future in nested))


def run(rank: int, init_method: str) -> None:
    torch.set_num_interop_threads(1)  # a fork that blocked its thread would stop them all
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=init_method, num_worker_threads=2, rpc_timeout=300
    )
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        trainer()
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1],), nprocs=2)
