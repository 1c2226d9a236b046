"""The part of an agent that the calls which it serves use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from farcall.ids import WorkerInfo
from farcall.runtime.calls.answers import Answers
from farcall.runtime.calls.pickling import Pickling
from farcall.runtime.calls.shortage import Shortage
from farcall.runtime.context import ServingAgent
from farcall.runtime.control import ControlMessages
from farcall.runtime.gradients import DistributedGradients
from farcall.runtime.machine import Machine
from farcall.runtime.membership.shutdown import ShutdownCoordinator
from farcall.runtime.references.handles import References
from farcall.runtime.status import Status
from farcall.runtime.threads.executor import Executor


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts of an agent that its `server_call.ServerCall`s use, all of them thread-safe.

    Attributes:
        agent: in whose name functions run.
        on_raised: see `Quirks`.
    """

    agent: ServingAgent
    status: Status
    machine: Machine
    references: References
    pickling: Pickling
    gradients: DistributedGradients
    executor: Executor
    coordinator: ShutdownCoordinator
    answers: Answers
    control: ControlMessages
    shortage: Shortage
    on_raised: Callable[[BaseException, WorkerInfo], None]
