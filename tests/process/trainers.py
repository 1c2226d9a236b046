"""Two trainers that share a parameter server and run DistributedDataParallel among themselves.

Programs are written for one trainer. They run in processes (`Group`), or one after the other in
one process with one model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from crew import Crew, Member, join, leave_all
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.optim import DistributedOptimizer

TRAINERS = 2
STEPS = 3
RATE = 0.2
WORDS, WIDTH = 20, 6

Call = Callable[[str, torch.Tensor], torch.Tensor]


# The model: layers of the parameter server, and what each trainer has a replica of.


def server_layers() -> dict[str, nn.Module]:
    torch.manual_seed(1)
    return {
        "embed": nn.Embedding(WORDS, WIDTH, sparse=True, dtype=torch.float64),
        "decode": nn.Linear(WIDTH, WORDS, dtype=torch.float64),
    }


class Branches(nn.Module):
    """Uses one branch in each call: which one depends on the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.double()

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return (self.second if branch else self.first)(x).tanh()


def layer(seed: int, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH)).double()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return tuple(torch.randint(WORDS, (5,), generator=generator) for _ in range(2))  # type: ignore[return-value]


class Program:
    """The model of a trainer, and its loss. `wrap` makes replicas, or does not."""

    def __init__(self, wrap: Callable[..., nn.Module]) -> None:
        self.modules = [wrap(layer(2))]

    def middle(self, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        for module in self.modules:
            x = module(x)
        return x

    def loss(self, call: Call, rank: int, step: int) -> torch.Tensor:
        words, targets = batch(rank, step)
        scores = call("decode", self.middle(call("embed", words), rank, step))
        return F.cross_entropy(scores, targets)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for module in self.modules for parameter in module.parameters()]

    def replicas(self) -> list[nn.Module]:
        return [module for module in self.modules if isinstance(module, DistributedDataParallel)]


class SeveralModules(Program):
    """Of different sizes, called in this order, and made in another."""

    def __init__(self, wrap: Callable[..., nn.Module]) -> None:
        made = {size: wrap(layer(size, size)) for size in (7, 3, 11, 5, 9)}
        self.modules = [made[size] for size in sorted(made)]


class RemoteBetweenModules(SeveralModules):
    """A program that sends the output of each replica, and gives the answer to the next one."""

    def loss(self, call: Call, rank: int, step: int) -> torch.Tensor:
        words, targets = batch(rank, step)
        x = call("embed", words)
        for module in self.modules:
            x = call("decode", module(x))[:, :WIDTH]
        return F.cross_entropy(call("decode", x), targets)


class OtherBranches(Program):
    """Each trainer uses another branch, of which the other gets the average; one is never used."""

    def __init__(self, wrap: Callable[..., nn.Module]) -> None:
        torch.manual_seed(3)
        self.modules = [wrap(Branches(), find_unused_parameters=True)]

    def middle(self, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        return self.modules[0](x, (rank + step) % 2)


class SparseReplica(Program):
    """A replicated embedding with sparse gradients, next to the server's."""

    def __init__(self, wrap: Callable[..., nn.Module]) -> None:
        torch.manual_seed(4)
        self.modules = [wrap(nn.Embedding(WORDS, WIDTH, sparse=True, dtype=torch.float64))]

    def middle(self, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        return x * self.modules[0](batch(rank, step)[1])


class Hybrid(nn.Module):
    """Calls the server inside of its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layer(5)

    def forward(self, call: Call, words: torch.Tensor) -> torch.Tensor:
        return call("decode", self.inner(call("embed", words)).sin())


class WholeModel(Program):
    def __init__(self, wrap: Callable[..., nn.Module]) -> None:
        self.modules = [wrap(Hybrid())]

    def loss(self, call: Call, rank: int, step: int) -> torch.Tensor:
        words, targets = batch(rank, step)
        return F.cross_entropy(self.modules[0](call, words), targets)


class PartlyReplicated(Program):
    """A replica and a module that each trainer has for itself, with hooks on leaves of both."""

    def __init__(self, wrap: Callable[..., nn.Module]) -> None:
        self.modules = [wrap(layer(2)), layer(6)]
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5 + 0.01)


PROGRAMS = {
    program.__name__: program
    for program in (
        Program, SeveralModules, RemoteBetweenModules, OtherBranches, SparseReplica, WholeModel,
        PartlyReplicated,
    )
}  # fmt: skip


def unwrapped(module: nn.Module, **_: Any) -> nn.Module:
    return module


# One process.


def train_alone(kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters of the trainers and of the server after all steps."""
    program, layers = PROGRAMS[kind](unwrapped), server_layers()
    ours = program.parameters()
    theirs = [parameter for module in layers.values() for parameter in module.parameters()]
    for step in range(STEPS):
        losses = [
            program.loss(lambda name, x: layers[name](x), rank, step) for rank in range(TRAINERS)
        ]
        sum(losses).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            for parameters, share in ((ours, TRAINERS), (theirs, 1)):
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.sub_(RATE * parameter.grad / share)
                        parameter.grad = None
    return [p.detach() for p in ours], [p.detach() for p in theirs]


def gradients_alone(kind: str, rank: int, steps: int, first: int = 0) -> list[torch.Tensor | None]:
    """Return the gradients of one trainer's losses of so many steps, before any average."""
    program, layers = PROGRAMS[kind](unwrapped), server_layers()
    for step in range(first, first + steps):
        program.loss(lambda name, x: layers[name](x), rank, step).backward()
    return [parameter.grad for parameter in program.parameters()]


# Three processes. Steps of their members:

_layers: dict[str, nn.Module] = {}
state: dict[str, Any] = {}


def make_layers() -> None:
    torch.set_num_threads(1)
    _layers.update(server_layers())


def get_layer(name: str) -> nn.Module:
    return _layers[name]


def server_parameters() -> list[nn.Parameter]:
    return [parameter for module in _layers.values() for parameter in module.parameters()]


def parameter_rrefs() -> list[rpc.RRef[nn.Parameter]]:
    return [rpc.RRef(parameter) for parameter in server_parameters()]


def descend(context_id: int, parameters: list[nn.Parameter]) -> None:
    """Plain stochastic gradient descent on parameters of this worker."""
    found = dist_autograd.get_gradients(context_id)
    with torch.no_grad():
        for parameter in parameters:
            if parameter in found:
                parameter.sub_(RATE * found[parameter])


def descend_on_server(context_id: int) -> None:
    descend(context_id, server_parameters())


def begin(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=TRAINERS
    )


def begin_program(rank: int, kind: str, options: dict[str, Any]) -> None:
    """Make the trainer's program; options are those of DistributedDataParallel."""
    wrap = functools.partial(DistributedDataParallel, **options)
    rrefs = {name: rpc.remote("ps", get_layer, args=(name,)) for name in ("embed", "decode")}
    state["program"] = PROGRAMS[kind](wrap)
    state["call"] = lambda name, x: rrefs[name].rpc_sync().forward(x)


def loss_of(rank: int, step: int) -> torch.Tensor:
    return state["program"].loss(state["call"], rank, step)  # type: ignore[no-any-return]


def train(
    rank: int, kind: str, options: dict[str, Any], optimize: bool = False
) -> list[torch.Tensor]:
    """Run all steps of a trainer, by hand or with a DistributedOptimizer; return its parameters."""
    begin_program(rank, kind, options)
    parameters = state["program"].parameters()
    optimizer = None
    if optimize:
        rrefs = [rpc.RRef(parameter) for parameter in parameters]
        rrefs += rpc.rpc_sync("ps", parameter_rrefs)
        optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=RATE)
    for step in range(STEPS):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [loss_of(rank, step)])
            distributed.barrier()  # all have used the server's parameters
            if optimizer is not None:
                optimizer.step(context_id)
            else:
                descend(context_id, parameters)
                rpc.rpc_sync("ps", descend_on_server, args=(context_id,))
            distributed.barrier()  # all have changed them
        assert all(parameter.grad is None for parameter in parameters)
    return [parameter.detach() for parameter in parameters]


def gradients(rank: int, passes: list[str], first: int = 0) -> list[torch.Tensor | None]:
    """Return each parameter's gradients of one context with one pass for each step.

    Args:
        first: step.
        passes: "no_sync" for a pass without averaging, "forward" if that is so for its forward
            part only; "" for an ordinary one.
    """
    program = state["program"]
    with dist_autograd.context() as context_id:
        for step, kind in enumerate(passes, first):
            with contextlib.ExitStack() as outer:
                for module in program.replicas() if kind else ():
                    outer.enter_context(module.no_sync())
                loss = loss_of(rank, step)
                if kind == "forward":
                    outer.close()
                dist_autograd.backward(context_id, [loss])
        found = dist_autograd.get_gradients(context_id)
        assert all(parameter.grad is None for parameter in program.parameters())
        return [found.get(parameter) for parameter in program.parameters()]


def end() -> None:
    distributed.destroy_process_group()


class Group:
    """The trainers and the server of a test."""

    def __init__(self, crew: Crew) -> None:
        self.trainers = [crew.member(f"trainer{rank}") for rank in range(TRAINERS)]
        self.server = crew.member("ps")
        for rank, member in enumerate(self.everybody):
            member.start(join, member.name, rank, TRAINERS + 1, crew.init_method)
        for member in self.everybody:
            member.result()
        self.server.run(make_layers)
        self.run(begin, crew.init_method.removeprefix("file://") + ".gloo")

    @property
    def everybody(self) -> list[Member]:
        return [*self.trainers, self.server]

    def run(self, step: Callable[..., Any], *args: Any) -> list[Any]:
        """Make a step of all trainers at once, each with its rank."""
        for rank, trainer in enumerate(self.trainers):
            trainer.start(step, rank, *args)
        return [trainer.result() for trainer in self.trainers]

    def end(self) -> None:
        """End the processes of a test that went well; the crew ends those of others."""
        for trainer in self.trainers:
            trainer.run(end)
        leave_all(*self.everybody)
