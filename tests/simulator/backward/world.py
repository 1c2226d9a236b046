"""The surroundings of a simulated worker in backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from simulator.backward.history import Node, ReceivedNodes
from simulator.backward.messages import Options

Run = Iterator[bool]  # whether a step was done; else it waits for a gradient


class World(Protocol):
    """The world of a worker: actions that it has, and parties that it tells."""

    def send(self, worker: int, peer: int, message: Any, call: int) -> None:
        """Send a message; `call` is 0 if it wants no answer."""

    def start(self, worker: int, run: Run, expire: Callable[[], None]) -> None:
        """Begin a run. If it waits for too long, it is to `expire`."""

    def is_held_up(self) -> bool:
        """Return whether other things happen before a slow thread has done what it was told."""

    def ran(self, context: int, options: Options, node: Node) -> None:
        """Note that a node is run."""

    def accumulated(self, context: int, options: Options, leaf: Node, gradient: int) -> None:
        """Note that a leaf gets a gradient."""

    def sent(self, context: int, options: Options, receive: ReceivedNodes) -> None:
        """Note that the gradients of a receive go off."""

    def ended(self, context: int, options: Options, error: str) -> None:
        """Note that a pass that began here has ended."""
