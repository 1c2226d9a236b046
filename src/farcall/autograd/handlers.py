"""Calls between workers in backward passes. Gradients travel as one-way messages instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from farcall.runtime.calls.call_names import own_handler
from farcall.runtime.current import current_agent


class PassOptions(NamedTuple):
    """The options that were given at the root; the same at all workers of a pass."""

    id: int
    retain_graph: bool
    create_graph: bool
    fast: bool
    root: str  # name of the worker that began the pass
    trace: Mapping[str, str] = {}  # of its span there, see `wire.messages.Extras`


def _runner() -> Any:
    return current_agent().gradients.runner  # type: ignore[attr-defined]


@own_handler("a part of a backward pass", checks_itself=True)
def prepare(context: int, options: tuple[Any, ...], number: int, live: list[int]) -> Any:
    """Note that, of the tensors sent with this number, those with these indices are used."""
    return _runner().on_prepare(context, PassOptions(*options), number, live)


@own_handler("a part of a backward pass", checks_itself=True)
def survey(context: int, options: tuple[Any, ...]) -> Any:
    """Find out, at the root, which sources are live."""
    return _runner().on_survey(context, PassOptions(*options))


@own_handler("the cause of a failed backward pass", checks_itself=True)
def cause(context: int, number: int) -> Any:
    """Raise, at a worker where a pass failed, the error of that pass."""
    return _runner().on_cause(context, number)


@own_handler("the news of a failed backward pass", checks_itself=True)
def abort(context: int, options: tuple[Any, ...], reason: str) -> None:
    """End a pass that has failed elsewhere."""
    _runner().on_abort(context, PassOptions(*options), reason)
