"""Warnings about calls that work, but hardly as their author meant. Each is given once."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection
from types import FrameType

import torch

from farcall.errors import GradientWarning
from farcall.serde import is_own

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class Advice:
    """The warnings that were not given yet. Thread-safe.

    The agents that `init_rpc` makes share those of the process; any other agent has its own.
    """

    def __init__(self, pending: Collection[type[Warning]] = (GradientWarning,)) -> None:
        self.pending = set(pending)

    def warn_of_gradients(self, worker: str, function: str) -> None:
        """Warn that a call has a tensor that requires grad, which nothing will record."""
        self._warn(
            GradientWarning,
            f"the call of {function} on worker {worker!r} has an argument that "
            "requires grad, outside of `farcall.autograd.context()`: no gradient will come back. "
            "Make the call inside of a context, under torch.no_grad(), or detach the argument. "
            "(Said once in a process. To be spared: "
            'warnings.filterwarnings("ignore", category=farcall.errors.GradientWarning))',
        )

    def _warn(self, category: type[Warning], text: str) -> None:
        try:
            self.pending.remove(category)
        except KeyError:
            return  # another thread has given it
        frame = _frame_of_user()
        variables = frame.f_globals
        try:
            warnings.warn_explicit(
                text,
                category,
                filename=frame.f_code.co_filename,
                lineno=frame.f_lineno,
                module=variables.get("__name__", "<unknown>"),
                registry=variables.setdefault("__warningregistry__", {}),
                source=None,
            )
        except BaseException:
            self.pending.add(category)  # a user who made it an error sees each one
            raise


def _frame_of_user() -> FrameType:
    """Return the nearest frame that is neither farcall's nor torch's, such as `Module.__call__`."""
    frame: FrameType | None = sys._getframe(1)
    nearest: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_own(file):
            nearest = nearest or frame
            if not file.startswith(_TORCH):
                return frame
        frame = frame.f_back
    return nearest or sys._getframe(1)
