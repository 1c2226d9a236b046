"""Functions that a `RemoteModule` calls on the worker where the module lives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from farcall.rref import RRef
from farcall.runtime.calls.call_names import own_handler
from farcall.runtime.calls.policy import method_of
from farcall.runtime.context import allowed_now
from farcall.serde import message_of
from farcall.torch_internals import parse_to, tree_map_only

Made = Callable[..., nn.Module]


@own_handler("the making of a RemoteModule", users_arguments=1)
def make(
    module_cls: Made, args: Sequence[Any], kwargs: Mapping[str, Any], device: str
) -> nn.Module:
    """Make the module, on a device.

    Raises:
        ValueError: the class has made something else than a module.
    """
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    return module.to(device)


@own_handler("the making of a RemoteModule", users_arguments=1)
def make_scripted(
    module_cls: Made, args: Sequence[Any], kwargs: Mapping[str, Any], device: str
) -> nn.Module:
    """Make the module, on a device, and compile it."""
    scripted: nn.Module = torch.jit.script(make(module_cls, args, kwargs, device))
    return scripted


def _method(rref: RRef[nn.Module], name: str) -> Callable[..., Any]:
    """Return a method of the module, if the caller may call it."""
    return method_of(allowed_now(), rref.local_value(), name)


@own_handler("a method of a RemoteModule", of_method="{} of a RemoteModule", users_arguments=3)
def run(
    rref: RRef[nn.Module], method: str, device: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a method of the module."""
    function = _method(rref, method)
    module = rref.local_value()
    if method == "forward" and isinstance(module, nn.Module):
        function = module  # with its hooks
    if torch.device(device).type == "cpu":
        return function(*args, **kwargs)
    came_from: set[torch.device] = set()

    def move(tensor: torch.Tensor) -> torch.Tensor:
        came_from.add(tensor.device)
        return tensor.to(device)

    args, kwargs = tree_map_only(torch.Tensor, move, (tuple(args), dict(kwargs)))
    result = function(*args, **kwargs)
    if came_from != {torch.device("cpu")}:
        return result
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), result)


@own_handler("the parameters or buffers of a RemoteModule", of_method="{} of a RemoteModule")
def named(
    rref: RRef[nn.Module], which: str, prefix: str, recurse: bool, remove_duplicate: bool
) -> list[tuple[str, RRef[Any]]]:
    """Names of parameters or buffers, and references to them."""
    found = _method(rref, which)(prefix, recurse, remove_duplicate)
    return [(name, RRef(value)) for name, value in found]


@own_handler("state_dict of a RemoteModule")
def state_dict(rref: RRef[nn.Module], prefix: str) -> dict[str, Any]:
    """Return the module's state, on the CPU."""
    found = _method(rref, "state_dict")(prefix=prefix)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), found)  # type: ignore[no-any-return]


@own_handler("load_state_dict of a RemoteModule")
def load_state_dict(
    rref: RRef[nn.Module], state: Mapping[str, Any]
) -> tuple[list[str], list[str], list[str]]:
    """Load a state: the keys that are missing and unexpected, and what else is wrong."""
    try:
        found = _method(rref, "load_state_dict")(state, strict=False)
    except RuntimeError as error:
        return [], [], [message_of(error)]
    return list(found.missing_keys), list(found.unexpected_keys), []


@own_handler("a method of a RemoteModule", of_method="{} of a RemoteModule")
def apply_method(rref: RRef[nn.Module], method: str, args: Sequence[Any]) -> None:
    """Call a method of the module for what it does to it."""
    _method(rref, method)(*args)


@own_handler("a method of a RemoteModule", of_method="{} of a RemoteModule")
def move(
    rref: RRef[nn.Module], method: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: str
) -> str:
    """Move or cast the module: the device where it is now, if it was moved to one."""
    _method(rref, method)(*args, **kwargs)
    to, *_ = parse_to(*args, **kwargs)
    return device if to is None else str(to)


# A worker whose modules others use allows these, see `Only`, beside the class of the module and its
# `forward`.
FUNCTIONS = (
    *(make, run, named, state_dict, load_state_dict, apply_method, move),
    *(nn.Module.named_parameters, nn.Module.named_buffers, nn.Module.apply),
    *(nn.Module.state_dict, nn.Module.load_state_dict, nn.Module.register_buffer),
    *(nn.Module.register_parameter, nn.Module.train, nn.Module.requires_grad_),
    *(nn.Module.zero_grad, nn.Module.to, nn.Module.type, nn.Module.share_memory),
)
