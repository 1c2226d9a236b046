"""What the calls that an agent serves use of it."""

from __future__ import annotations

from dataclasses import dataclass

from farcall.runtime.answers import Answers
from farcall.runtime.context import ServingAgent
from farcall.runtime.control import ControlMessages
from farcall.runtime.executor import Executor
from farcall.runtime.gradients import Gradients
from farcall.runtime.leaving import Leaver
from farcall.runtime.machine import Machine
from farcall.runtime.pickling import Pickling
from farcall.runtime.policy import Policy
from farcall.runtime.references import References
from farcall.runtime.shortage import Shortage
from farcall.runtime.status import Status


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts of an agent that its `inbound.Job`s use, all of them thread-safe.

    Attributes:
        agent: in whose name functions run.
        policy: says which functions may be called.
    """

    agent: ServingAgent
    status: Status
    machine: Machine
    references: References
    pickling: Pickling
    gradients: Gradients
    executor: Executor
    leaver: Leaver
    answers: Answers
    control: ControlMessages
    shortage: Shortage
    policy: Policy
