"""TorchScript code that takes, gives and uses references.

Two workers. Prints a line for each thing that was tried.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Dict, List, Optional, Tuple  # noqa: UP035 - as TorchScript wants them

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import _RemoteModule
from torch.distributed.rpc import RRef

SECONDS = 300


@torch.jit.script
def script_add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@torch.jit.script
def about(rref: RRef[Tensor]) -> Tuple[bool, str, bool]:  # noqa: UP006
    return rref.is_owner(), rref.owner_name(), rref.confirmed_by_owner()


@torch.jit.script
def fetched(rref: RRef[Tensor], by: float = 2.0) -> Tensor:
    return rref.to_here() * by


@torch.jit.script
def chained(to: str, x: Tensor) -> Tensor:
    rref = rpc.remote(to, script_add, (x, x))
    again = rpc.remote(to, fetched, (rref,))
    return rpc.rpc_async(again.owner(), fetched, (again,)).wait()


@torch.jit.script
def made(to: str, x: Tensor) -> RRef[Tensor]:
    return rpc.remote(to, script_add, (x, x))


@torch.jit.script
def picked(
    several: List[RRef[Tensor]],  # noqa: UP006
    one: Optional[RRef[Tensor]],  # noqa: UP045
) -> Tuple[List[RRef[Tensor]], Dict[str, RRef[Tensor]]]:  # noqa: UP006
    found = torch.jit.annotate(List[RRef[Tensor]], [])  # noqa: UP006
    for rref in several:
        if bool(rref.to_here().sum() > 3):
            found.append(rref)
    if one is not None:
        found.append(one)
    return found, {"last": found[-1]}


@torch.jit.ignore
def in_python(rref: RRef[Tensor], seen: List[str]) -> RRef[Tensor]:  # noqa: UP006
    assert isinstance(rref, rpc.RRef)
    return rpc.remote(rref.owner(), script_add, args=(rref.to_here(), torch.ones(2)))


@torch.jit.script
def by_python(rref: RRef[Tensor]) -> Tensor:
    return in_python(rref, ["a"]).to_here()


@torch.jit.script
def remote_fetch(to: str, rref: RRef[Tensor]) -> Tensor:
    return rpc.rpc_sync(to, fetched, (rref,))


@torch.jit.script
def forks(to: str, rref: RRef[Tensor]) -> Tensor:
    forked = torch.jit.fork(remote_fetch, to, rref)
    return torch.jit.wait(forked)


@torch.jit.script
def saves(rref: RRef[Tensor], name: str) -> None:
    torch.save(rref, name)


@torch.jit.script
def owner_in_list(rref: RRef[Tensor]) -> int:
    return len([rref.owner()])


@torch.jit.interface
class Scales:
    def scale(self, x: Tensor) -> Tensor:
        pass


class Scaler(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = 3.0

    @torch.jit.export
    def scale(self, x: Tensor) -> Tensor:
        return x * self.by

    def forward(self, rref: RRef[Tensor], plus: float = 1.0) -> Tensor:
        return rref.to_here() * self.by + plus


@torch.jit.script
def scaled(rref: RRef[Scales], x: Tensor) -> Tensor:
    return rref.local_value().scale(x)


def make_scaler() -> RRef[Any]:
    return rpc.RRef(torch.jit.script(Scaler()), Scales)


@torch.jit.interface
class Forwards(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pass


class Halver(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def make_halver() -> torch.nn.Module:
    return torch.jit.script(Halver())


class Hybrid(torch.nn.Module):
    """A remote module as a part of a local one."""

    def __init__(self) -> None:
        super().__init__()
        self.remote = torch.jit.script(
            _RemoteModule("w1/cpu", make_halver, _module_interface_cls=Forwards)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.remote(x) + self.remote.forward_async(x).wait()


class Keeps(torch.nn.Module):
    """References in attributes."""

    def __init__(self, rref: RRef[Tensor], unused: RRef[Any]) -> None:
        super().__init__()
        self.rref = rref
        self.several = {"a": [rref, rref]}
        self.unused = unused

    def forward(self) -> Tensor:
        total = self.rref.to_here()
        for rref in self.several["a"]:
            total = total + rref.to_here()
        return total

    @torch.jit.export
    def keep(self, rref: RRef[Tensor]) -> None:
        self.rref = rref


class KeepsSet(torch.nn.Module):
    def __init__(self, rref: RRef[Any]) -> None:
        super().__init__()
        self.rref = rref

    def forward(self) -> Tensor:
        return self.rref.to_here()


class Value:
    """Its owner can tell when it goes."""


def outcome(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except RuntimeError as error:
        text = str(error)
        explained = " explained" if "owner_name()" in text or "has no type for" in text else ""
        return f"{type(error).__name__}{explained}"


def user(folder: str) -> None:
    x = torch.ones(2)
    rref = rpc.remote("w1", torch.add, args=(x, 1))
    print("fetched", fetched(rref), fetched(by=3.0, rref=rref))
    print("about", about(rref), about(rpc.RRef(x)))
    print("sent", rpc.rpc_sync("w1", fetched, args=(rref, 5.0)))
    print("chained", chained("w1", x))
    given = made("w1", x)
    print("made", isinstance(given, rpc.RRef), given.to_here())
    given = rpc.rpc_sync("w1", made, args=("w0", x))
    print("made elsewhere", given.owner_name(), given.to_here())
    several = [rpc.remote("w1", torch.mul, args=(x, n)) for n in range(4)]
    found, by_name = picked(several, None)
    print("picked", [each.to_here().tolist() for each in found], by_name["last"].to_here())
    print("picked, one", len(picked([], rref)[0]))
    print("by Python", by_python(rref))
    print("forks", forks("w1", rref))
    print("interface", rpc.rpc_sync("w1", scaled, args=(rpc.rpc_sync("w1", make_scaler), x)))
    print("method", torch.jit.script(Scaler())(rref), torch.jit.script(Scaler())(rref, plus=0.0))
    print("saves", outcome(lambda: saves(rref, f"{folder}/saved")))
    print("owner", outcome(lambda: owner_in_list(rref)))
    keeps = torch.jit.script(Keeps(rref, rpc.RRef({1})))
    print("keeps", keeps(), isinstance(keeps.rref, rpc.RRef), keeps.several["a"][1].to_here())
    keeps.keep(several[0])
    print("keeps another", keeps(), keeps.rref.to_here())
    keeps.rref = rref
    print("keeps it again", keeps())
    print("keeps a set", outcome(lambda: torch.jit.script(KeepsSet(rpc.RRef({1})))))
    print("remote module", torch.jit.script(Hybrid())(x))
    print("no reference", outcome(lambda: fetched(x)))
    print("too few", outcome(fetched))
    value = Value()
    gone = threading.Event()
    weakref.finalize(value, gone.set)
    about(rpc.RRef(value))
    del value
    print("value is gone", gone.wait(SECONDS))


def run(rank: int, folder: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        user(folder)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1],), nprocs=2)
