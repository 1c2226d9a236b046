"""What a layer that imitates another system, such as `compat`, may change in an agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from farcall.ids import WorkerInfo


class Quirks(NamedTuple):
    """Whom an agent behaves like. By default it behaves like itself.

    Attributes:
        translate: gives what a call raises here, from what another worker answered and which one.
        on_raised: is called with an error that a function raised here.
        inherits_deadlines: whether the calls that a function makes inherit its deadline.
    """

    translate: Callable[[Any, WorkerInfo], BaseException] = lambda error, where: error
    on_raised: Callable[[BaseException], None] = lambda error: None
    inherits_deadlines: bool = True
