"""Modules on other workers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.errors import InvalidReference, UnknownWorker
from farcall.nn import RemoteModule

pytestmark = pytest.mark.usefixtures("pair")


def seeded(make: Any, *args: Any) -> nn.Module:
    torch.manual_seed(3)
    module: nn.Module = make(*args)
    return module


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))


def both(make: Any, *args: Any) -> tuple[RemoteModule, nn.Module]:
    """Return the same module on w1 and here."""
    remote = RemoteModule("w1/cpu", seeded, args=(make, *args))
    remote.get_module_rref().rpc_sync().train()  # it is made: both may use one random generator
    return remote, seeded(make, *args)


X = torch.arange(8.0).view(2, 4) / 8


def test_forward_returns_the_value_of_the_module() -> None:
    remote, local = both(nn.Linear, 4, 3)
    torch.testing.assert_close(remote(X), local(X))
    torch.testing.assert_close(remote.forward_async(input=X).wait(), local(X))
    assert remote.on == "w1"
    assert "on 'w1', cpu" in repr(remote)


def test_gradients_flow_through_it() -> None:
    remote, local = both(nn.Linear, 4, 3)
    x = X.clone().requires_grad_()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [remote(x).square().sum()])
        found = dist_autograd.get_gradients(context_id)
        theirs = rpc.rpc_sync("w1", gradient_of, args=(context_id, remote.remote_parameters()[0]))
    local(y := X.clone().requires_grad_()).square().sum().backward()
    torch.testing.assert_close(found[x], y.grad)
    torch.testing.assert_close(theirs, local.weight.grad)


def gradient_of(context_id: int, rref: Any) -> torch.Tensor:
    return dist_autograd.get_gradients(context_id)[rref.local_value()]


def test_parameters_and_buffers_are_references() -> None:
    remote, local = both(normed)
    parameters = dict(remote.named_parameters(prefix="p"))
    assert list(parameters) == [name for name, _ in local.named_parameters(prefix="p")]
    for rref, value in zip(remote.parameters(), local.parameters(), strict=True):
        assert rref.owner_name() == "w1"
        torch.testing.assert_close(rref.to_here(), value)
    assert [name for name, _ in remote.named_buffers()] == [n for n, _ in local.named_buffers()]
    for rref, value in zip(remote.buffers(), local.buffers(), strict=True):
        torch.testing.assert_close(rref.to_here(), value)


def test_state_is_saved_and_loaded() -> None:
    remote, local = both(normed)
    state = remote.state_dict()
    assert state.keys() == local.state_dict().keys()
    changed = {name: torch.full_like(value, 2) for name, value in state.items()}
    assert remote.load_state_dict(changed).missing_keys == []
    for name, value in remote.state_dict().items():
        torch.testing.assert_close(value, changed[name])


class Hybrid(nn.Module):
    def __init__(self, remote: nn.Module) -> None:
        super().__init__()
        self.remote = remote
        self.local = nn.Linear(3, 1)


def test_state_as_a_part_of_a_local_module() -> None:
    remote, local = both(nn.Linear, 4, 3)
    hybrid, whole = Hybrid(remote), Hybrid(local)
    state = hybrid.state_dict()
    assert list(state) == list(whole.state_dict())
    torch.testing.assert_close(state["remote.weight"], local.weight)
    state["remote.weight"] = torch.ones(3, 4)
    hybrid.load_state_dict(state)
    torch.testing.assert_close(remote.state_dict()["weight"], torch.ones(3, 4))


def test_states_that_do_not_fit_say_what_differs() -> None:
    remote, _ = both(nn.Linear, 4, 3)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "bias"'):
        remote.load_state_dict({"weight": torch.ones(3, 4)})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "more"'):
        remote.load_state_dict({**remote.state_dict(), "more": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"(?s)on worker 'w1'.*size mismatch for weight"):
        remote.load_state_dict({**remote.state_dict(), "weight": torch.ones(1)})
    found = remote.load_state_dict({"weight": torch.ones(3, 4), "more": X}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["bias"], ["more"])


def test_training_and_evaluation() -> None:
    remote, _ = both(normed)
    assert remote.eval() is remote
    assert not remote.training
    assert not rpc.rpc_sync("w1", is_training, args=(remote.get_module_rref(),))
    hybrid = Hybrid(remote).train()
    assert hybrid.remote.training
    assert rpc.rpc_sync("w1", is_training, args=(remote.get_module_rref(),))


def is_training(rref: Any) -> bool:
    return bool(rref.local_value().training)


def test_casts_and_moves() -> None:
    remote, _ = both(nn.Linear, 4, 3)
    assert remote.double()(X.double()).dtype == torch.float64
    assert remote.to("meta", torch.bfloat16).device == "meta"
    assert rpc.rpc_sync("w1", kind_of_weight, args=(remote.get_module_rref(),)) == (
        "meta",
        torch.bfloat16,
    )


def kind_of_weight(rref: Any) -> tuple[str, torch.dtype]:
    weight = rref.local_value().weight
    return weight.device.type, weight.dtype


def test_gradients_in_place_are_reset() -> None:
    remote, _ = both(nn.Linear, 4, 3)
    rpc.rpc_sync("w1", fill_gradients, args=(remote.get_module_rref(),))
    remote.zero_grad()
    assert remote.requires_grad_(False) is remote
    assert rpc.rpc_sync("w1", gradients_and_flags, args=(remote.get_module_rref(),)) == [
        (True, False),
        (True, False),
    ]


def fill_gradients(rref: Any) -> None:
    for parameter in rref.local_value().parameters():
        parameter.grad = torch.ones_like(parameter)


def gradients_and_flags(rref: Any) -> list[tuple[bool, bool]]:
    return [(p.grad is None, p.requires_grad) for p in rref.local_value().parameters()]


def test_functions_are_applied_to_its_parts() -> None:
    remote, _ = both(normed)
    remote.apply(fill_weights)
    torch.testing.assert_close(remote.state_dict()["0.weight"], torch.full((3, 4), 0.5))


def fill_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.5)


def test_hooks_run_here() -> None:
    remote, local = both(nn.Linear, 4, 3)
    remote.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    remote.register_forward_hook(lambda module, args, output: output * 2)
    torch.testing.assert_close(remote(X), local(X + 1) * 2)


def test_buffers_and_parameters_can_be_added() -> None:
    remote, _ = both(nn.Linear, 4, 3)
    remote.register_buffer("mean", torch.zeros(2))
    remote.register_parameter("scale", nn.Parameter(torch.ones(1)))
    assert set(remote.state_dict()) == {"weight", "bias", "mean", "scale"}
    with pytest.raises(ValueError, match="no parts here"):
        remote.add_module("part", nn.Linear(1, 1))


def forward_of(remote: RemoteModule, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = remote(x)
    return result


def test_it_may_be_sent() -> None:
    remote, local = both(nn.Linear, 4, 3)
    torch.testing.assert_close(rpc.rpc_sync("w1", forward_of, args=(remote, X)), local(X))
    again = RemoteModule.init_from_module_rref("w1", remote.get_module_rref())
    torch.testing.assert_close(again(X), local(X))
    with pytest.raises(InvalidReference):
        pickle.dumps(remote)


@torch.jit.interface
class Scaler:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pass

    def scale(self, x: torch.Tensor, by: float) -> torch.Tensor:
        pass


class Scales(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x, 2.0)

    @torch.jit.export
    def scale(self, x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by


def test_module_with_an_interface_is_compiled() -> None:
    remote = RemoteModule("rank:1", Scales, _module_interface_cls=Scaler)
    assert remote.is_scriptable
    torch.testing.assert_close(remote(X), X * 2)
    torch.testing.assert_close(remote.scale(X, 3.0), X * 3)
    torch.testing.assert_close(remote.scale_async(X, 4.0).wait(), X * 4)
    kind = remote.get_module_rref()._get_type()
    assert issubclass(kind, torch.jit.ScriptModule)
    with pytest.raises(AttributeError):
        remote.unscale(X)


def test_arguments_of_no_sense() -> None:
    with pytest.raises(ValueError, match="remote_device 'w1/nothing' makes no sense"):
        RemoteModule("w1/nothing", nn.Linear, args=(1, 1))
    with pytest.raises(UnknownWorker, match="nobody"):
        RemoteModule("nobody/cpu", nn.Linear, args=(1, 1))
    with pytest.raises(ValueError, match=r"returns an instance of <class nn.Module>"):
        RemoteModule("w1/cpu", dict)(X)
    with pytest.raises(TypeError, match="missing"):
        RemoteModule("w1/cpu", nn.Linear)(X)
    remote, _ = both(nn.Linear, 4, 3)
    with pytest.raises(ValueError, match="is not on worker 'w1'"):
        RemoteModule.init_from_module_rref("w0/cpu", remote.get_module_rref())


def test_module_of_this_worker() -> None:
    local = RemoteModule("cpu", seeded, args=(nn.Linear, 4, 3))
    assert local.on == "w0"
    torch.testing.assert_close(local(X), seeded(nn.Linear, 4, 3)(X))
