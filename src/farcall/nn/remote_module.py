"""A module on another worker, used like one of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from farcall.nn import owner
from farcall.rref import RRef
from farcall.runtime.calls.future import Future
from farcall.runtime.calls.graph_breaks import methods_break_graphs
from farcall.runtime.current import current_agent
from farcall.serde import hide_own_frames
from farcall.torch_internals import remote_device as parsed_device

Tensor = torch.Tensor


@methods_break_graphs
class RemoteModule(nn.Module):
    """A module that another worker has; `forward` runs there.

        layer = RemoteModule("worker1/cpu", nn.Linear, args=(20, 30))
        output = layer(torch.randn(128, 20))

    It may be a part of a local module. Workers to which it is sent use the same module. Inside
    `farcall.autograd.context` gradients flow through it. It is as thread-safe as the module.

    Hooks that are registered here run here, with the sent arguments and the result. Work that a
    local module does on its parts by itself reaches the remote module for `state_dict`,
    `load_state_dict`, `train`, `eval`, `apply`, `zero_grad` and `requires_grad_`; but not for `to`,
    `cuda`, `half` and the like: call these on the `RemoteModule` itself.

    Args:
        remote_device: where: "<worker>/<device>" or "rank:<id>/<device>"; the device may be left
            out, and is "cpu" then. A device alone means this worker. Tensors among the arguments
            are moved to the device. If it is not the CPU, results are moved to where the arguments
            came from.
        module_cls: makes the module, on the worker: a class, or any function.
        args, kwargs: the arguments of `module_cls`.
        _module_interface_cls: an interface of TorchScript (`torch.jit.interface`). The module is
            scripted on its worker, and each method of the interface can be called here, and as
            `<method>_async`.

    Raises:
        NotInitialized: before `init_rpc`.
        ValueError: `remote_device` makes no sense; or `module_cls` made something that is no
            module.
        BaseException: what making the module raised, when it is used.
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__()
        worker, device = _place(remote_device)
        call = (module_cls, tuple(args or ()), dict(kwargs or {}), device)
        if _module_interface_cls is None:
            handle = current_agent().remote(worker, owner.make, call)
        else:
            handle = current_agent().remote(worker, owner.make_scripted, call)
        self._become(RRef.of(handle), device, _methods_of(_module_interface_cls))

    def _become(self, module_rref: RRef[nn.Module], device: str, methods: tuple[str, ...]) -> None:
        self.module_rref = module_rref
        self.device = device
        self._methods = methods

    @classmethod
    def init_from_module_rref(
        cls, remote_device: str, module_rref: RRef[nn.Module], _module_interface_cls: Any = None
    ) -> Self:
        """Return a `RemoteModule` for a module that a reference leads to.

        Args:
            remote_device: as for the constructor. Its worker must be the owner of the reference.

        Raises:
            ValueError: it is not.
        """
        worker, device = _place(remote_device)
        if current_agent().directory.resolve(worker).worker.info != module_rref.owner():
            raise ValueError(
                f"remote_device {remote_device!r} is not on worker {module_rref.owner_name()!r}, "
                "where the module lives"
            )
        return _rebuild(cls, module_rref, device, _methods_of(_module_interface_cls))  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.module_rref, self.device, self._methods)

    def extra_repr(self) -> str:
        """Return the place of the module, for `repr`."""
        return f"on {self.on!r}, {self.device}"

    @property
    def on(self) -> str:
        """Name of the worker where the module lives."""
        return self.module_rref.owner_name()

    @property
    def is_scriptable(self) -> bool:
        """Return whether the module was made with an interface."""
        return bool(self._methods)

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the reference to the module."""
        return self.module_rref

    # Calls.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's `forward` and return its result."""
        try:
            return self._call(owner.run, "forward", self.device, args, kwargs)
        except BaseException as error:
            hide_own_frames(error)
            raise

    def forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return a future of the result of the module's `forward`. No hooks of this object run."""
        return self._start("forward", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        methods = self.__dict__.get("_methods", ())
        if name in methods:
            return lambda *args, **kwargs: self._call(owner.run, name, self.device, args, kwargs)
        if name.endswith("_async") and name.removesuffix("_async") in methods:
            return lambda *args, **kwargs: self._start(name.removesuffix("_async"), args, kwargs)
        return super().__getattr__(name)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        module = self.module_rref._present()
        return current_agent().call(module.owner_name(), function, (module, *args))

    def _start(self, method: str, args: Any, kwargs: Any) -> Future[Any]:
        def call(module: RRef[nn.Module]) -> Future[Any]:
            run = owner.run, (module, method, self.device, args, kwargs)
            return current_agent().call_async(module.owner_name(), *run)

        return self.module_rref._when_present(call)

    # Parameters and buffers: references to those of the module.

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """References to the parameters, for `farcall.optim.DistributedOptimizer`."""
        return [rref for _, rref in self.named_parameters(recurse=recurse)]

    def parameters(self, recurse: bool = True) -> Iterator[RRef[nn.Parameter]]:  # type: ignore[override]
        """References to the parameters."""
        return iter(self.remote_parameters(recurse))

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, RRef[nn.Parameter]]]:
        """Names of the parameters, with references to them."""
        found = self._call(owner.named, "named_parameters", prefix, recurse, remove_duplicate)
        return iter(found)

    def buffers(self, recurse: bool = True) -> Iterator[RRef[Tensor]]:  # type: ignore[override]
        """References to the buffers."""
        return (rref for _, rref in self.named_buffers(recurse=recurse))

    def named_buffers(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, RRef[Tensor]]]:
        """Names of the buffers, with references to them."""
        return iter(self._call(owner.named, "named_buffers", prefix, recurse, remove_duplicate))

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Give the module a buffer."""
        self._call(owner.apply_method, "register_buffer", (name, tensor, persistent))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Give the module a parameter."""
        self._call(owner.apply_method, "register_parameter", (name, param))

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Raise ValueError: parts of a remote module are made where the module lives."""
        raise ValueError(
            "a RemoteModule has no parts here: make them in module_cls, on the worker, or make "
            "both parts of a local module"
        )

    # State.

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the module's state, as `nn.Module.state_dict` gives it: copies, on the CPU.

        Args:
            destination, prefix, keep_vars: as there; `keep_vars` makes no difference.
        """
        names = ("destination", "prefix", "keep_vars")
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        found = self._call(owner.state_dict, options.get("prefix", ""))
        destination = options.get("destination")
        if destination is None:
            return found  # type: ignore[no-any-return]
        destination.update(found)
        return destination  # type: ignore[no-any-return]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load a state, for `load_state_dict` of this module or of one that it is a part of."""
        ours = {
            name.removeprefix(prefix): value
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }
        missing, unexpected, errors = self._call(owner.load_state_dict, ours)
        missing_keys += [prefix + name for name in missing]
        if strict:
            unexpected_keys += [prefix + name for name in unexpected]
        error_msgs += [f"on worker {self.on!r}: {error}" for error in errors]

    # Changes of the module.

    def train(self, mode: bool = True) -> Self:
        """Set the module, too, to training or evaluation."""
        super().train(mode)
        self._call(owner.apply_method, "train", (mode,))
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether the module's parameters require grad."""
        self._call(owner.apply_method, "requires_grad_", (requires_grad,))
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset `.grad` of the module's parameters. Gradients of a context are not there."""
        self._call(owner.apply_method, "zero_grad", (set_to_none,))

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call a function, on the worker, for each part of the module and for the module."""
        self._call(owner.apply_method, "apply", (fn,))
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast the module, as `nn.Module.to`. A device is one of its worker."""
        self.device = self._call(owner.move, "to", args, kwargs, self.device)
        return self

    def cpu(self) -> Self:
        """Move the module to its worker's CPU."""
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Move the module to a GPU of its worker."""
        index = torch.device("cuda", device) if isinstance(device, int) else device
        return self.to("cuda" if index is None else index)

    def type(self, dst_type: torch.dtype | str) -> Self:
        """Cast all parameters and buffers of the module."""
        self._call(owner.apply_method, "type", (dst_type,))
        return self

    def float(self) -> Self:
        """Cast the module to float32."""
        return self.to(torch.float32)

    def double(self) -> Self:
        """Cast the module to float64."""
        return self.to(torch.float64)

    def half(self) -> Self:
        """Cast the module to float16."""
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        """Cast the module to bfloat16."""
        return self.to(torch.bfloat16)

    def share_memory(self) -> Self:
        """Move the module to shared memory, on its worker."""
        self._call(owner.apply_method, "share_memory", ())
        return self


def _rebuild(
    cls: type[RemoteModule], module_rref: RRef[nn.Module], device: str, methods: tuple[str, ...]
) -> Any:
    """Rebuild a module that has arrived."""
    remote = cls.__new__(cls)
    nn.Module.__init__(remote)
    remote._become(module_rref, device, methods)
    return remote


def _place(remote_device: str) -> tuple[str | int, str]:
    """Worker and device."""
    try:
        parsed = parsed_device(remote_device)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"remote_device {remote_device!r} makes no sense: use 'worker/device', "
            f"'rank:id/device' or a device ({error})"
        ) from error
    name, rank = parsed.worker_name(), parsed.rank()
    worker = name if name is not None else rank
    here = current_agent().me.name
    return here if worker is None else worker, str(parsed.device())


def _methods_of(interface: Any) -> tuple[str, ...]:
    """Return the methods of an interface of TorchScript."""
    if interface is None:
        return ()
    names = [name for name, value in vars(interface).items() if callable(value)]
    return tuple(name for name in names if not name.startswith("__"))
