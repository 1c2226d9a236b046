"""Protocols by which the parts of distributed autograd use each other without imports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch.autograd.graph import Node

from farcall.autograd.context_state import Context
from farcall.autograd.ending import Dropped
from farcall.autograd.handlers import PassOptions
from farcall.autograd.nodes import ReceivedTensors
from farcall.autograd.replicas import Replicas
from farcall.runtime.agent import Agent
from farcall.runtime.membership.peers import Peer
from farcall.serde import StoredError
from farcall.transport.base import Link


class Recorded(Protocol):
    """The contexts of a worker, and their records. See `autograd.Autograd`."""

    def next_id(self) -> int:
        """Return a number that no other pass has."""

    def find(self, context: int) -> Context:
        """Return the context of this id, or raise the error of a wrong id."""

    def get(self, context: int) -> Context | None:
        """Return the context of this id, if there is one."""

    def known_to(self, context: int) -> tuple[int, ...]:
        """Return the incarnations that have the context, as far as this worker knows."""

    def send(
        self, context: int, peer: Peer, tensors: Sequence[torch.Tensor], waits: bool = False
    ) -> tuple[int, int]:
        """See `runtime.gradients.DistributedGradients`."""

    def receive(
        self, context: int, peer: Peer, sent: int
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """See `runtime.gradients.DistributedGradients`."""


class RunningPass(Protocol):
    """The part of a `passes.Pass` that a run uses."""

    def wait_for(self, number: int) -> Mapping[int, torch.Tensor | None]:
        """Return the gradients of the live tensors of a source, when they are there."""

    def receive_of(self, node: Node) -> ReceivedTensors | None:
        """Return the receive that a recv node belongs to, or None if the context has no such."""

    def left(
        self, number: int, receive: ReceivedTensors, found: Mapping[Node, torch.Tensor | None]
    ) -> None:
        """Hear that a recv node of a receive has run, and all gradients of recv nodes so far."""

    def ran(self, number: int) -> None:
        """Hear that the run of a source is over."""


class FailedPass(Protocol):
    """The part of a failed `passes.Pass` that others are told."""

    options: PassOptions

    @property
    def error(self) -> StoredError | Dropped | None:
        """The error that the pass failed with."""

    @property
    def is_announced(self) -> bool:
        """Return whether it was told to others that the pass has failed."""


class PassHome(Protocol):
    """The part of a `runner.Runner` that a pass uses."""

    agent: Agent
    replicas: Replicas
    on_leaf_gradients: Callable[[Sequence[tuple[torch.Tensor, torch.Tensor]]], None]

    def send_gradients(
        self,
        peer: Peer,
        context: Context,
        options: PassOptions,
        number: int,
        credit: int,
        gradients: Mapping[int, torch.Tensor | None],
    ) -> Link:
        """Send gradients, of tensors that a peer sent with this number, and credit of the pass."""

    def give_back(self, context: Context, options: PassOptions, credit: int, missing: int) -> None:
        """Give credit of a pass back to its root."""

    def tell_root(self, context: int, options: PassOptions) -> None:
        """Tell the root that the pass has failed here."""

    def tell_all(self, context: int, backward: FailedPass) -> None:
        """Tell everybody who may take part in a pass that it has failed."""
