"""Workers with a policy: listed functions work as ever, and nothing else runs or is unpickled."""

from __future__ import annotations

import inspect
import operator
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn, optim

from behaviour.helpers import WAYS, Account, echo, fail_with, worker_name
from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.errors import Refused, RemoteError, SerializationError
from farcall.ids import NUMBER_BYTES, RefId
from farcall.members import arrive
from farcall.nn import FUNCTIONS as OF_MODULES
from farcall.nn import RemoteModule
from farcall.optim import FUNCTIONS as OF_OPTIMIZERS
from farcall.optim import TYPES as OF_OPTIMIZERS_TYPES
from farcall.optim import DistributedOptimizer
from farcall.rpc import Only
from farcall.rref import call_method, fetch
from farcall.runtime.agent import Agent
from farcall.runtime.calls import call_names
from farcall.serde.functions import resolve
from farcall.serde.pickling import Payload
from farcall.testing.cluster import acting_as

Start = Callable[..., list[Agent]]
Way = Callable[..., Any]
each_way = pytest.mark.parametrize("call", WAYS)


class Point(NamedTuple):
    x: int
    y: int


class OwnError(Exception):
    pass


class Net(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()

    def secret(self) -> str:
        return "secret"


class Trap:
    """Runs when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def fill(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.constant_(parameter, 3.0)


def raise_own() -> None:
    raise OwnError("own")


used: list[str] = []


class Pretender:
    """May arrive as data. Can be called, and has what the slot of a reference has."""

    is_ready = True

    @property
    def _slot(self) -> object:
        used.append("asked for its slot")
        return self

    def __call__(self, *args: Any) -> None:
        used.append("called")

    def get(self) -> str:
        used.append("got")
        return "text"

    def when_ready(self, callback: Callable[[Any], None]) -> None:
        used.append("waited for")
        callback(self)


@pytest.fixture(autouse=True)
def nothing_used() -> None:
    used.clear()


def attack(agent: Agent, monkeypatch: pytest.MonkeyPatch, body: bytes, function: str) -> None:
    """Call w1 with these bytes in the place of arguments."""
    with monkeypatch.context() as patch:
        patch.setattr(agent.pickling, "dump_call", lambda *_: (function, Payload(body)))
        with pytest.raises(Refused):
            rpc.rpc_sync("w1", echo, args=(1,))


@each_way
def test_only_listed_functions_are_called(start: Start, call: Way) -> None:
    start(2, policies={"w1": Only([echo, worker_name, fail_with], [Point])})
    assert call("w1", worker_name) == "w1"
    assert call("w1", echo, (Point(1, 2),)) == Point(1, 2)
    assert torch.equal(call("w1", echo, (torch.ones(9_000),)), torch.ones(9_000))
    assert rpc.rpc_sync("w1", echo, kwargs={"value": 5}) == 5
    with pytest.raises(KeyError):
        call("w1", fail_with, (KeyError("plain"),))
    for function, args in ((os.getpid, ()), (eval, ("1",)), (operator.add, (1, 2))):
        with pytest.raises(Refused, match="does not list it"):
            call("w1", function, args)
    with pytest.raises(Refused, match="functions"):
        call("w1", echo, (os.system,))


@each_way
def test_answers_are_read_by_the_same_rules(start: Start, call: Way) -> None:
    start(2, policies={"w0": Only(types=[Point])})
    assert call("w1", Point, (1, 2)) == Point(1, 2)
    assert torch.equal(call("w1", torch.ones, (20_000,)), torch.ones(20_000))
    with pytest.raises(RemoteError, match="own"):
        call("w1", raise_own)
    with pytest.raises(Refused, match="types"):
        call("w1", Net, (1,))
    with pytest.raises(SerializationError, match="in a way of its own"):
        call("w1", optim.SGD, ([torch.ones(1)],))


def test_callers_have_rules_of_their_own(start: Start) -> None:
    agents = start(3, policies={"w2": {"w0": Only([echo]), "w[1]": Only([worker_name])}})
    assert rpc.rpc_sync("w2", echo, args=(1,)) == 1
    with pytest.raises(Refused):
        rpc.rpc_sync("w2", worker_name)
    with acting_as(agents[1]):
        assert rpc.rpc_sync("w2", worker_name) == "w2"
        with pytest.raises(Refused):
            rpc.rpc_sync("w2", echo, args=(1,))
    unlisted = "no pattern of its policy matches the name of the caller, 'w2'"
    with acting_as(agents[2]), pytest.raises(Refused, match=unlisted):
        rpc.rpc_sync("w2", echo, args=(1,))  # no rule is for itself
    with acting_as(agents[2]), pytest.raises(Refused, match=unlisted):
        rpc.RRef("text").remote().upper().to_here()


def test_references_and_their_methods(start: Start) -> None:
    start(2, policies={name: Only([Account, Account.deposit, echo]) for name in ("w0", "w1")})
    rref = rpc.remote("w1", Account, args=(5,))
    assert rref.rpc_sync().deposit(2) == 7
    assert rref.rpc_async().deposit(2, times=2).wait() == 11
    assert rref.remote().deposit(1).to_here() == 12
    assert rpc.rpc_sync("w1", echo, args=([rref],))[0].owner_name() == "w1"
    for method in ("where", "itself", "kind", "double"):
        with pytest.raises(Refused, match=method):
            getattr(rref.rpc_sync(), method)()
    with pytest.raises(Refused, match="__call__"):
        rref.rpc_sync().__call__(1)
    mine = rpc.RRef(5)
    assert rpc.rpc_sync("w1", echo, args=(mine,)).local_value() == 5
    with pytest.raises(Refused, match="Account"):
        rref.to_here()


@pytest.mark.parametrize("function", ["behaviour.helpers:echo", "farcall.rref:fetch", ""])
def test_a_pickle_is_not_loaded_whatever_it_calls(
    start: Start, monkeypatch: pytest.MonkeyPatch, function: str, tmp_path: Path
) -> None:
    agents = start(2, policies={"w1": Only([echo])})
    trap = Trap(f"{tmp_path}/made")
    for value in (((trap,), {}), (echo, (trap,), {}), trap):
        attack(agents[0], monkeypatch, pickle.dumps(value), function)
    assert not Path(trap.path).exists()
    assert rpc.rpc_sync("w1", echo, args=(1,)) == 1


def test_a_value_that_nests_too_deep_is_refused(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = start(2, policies={"w1": Only([echo])})
    for body in (b"\x01m\x01" + b"t\x01" * 10**5 + b"NN", b"\x01" + b":" * 10**5):
        attack(agents[0], monkeypatch, body, "behaviour.helpers:echo")
    assert rpc.rpc_sync("w1", echo, args=(1,)) == 1


def test_remote_modules_optimizers_and_gradients(start: Start) -> None:
    functions = [*OF_MODULES, *OF_OPTIMIZERS, Net, Net.forward, fill, optim.SGD]
    only = Only(functions, OF_OPTIMIZERS_TYPES)
    start(2, policies={"w0": only, "w1": only})
    remote = RemoteModule("w1/cpu", Net, args=(3,))
    optimizer = DistributedOptimizer(optim.SGD, remote.parameters(), lr=1.0)
    x = torch.ones(3, requires_grad=True)
    with dist_autograd.context() as context:
        loss = remote(x * 2)
        dist_autograd.backward(context, [loss])
        assert dist_autograd.get_gradients(context)[x].tolist() == [2.0] * 3
        assert optimizer.clip_grad_norm_(context, 100.0) == pytest.approx(12**0.5)
        optimizer.step(context)
    assert remote.state_dict()["weight"].tolist() == [-1.0] * 3
    remote.load_state_dict({"weight": torch.zeros(3)})
    remote.apply(fill)
    remote.train().eval().requires_grad_().double().zero_grad()
    assert remote.state_dict()["weight"].tolist() == [3.0] * 3
    optimizer.load_state_dict(optimizer.state_dict())
    assert [name for name, _ in remote.named_parameters()] == ["weight"]
    assert [rref.to_here().shape for rref in remote.remote_parameters()] == [(3,)]
    for method in ("secret", "extra_repr", "__setattr__", "weight"):
        with pytest.raises(Refused):
            remote._call(OF_MODULES[5], method, ())
        with pytest.raises(Refused):
            remote._call(OF_MODULES[1], method, "cpu", (), {})
    with pytest.raises(Refused):
        RemoteModule("w1/cpu", nn.Linear, args=(1, 1)).get_module_rref().to_here()


def test_optimizers_without_a_state_at_the_owners(start: Start) -> None:
    only = Only([*OF_MODULES, *OF_OPTIMIZERS, Net, Net.forward], OF_OPTIMIZERS_TYPES)
    start(2, policies={"w0": only, "w1": only})
    remote = RemoteModule("w1/cpu", Net, args=(1,))
    optimizer = DistributedOptimizer(optim.LBFGS, remote.parameters(), lr=0.1)

    def closure(context: int) -> torch.Tensor:
        loss: torch.Tensor = (remote(torch.ones(1)) - 5) ** 2
        dist_autograd.backward(context, [loss])
        return loss

    assert optimizer.step(closure).item() == 16.0


def test_errors_of_a_backward_pass_arrive(start: Start) -> None:
    only = Only([torch.add, torch.sub])
    start(2, policies={"w0": only, "w1": only})
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context:
        y = rpc.rpc_sync("w1", torch.add, args=(x, 1))
        z = rpc.rpc_sync("w1", torch.sub, args=(y, 1)).sum()
        dist_autograd.backward(context, [z], retain_graph=True)
        assert dist_autograd.get_gradients(context)[x].tolist() == [1.0, 1.0]
        with pytest.raises(RuntimeError):
            dist_autograd.backward(context + 1, [z])


def test_a_reference_is_not_found_by_its_number(start: Start) -> None:
    agents = start(2)
    secret = rpc.RRef("secret")
    number = secret._handle.reference.number
    assert len(number) == NUMBER_BYTES
    incarnation = agents[0].me.incarnation
    guesses = [RefId(incarnation, n.to_bytes(NUMBER_BYTES, "big")) for n in range(100)]
    assert not any(agents[0].references.slot_of(guess) for guess in guesses)


def test_farcalls_own_handlers_call_only_listed_functions(start: Start) -> None:
    start(2, policies={"w1": Only([echo])})
    for handler in (call_method, fetch):
        with pytest.raises((Refused, AttributeError, TypeError, SerializationError)):
            rpc.rpc_sync("w1", handler, args=("text", "upper", (), {}))


CALLS_OF_OBJECTS: dict[str, Callable[[], object]] = {
    "rpc_sync": lambda: rpc.rpc_sync("w1", Pretender()),
    "remote": lambda: rpc.remote("w1", Pretender()).to_here(),
    "remote with a name": lambda: rpc.remote("w1", Pretender(), name="it").to_here(),
    "supervise": lambda: rpc.supervise(Pretender(), on="w1", name="it"),
}


@pytest.mark.parametrize("way", CALLS_OF_OBJECTS)
def test_object_that_may_arrive_is_not_called(start: Start, way: str) -> None:
    start(2, policies={"w1": Only([rpc.supervise], [Pretender])})
    with pytest.raises(Refused, match="came by value"):
        CALLS_OF_OBJECTS[way]()
    assert used == []


def of_slots(name: str) -> bool:
    parameters = [*inspect.signature(resolve(name)).parameters.values()]
    return bool(parameters) and parameters[0].annotation == "ValueSlot"


OF_SLOTS = [name for name in call_names._HANDLERS if name and of_slots(name)]


def test_handlers_that_take_a_slot_say_so() -> None:
    assert len(OF_SLOTS) >= 7
    assert [name for name in call_names._HANDLERS if call_names.works_on_slot(name)] == OF_SLOTS


@pytest.mark.parametrize("name", OF_SLOTS)
def test_object_that_may_arrive_takes_no_place_of_a_reference(start: Start, name: str) -> None:
    start(2, policies={"w1": Only([rpc.supervise], [Pretender])})
    handler = resolve(name)
    more = [""] * (len(inspect.signature(handler).parameters) - 1)
    with pytest.raises(Refused, match="without a reference"):
        rpc.rpc_sync("w1", handler, args=(Pretender(), *more))
    assert used == []


def second_is_a_reference(name: str) -> bool:
    parameters = [*inspect.signature(resolve(name)).parameters.values()]
    return [one.annotation for one in parameters[1:2]] == ["RRef[Any]"]


WITH_REFERENCE = [name for name in call_names._HANDLERS if name and second_is_a_reference(name)]


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_object_that_may_arrive_is_no_reference(start: Start, name: str) -> None:
    start(2, policies={"w1": Only([rpc.supervise, rpc.kill], [Pretender])})
    with pytest.raises(TypeError, match="a reference is needed here, not Pretender"):
        rpc.rpc_sync("w1", resolve(name), args=("", Pretender()))
    assert used == []


def all_at_once(agents: list[Agent], gather: Callable[[], Any]) -> list[Any]:
    def act(agent: Agent) -> Any:
        with acting_as(agent):
            return gather()

    with ThreadPoolExecutor(len(agents)) as pool:
        return [*pool.map(act, agents)]


def test_gatherings_are_listed(start: Start) -> None:
    listed = Only([rpc.barrier, rpc.gather])
    agents = start(2, policies={"w0": listed, "w1": listed})
    assert all_at_once(agents, rpc.barrier) == [None, None]
    assert all_at_once(agents, lambda: rpc.gather(7, "w1")) == [None, {"w0": 7, "w1": 7}]
    with pytest.raises(Refused, match=r"'farcall\.members:all_gather'"):
        all_at_once(agents, lambda: rpc.all_gather(1))


@pytest.mark.parametrize(
    "ident",
    [
        ("barrier ", (("w0", 1),), "w0", 0),  # of others
        ("barrier ", (("w0", 1), ("w1", 2, 3)), "w0", 0),
        ("barrier ", (("w0", 1), ("w1", "2")), "w0", 0),
        ("barrier ", (("w1", 1), (5, 2)), "w0", 0),
        ("barrier ", (("w1", 1),), "w0", [0]),
        ("barrier ", (), "w0", 0),
        ("arrive ", (("w1", 1),), "w0", 0),
        (5, (("w1", 1),), "w0", 0),
        ("barrier ", 5, "w0", 0),
        5,
    ],
)
def test_gathering_of_others_or_of_no_sense_is_refused(start: Start, ident: Any) -> None:
    agents = start(2, policies={"w0": Only([rpc.barrier])})
    with acting_as(agents[1]), pytest.raises((ValueError, TypeError, Refused)):
        rpc.rpc_sync("w0", arrive, args=(ident, None, 0.0, True))
    assert not agents[0].group.gatherings.incomplete()
    assert all_at_once(agents, rpc.barrier) == [None, None]


def test_payloads_without_arguments_are_strict(start: Start) -> None:
    agents = start(2, policies={"w1": Only([worker_name])})
    peer = agents[0].directory.resolve("w1")
    name, payload = agents[0].pickling.dump_call(peer, worker_name, (), {}, 0)
    assert name == "behaviour.helpers:worker_name"
    assert isinstance(payload, Payload)
    assert payload.body[:1] != b"\x80"
