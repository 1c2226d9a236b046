"""The state that torch and Python keep for each thread: has it changed, and how to put it back.

Known here: grad, inference and forward mode; autocast of every device type; the default device and
other modes; hooks on saved tensors; dispatch keys; levels of torch.func; the trace of torch.jit,
and whether it optimizes; how the thread computes with floats (`torch.set_flush_denormal`);
`sys.settrace` and `sys.setprofile`. Anomaly mode is the process's, and put back all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from farcall import torch_internals as internals
from farcall.log import get_logger

if TYPE_CHECKING:
    from farcall._native import ThreadState
else:
    try:
        from farcall._native import ThreadState
    except ImportError:
        ThreadState = None

logger = get_logger("farcall")
T = TypeVar("T")

_TINY = 5e-324  # a denormal number


def _autocast_devices() -> Mapping[str, int]:
    """Return the device types that have autocast, with torch's numbers for them."""
    found = {}
    for label, number in internals.DeviceType.__members__.items():
        if label == "MKLDNN":  # asking for it warns
            continue
        name = "privateuseone" if label == "PrivateUse1" else label.lower()
        try:
            if internals.is_autocast_available(name):
                found[name] = int(number)
        except RuntimeError:
            pass  # not a device type any more
    return found


AUTOCAST_DEVICES = _autocast_devices()


class AskedState:
    """`ThreadState` by functions for Python, where the compiled one is missing.

    Of how the thread computes with floats it sees only whether denormal numbers become zero.
    """

    anomaly_was_enabled = False
    is_inside = False

    def __init__(self, float_control: int) -> None:
        self._float_control = float_control
        self._others = _other_state()
        self._tracing: tuple[Any, Any] = (None, None)

    @staticmethod
    def float_control() -> int:
        return int(_TINY * 1.0 == 0.0)

    def begin(self) -> bool:
        self._tracing = (sys.gettrace(), sys.getprofile())
        self.anomaly_was_enabled = torch.is_anomaly_enabled()
        return self.has_changed()

    def has_changed(self) -> bool:
        return bool(
            internals.len_torch_function_stack()
            or internals.len_torch_dispatch_stack()
            or not internals.is_torch_function_enabled()
            or torch.is_inference_mode_enabled()
            or not torch.is_grad_enabled()
            or not internals.is_fwd_grad_enabled()
            or internals.is_any_autocast_enabled()
            or not torch.is_autocast_cache_enabled()
            or not internals.is_multithreading_enabled()
            or internals.is_view_replay_enabled()
            or internals.top_saved_tensors_default_hooks(False) is not None
            or torch.is_anomaly_enabled() != self.anomaly_was_enabled
            or self.float_control() != self._float_control
            or self._tracing != (sys.gettrace(), sys.getprofile())
            or self._others != _other_state()
        )

    def run(self, context: Context, function: Callable[[], T], put_back: Callable[[], None]) -> T:
        if self.begin():
            put_back()
        was_inside, self.is_inside = self.is_inside, True
        try:
            return context.copy().run(function)
        finally:
            self.is_inside = was_inside
            if self.has_changed():
                put_back()

    def note(self) -> None:
        """Do nothing: the state is compared with that of a new thread."""

    def put_back_floats(self) -> None:
        torch.set_flush_denormal(bool(self._float_control))

    def put_back_tracing(self) -> None:
        trace, profile = self._tracing
        if sys.gettrace() is not trace:
            sys.settrace(trace)
        if sys.getprofile() is not profile:
            sys.setprofile(profile)


def _other_state() -> tuple[Any, ...]:
    """Return state whose values in a new thread are not known here."""
    torch.autocast_increment_nesting()
    return (
        torch.autocast_decrement_nesting(),
        internals.saved_tensors_hooks_is_enabled(),
        _are_hooks_traced(),
        internals.get_graph_executor_optimize(),
        internals.get_tracing_state() is None,
        internals.dispatch_tls_local_include_set().raw_repr(),
        internals.dispatch_tls_local_exclude_set().raw_repr(),
        *[torch.get_autocast_dtype(device) for device in AUTOCAST_DEVICES],
    )


def _are_hooks_traced() -> bool:
    # torch gives the old value for a new one, and has no other way to ask.
    was_on: bool = internals.saved_tensors_hooks_set_tracing(False)
    if was_on:
        internals.saved_tensors_hooks_set_tracing(True)
    return was_on


def _is_compiled() -> bool:
    return ThreadState is not None and ThreadState.is_available()


def float_control() -> int:
    """Return how the calling thread computes with floats, for `Restorer`."""
    return ThreadState.float_control() if _is_compiled() else AskedState.float_control()


class Restorer:
    """Puts the state of one thread back, which makes it and alone uses it.

    Args:
        float_control: how the thread shall compute with floats. A new thread inherits that from
            the thread that starts it, which may be one where a function has changed it.

    Attributes:
        state: whether something has changed.
    """

    __slots__ = ("_dtypes", "_excluded", "_guards", "_included", "state")

    def __init__(self, float_control: int) -> None:
        self.state = (
            ThreadState(list(AUTOCAST_DEVICES.values()), float_control)
            if _is_compiled()
            else AskedState(float_control)
        )
        self._dtypes = {device: torch.get_autocast_dtype(device) for device in AUTOCAST_DEVICES}
        self._included = internals.dispatch_tls_local_include_set()
        self._excluded = internals.dispatch_tls_local_exclude_set()
        # Of torch, which undo things in the thread that collects them: this one, at its end. So no
        # cycle of references may keep them from that.
        self._guards: list[Any] = []

    def put_back(self) -> None:
        """Put everything back to what a new thread has. Never raises."""
        steps: tuple[Callable[[], None], ...] = (
            _leave_function_modes,
            _leave_dispatch_modes,
            _leave_levels,
            self._leave_inference_mode,
            _set_gradients,
            self._leave_autocast,
            _leave_hooks,
            _leave_jit,
            self._put_back_keys,
            self.state.put_back_floats,
            self.state.put_back_tracing,
            self.put_back_anomaly_mode,
        )
        for step in steps:
            try:
                step()
            except Exception:
                logger.exception("could not put back what a function set in its thread")
        self.state.note()

    def put_back_anomaly_mode(self) -> None:
        """Turn anomaly mode off if it was off when the function in this thread began.

        It is never turned on here: it may have been on then because of another function.
        """
        if torch.is_anomaly_enabled() and not self.state.anomaly_was_enabled:
            torch.set_anomaly_enabled(False)

    def _leave_inference_mode(self) -> None:
        if torch.is_inference_mode_enabled():
            self._guard(internals.InferenceMode(False))

    def _leave_autocast(self) -> None:
        torch.set_autocast_cache_enabled(True)
        for device, dtype in self._dtypes.items():
            torch.set_autocast_enabled(device, False)
            torch.set_autocast_dtype(device, dtype)
        torch.autocast_increment_nesting()
        nesting = torch.autocast_decrement_nesting()
        for _ in range(nesting):
            torch.autocast_decrement_nesting()
        for _ in range(-nesting):
            torch.autocast_increment_nesting()
        torch.clear_autocast_cache()

    def _put_back_keys(self) -> None:
        included = internals.dispatch_tls_local_include_set().raw_repr()
        excluded = internals.dispatch_tls_local_exclude_set().raw_repr()
        if (included, excluded) != (self._included.raw_repr(), self._excluded.raw_repr()):
            self._guard(internals.ForceDispatchKeyGuard(self._included, self._excluded))

    def _guard(self, guard: Any) -> None:
        guard.__enter__()
        self._guards.append(guard)


def _leave_function_modes() -> None:
    # Those of `set_default_device` lie at the bottom, so the device before them counts.
    while internals.len_torch_function_stack():
        mode = internals.pop_torch_function_stack()
        if hasattr(mode, "old_device"):
            internals.device_module.CURRENT_DEVICE = mode.old_device
    # As in a new thread: older torch takes None for a context.
    vars(internals.global_device_context).pop("device_context", None)
    if not internals.is_torch_function_enabled():
        internals.set_torch_function_state(internals.TorchFunctionState.ENABLED)


def _leave_dispatch_modes() -> None:
    while internals.len_torch_dispatch_stack():
        internals.pop_mode()


def _leave_levels() -> None:
    """Leave vmap, grad and the other transforms of torch.func."""
    while internals.peek_interpreter_stack() is not None:
        internals.pop_dynamic_layer_stack()


def _set_gradients() -> None:
    internals.set_grad_enabled(True)
    internals.set_fwd_grad_enabled(True)
    internals.set_multithreading_enabled(True)
    internals.set_view_replay_enabled(False)


def _leave_hooks() -> None:
    internals.saved_tensors_hooks_enable()
    internals.saved_tensors_hooks_set_tracing(False)
    while internals.top_saved_tensors_default_hooks(False) is not None:
        internals.pop_saved_tensors_default_hooks()


def _leave_jit() -> None:
    internals.set_graph_executor_optimize(True)
    if internals.get_tracing_state() is not None:
        internals.set_tracing_state(None)
