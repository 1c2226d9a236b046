"""What one function sets in its thread, the next one must not see.

The threads of an agent serve one function after the other. Variables of `contextvars` (decimal
contexts and numpy's error state among them) are isolated by a context of its own for each function.
torch keeps much more with the thread: grad mode, inference mode, autocast, the default device and
other modes, hooks on saved tensors. All that is put back afterwards as it is in a new thread.

That happens after the answer was sent, so that no caller waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _device, _python_dispatch

if TYPE_CHECKING:
    from farcall._native import TorchState
else:
    try:
        from farcall._native import TorchState
    except ImportError:
        TorchState = None

logger = logging.getLogger("farcall")

# torch has no types for these.
_torch: Any = torch
_C: Any = torch._C
_hooks: Any = _C._autograd
_AUTOCAST_DTYPES = {"cpu": torch.bfloat16, "cuda": torch.float16}


class _AskingTorch:
    """`TorchState` by torch's functions for Python, where the compiled one is missing."""

    anomaly_was_enabled = False

    def begin(self) -> None:
        self.anomaly_was_enabled = torch.is_anomaly_enabled()

    def has_changed(self) -> bool:
        return bool(
            _C._len_torch_function_stack()
            or _C._len_torch_dispatch_stack()
            or not _C._is_torch_function_enabled()
            or torch.is_inference_mode_enabled()
            or not torch.is_grad_enabled()
            or _C._is_any_autocast_enabled()
            or torch.get_autocast_dtype("cpu") is not torch.bfloat16
            or not _C._is_multithreading_enabled()
            or _C._is_view_replay_enabled()
            or _hooks._top_saved_tensors_default_hooks(False) is not None
            or torch.is_anomaly_enabled() != self.anomaly_was_enabled
        )

    def note(self) -> None:
        pass


class _Isolation:
    """Of one thread of an agent.

    Attributes:
        state: torch's state of the thread when it was new.
        is_inside: a function runs in the thread.
        guards: of torch, which would undo things when they are collected.
    """

    __slots__ = ("guards", "is_inside", "state")

    def __init__(self) -> None:
        is_fast = TorchState is not None and TorchState.is_available()
        self.state = TorchState() if is_fast else _AskingTorch()
        self.is_inside = False
        self.guards: list[Any] = []

    def run(self, function: Callable[[], None]) -> None:
        state = self.state
        state.begin()
        self.is_inside = True
        try:
            copy_context().run(function)
        finally:
            self.is_inside = False
            if state.has_changed() or not torch.is_autocast_cache_enabled():
                self._restore()
                state.note()

    def _restore(self) -> None:
        """Put torch's state back to what a new thread has. Never raises."""
        try:
            _leave_function_modes()
            _leave_dispatch_modes()
            if not _C._is_torch_function_enabled():
                _C._set_torch_function_state(_C._TorchFunctionState.ENABLED)
            if torch.is_inference_mode_enabled():
                guard = _C._InferenceMode(False)
                guard.__enter__()
                self.guards.append(guard)
            _C._set_grad_enabled(True)
            _leave_autocast()
            _C._set_multithreading_enabled(True)
            _C._set_view_replay_enabled(False)
            while _hooks._top_saved_tensors_default_hooks(False) is not None:
                _hooks._pop_saved_tensors_default_hooks()
            put_back_anomaly_mode()
        except Exception:
            logger.exception("could not put back what a function set in its thread")


class _Thread(threading.local):
    isolation: _Isolation | None = None  # of the calling thread, if it is an agent's


_thread = _Thread()


def run_isolated(function: Callable[[], None]) -> None:
    """Run a function in this thread, which is an agent's, so that it leaves no traces in it.

    It runs in a copy of the thread's context: the variables that it sets are gone afterwards.
    """
    isolation = _thread.isolation
    if isolation is None:
        isolation = _thread.isolation = _Isolation()
    isolation.run(function)


def run_callback(callback: Callable[[], None]) -> None:
    """Run a callback of a future: isolated, unless it is part of what a thread runs anyway."""
    isolation = _thread.isolation
    if isolation is None or isolation.is_inside:
        callback()
    else:
        isolation.run(callback)


def put_back_anomaly_mode() -> None:
    """Turn anomaly mode off if it was off when the function in this thread began.

    It is the process's, so the next function may see it as soon as the answer is sent. It is never
    turned on here: it may have been on at the beginning because of another function.
    """
    isolation = _thread.isolation
    if isolation is None or not torch.is_anomaly_enabled():
        return
    if not isolation.state.anomaly_was_enabled:
        torch.set_anomaly_enabled(False)


def isolate_callbacks() -> None:
    """Say that the calling thread is an agent's: `run_callback` isolates what runs in it."""
    _thread.isolation = _Isolation()


def _leave_function_modes() -> None:
    # Those of `set_default_device` lie at the bottom, so the device before them counts.
    while _C._len_torch_function_stack():
        mode = _C._pop_torch_function_stack()
        if hasattr(mode, "old_device"):
            _device.CURRENT_DEVICE = mode.old_device
    _torch._GLOBAL_DEVICE_CONTEXT.device_context = None


def _leave_dispatch_modes() -> None:
    while _C._len_torch_dispatch_stack():
        _python_dispatch._pop_mode()


def _leave_autocast() -> None:
    torch.set_autocast_cache_enabled(True)
    for device, dtype in _AUTOCAST_DTYPES.items():
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_dtype(device, dtype)
    while torch.autocast_decrement_nesting() >= 0:
        pass
    torch.autocast_increment_nesting()  # to zero
    torch.clear_autocast_cache()
