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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from farcall.autograd.records import Context
from farcall.runtime.context import current

Tensor = torch.Tensor


class Replicas:
    """The DDP modules that are called in contexts of one agent. Thread-safe.

    Only modules that are called while `watch` was called before are noted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hook: RemovableHandle | None = None
        self._called: dict[int, weakref.WeakSet[DistributedDataParallel]] = {}

    def watch(self) -> None:
        """A context comes to this worker: see which modules are called inside."""
        if self._hook is not None or not _has_process_groups():
            return
        with self._lock:
            if self._hook is None:
                self._hook = register_module_forward_pre_hook(self._note)

    def _note(self, module: torch.nn.Module, args: Any) -> None:
        if not isinstance(module, DistributedDataParallel):
            return
        context = current.get()
        if context is None or not context.gradients or context.agent.gradients.replicas is not self:  # type: ignore[attr-defined]
            return
        with self._lock:
            self._called.setdefault(context.gradients, weakref.WeakSet()).add(module)

    def involved(self, context: Context) -> bool:
        """Whether DDP modules were called in the context."""
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
            modules = list(self._called.get(context.id, ()))
        before = context.gradients()
        for module in modules:
            leaves = [leaf for leaf in module.parameters() if leaf in fresh]
            if leaves and module.require_backward_grad_sync:
                _check_supported(module)
                gradients = [fresh.pop(leaf) for leaf in leaves]
                context.replace(_average(leaves, gradients, [before.get(p) for p in leaves]))
        context.accumulate(fresh)

    def forget(self, context: int) -> None:
        """A context has ended."""
        self._called.pop(context, None)

    def close(self) -> None:
        """Remove the hook."""
        with self._lock:
            hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()


def _has_process_groups() -> bool:
    return distributed.is_available() and distributed.is_initialized()


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
    leaves: Sequence[Tensor], gradients: Sequence[Tensor], before: Sequence[Tensor | None]
) -> dict[Tensor, Tensor]:
    with torch.enable_grad(), _grad_of_our_own(leaves, before):
        _Feed.apply(gradients, *leaves).backward()  # type: ignore[no-untyped-call]
        # A copy: with gradient_as_bucket_view `.grad` is DDP's own memory.
        return {leaf: leaf.grad.clone() for leaf in leaves if leaf.grad is not None}


@contextmanager
def _grad_of_our_own(leaves: Sequence[Tensor], ours: Sequence[Tensor | None]) -> Iterator[None]:
    """Inside the block `.grad` of the leaves starts with copies of ours; then it is put back."""
    theirs = [leaf.grad for leaf in leaves]
    for leaf, grad in zip(leaves, ours, strict=True):
        leaf.grad = None if grad is None else grad.clone()
    try:
        yield
    finally:
        for leaf, grad in zip(leaves, theirs, strict=True):
            leaf.grad = grad
