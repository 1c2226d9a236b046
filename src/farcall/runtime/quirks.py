"""The changes to an agent by a layer that imitates another system, such as `compat`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from farcall.ids import WorkerInfo
from farcall.runtime.advice import Advice
from farcall.serde.pickling import Reducer


@dataclass(frozen=True, slots=True)
class Quirks:
    """The behaviour of an agent that imitates another system. By default there is none.

    An agent is given its quirks at its start, and never others: the first request may arrive as
    soon as it listens.

    Attributes:
        translate: returns what a call raises here, from the error that a worker answered with.
        on_raised: is called with an error that a function raised here, and with this worker.
        on_leaf_gradients: is called with the leaves to which a backward pass has found gradients,
            and these, before a context keeps them.
        inherits_deadlines: whether the calls that a function makes inherit its deadline.
        reducers: of types that are pickled in a way of their own when they are sent, see
            `Serializer`.
        advice: the warnings that were not given yet.
    """

    translate: Callable[[Any, WorkerInfo], BaseException] = lambda error, where: error
    on_raised: Callable[[BaseException, WorkerInfo], None] = lambda error, here: None
    on_leaf_gradients: Callable[[Sequence[tuple[torch.Tensor, torch.Tensor]]], None] = (
        lambda gradients: None
    )
    inherits_deadlines: bool = True
    reducers: Mapping[type, Reducer] = field(default_factory=dict)
    advice: Advice = field(default_factory=Advice)
