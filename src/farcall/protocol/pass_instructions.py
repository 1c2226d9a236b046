"""The instructions of the machine of a backward pass (`passes.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Part = tuple[Any, ...]  # a source or a receive, and indices of those of its tensors that are used


class ExploreRoots(NamedTuple):
    """Find the parts of receives that the roots reach; say `reached` of all roots, for SURVEY."""


class AskPart(NamedTuple):
    """Send PREPARE for a part of a receive, and say `prepared` when it is answered."""

    part: Part


class AskRoot(NamedTuple):
    """Have the root find out which sources are live, and say `begin` when it has."""


class AnswerAsker(NamedTuple):
    """Answer the asker; with the error, if there is one."""

    asker: Any
    error: Any


class RunSource(NamedTuple):
    """Run what a source reaches; say `computed`, carry that out, and say `ran`."""

    source: int


class RunTogether(NamedTuple):
    """Run what these sources reach, waiting for one after the other. Say `left` and `ran`."""

    sources: Sequence[int]


class KeepLeaves(NamedTuple):
    """Keep the gradients of leaves that the run has found."""


class SendGradients(NamedTuple):
    """Send the gradients of a receive to where it came from, with this credit."""

    receive: Any
    credit: int


class AverageLeaves(NamedTuple):
    """All leaves have their gradients: average them with other processes; say `averaged`."""

    source: int


class ReturnCredit(NamedTuple):
    """Send credit back to the root (CREDIT_RETURNED)."""

    credit: int
    missing: int


class FailUnused(NamedTuple):
    """`fail`: in fast mode, of so many messages that workers sent nothing is used."""

    missing: Mapping[Any, int]


class StopPass(NamedTuple):
    """Nothing more is done: let go of the graph and the gradients."""


class EndPass(NamedTuple):
    """At the root: tell the user that the pass is over; with an error, then say `abort`."""

    error: Any


class TellRoot(NamedTuple):
    """Tell the root that the pass has failed here (PASS_FAILED)."""


class AskCause(NamedTuple):
    """Ask a worker why the pass has failed there, and say `fail`."""

    peer: Any


class TellAll(NamedTuple):
    """Tell everybody who has the context that the pass has failed (`abort`)."""


Instruction = (
    ExploreRoots
    | AskPart
    | AskRoot
    | AnswerAsker
    | RunSource
    | RunTogether
    | KeepLeaves
    | SendGradients
    | AverageLeaves
    | ReturnCredit
    | FailUnused
    | StopPass
    | EndPass
    | TellRoot
    | AskCause
    | TellAll
)
