"""What simulated workers say to each other about backward passes."""

from __future__ import annotations

from typing import NamedTuple


class Options(NamedTuple):
    """Of a pass; `root` is the worker that began it."""

    number: int
    fast: bool
    root: int


class Prepare(NamedTuple):
    """Of what was sent with this number, the tensors with these indices are used."""

    context: int
    options: Options
    number: int
    live: tuple[int, ...]


class Grad(NamedTuple):
    """The gradients of what was sent with this number: (index, gradient) of what is used.

    2**-share of the pass goes with it.
    """

    context: int
    options: Options
    number: int
    share: int
    gradients: tuple[tuple[int, int], ...]


class Ran(NamedTuple):
    """To the root: 2**-share of the pass is done.

    In fast mode, so many sources of the sender have no gradient yet (`missing`).
    """

    context: int
    options: Options
    share: int
    missing: int


class Broken(NamedTuple):
    """To the root: the pass has failed here."""

    context: int
    options: Options


class Cause(NamedTuple):
    """From the root: why has the pass failed there?"""

    context: int
    options: Options


class Survey(NamedTuple):
    """To the root: find out which sources are live."""

    context: int
    options: Options


class Answered(NamedTuple):
    """To a call. `error`: of what was called or, to a Cause, of the pass."""

    call: int
    error: str


class Abort(NamedTuple):
    """A pass has failed elsewhere."""

    context: int
    options: Options
    reason: str


class Released(NamedTuple):
    """A context has ended."""

    context: int
    floor: int


class Holds(NamedTuple):
    """To the creator of a context: the sender has it, and lost who gave it."""

    context: int


class Forward(NamedTuple):
    """A call inside a context, with nothing of interest in it; it is passed on `hops` times."""

    context: int
    hops: int
