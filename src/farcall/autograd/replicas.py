"""Leaves that DistributedDataParallel keeps equal on several processes.

DDP averages gradients by hooks on the accumulation into `.grad`. Distributed passes don't touch
`.grad`, so these hooks are fed afterwards: when a worker has all its gradients of a pass, those of
each DDP module's leaves are passed through a small graph of their own, whose backward accumulates
them into `.grad`. DDP averages them there as always, the context takes the averages, and `.grad`
is put back. The price is that averaging does not overlap with computing.

Which modules take part is noted when they are called inside a context, by a hook that is there only
once the process has process groups.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from farcall import torch_internals as internals
from farcall.autograd.context_state import Context
from farcall.runtime.context import current_context

Tensor = torch.Tensor


class Replicas:
    """The DDP modules that are called in contexts of one agent. Thread-safe.

    Only modules that are called while `watch` was called before are noted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hook: RemovableHandle | None = None
        # By context, in the order of the first calls, which is that of the other processes.
        self._called: dict[int, dict[weakref.ref[DistributedDataParallel], None]] = {}

    def watch(self) -> None:
        """Note which modules are called inside contexts from now on: one has come here."""
        if self._hook is not None or not _has_process_groups():
            return
        with self._lock:
            if self._hook is None:
                self._hook = register_module_forward_pre_hook(self._note)

    def _note(self, module: torch.nn.Module, args: Any) -> None:
        if not isinstance(module, DistributedDataParallel):
            # A call of `forward`, not of the module, runs no hook of it, but those of its parts.
            around = internals.active_ddp_module()
            if around is None or around.module is not module:
                return
            module = around
        context = current_context()
        if context is None or not context.gradients or context.agent.gradients.replicas is not self:  # type: ignore[attr-defined]
            return
        with self._lock:
            self._called.setdefault(context.gradients, {})[weakref.ref(module)] = None

    def involved(self, context: Context) -> bool:
        """Return whether DDP modules were called in the context."""
        return context.id in self._called

    def accumulate(self, context: Context, fresh: dict[Tensor, Tensor]) -> None:
        """Add gradients to a context, averaged with those of other processes where DDP says so.

        As DDP does, it averages the sum with what earlier passes left in the context.

        Args:
            fresh: all that a pass computed at this worker: leaf -> gradient.

        Raises:
            RuntimeError: a module averages in a way that can't be followed.
        """
        with self._lock:
            references = list(self._called.get(context.id, ()))
        before = context.gradients()
        for reference in references:
            module = reference()
            if module is None or not module.require_backward_grad_sync:
                continue
            _check_supported(module)
            leaves: list[Tensor] = [leaf for leaf in module.parameters() if leaf.requires_grad]
            own = {leaf: fresh.pop(leaf) for leaf in leaves if leaf in fresh}
            if own:
                context.replace(_average(leaves, own, before).items())
        context.accumulate(fresh.items())

    def on_context_released(self, context: int) -> None:
        """Drop all records of a context that has ended."""
        self._called.pop(context, None)

    def close(self) -> None:
        """Remove the hook."""
        with self._lock:
            hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()


# What `distributed.is_initialized()` asks by way of two classes.
_world: Any = internals.world if distributed.is_available() else None


def _has_process_groups() -> bool:
    return _world is not None and _world.default_pg is not None


def _check_supported(module: DistributedDataParallel) -> None:
    if module.static_graph:
        raise RuntimeError(
            "DistributedDataParallel(static_graph=True) averages in a callback of the pass itself; "
            "inside farcall.autograd contexts use static_graph=False"
        )


class _Feed(torch.autograd.Function):
    """A scalar whose gradients are the given ones."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *leaves: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return (None, *ctx.gradients)


def _average(
    leaves: Sequence[Tensor], own: Mapping[Tensor, Tensor], before: Mapping[Tensor, Tensor]
) -> dict[Tensor, Tensor]:
    """Return all that DDP leaves in `.grad` of a module's leaves. We have gradients for some."""
    with torch.enable_grad(), _grad_of_our_own(leaves, before):
        _Feed.apply(list(own.values()), *own).backward()  # type: ignore[no-untyped-call]
        # A copy: with gradient_as_bucket_view `.grad` is DDP's own memory.
        return {leaf: leaf.grad.clone() for leaf in leaves if leaf.grad is not None}


@contextmanager
def _grad_of_our_own(leaves: Sequence[Tensor], ours: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Start `.grad` of the leaves with copies of ours inside the block, and then put it back.

    Nor do the leaves have hooks there: they were called when the gradients were computed.
    """
    theirs = [leaf.grad for leaf in leaves]
    hooks: list[dict[Any, Any]] = [internals.backward_hooks(leaf) or {} for leaf in leaves]
    called = [dict(table) for table in hooks]
    for leaf, table in zip(leaves, hooks, strict=True):
        leaf.grad = ours[leaf].clone() if leaf in ours else None
        table.clear()
    try:
        yield
    finally:
        for leaf, grad, table, calls in zip(leaves, theirs, hooks, called, strict=True):
            leaf.grad = grad
            table.update(calls)
