"""Messages of simulated workers about backward passes.

The instructions `TellEnd` and `ReportHeld` are sent as they are.
"""

from __future__ import annotations

from typing import NamedTuple

from farcall.protocol.pass_instructions import AskCause, AskRoot, ReturnCredit, TellRoot


class Options(NamedTuple):
    """Of a pass; `root` is the worker that began it."""

    number: int
    fast: bool
    root: int


class Prepare(NamedTuple):
    """Of the tensors sent with this number, those with these indices are used."""

    number: int
    live: tuple[int, ...]


class Grad(NamedTuple):
    """The gradients of the tensors sent with this number: (index, gradient) of used ones."""

    number: int
    credit: int
    gradients: tuple[tuple[int, int], ...]


class Abort(NamedTuple):
    """The pass has failed elsewhere."""

    reason: str


class AboutPass(NamedTuple):
    """A message of a pass. Some are the instruction that had them sent."""

    context: int
    options: Options
    what: Prepare | Grad | Abort | AskRoot | AskCause | ReturnCredit | TellRoot


class Answered(NamedTuple):
    """To a call. `error`: of the called function or, to an AskCause, of the pass."""

    call: int
    error: str


class Forward(NamedTuple):
    """A call inside a context, with nothing of interest in it; it is passed on `hops` times."""

    context: int
    hops: int
