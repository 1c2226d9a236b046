"""A simulated backward pass, as the oracle sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from simulator.backward.history import History, Leaf, Node, ReceivedNodes
from simulator.backward.messages import Options

ROOT_DIED = "its root died"


class Fate:
    """The wanted and the real fate of a pass.

    Attributes:
        expected: the right gradients of leaves.
        live: the receives that send gradients.
        may_fail: even if no worker dies and nothing raises.
        found: the gradients that leaves got.
        ran: how often each node was run.
        sent: how many GRADs each receive sent.
        flying: how many GRADs are on their way.
        error: how the pass ended; "": with success, None: not yet.
        to_tell: the workers that had the context when the pass failed.
    """

    def __init__(self, history: History, roots: Sequence[Node], options: Options) -> None:
        self.history = history
        self.roots = roots
        self.options = options
        totals = history.gradients(roots)
        self.expected = {node: total for node, total in totals.items() if isinstance(node, Leaf)}
        self.live = {node.receive for node in totals if node.receive is not None}
        self.may_fail = options.fast and not uses_all(history, roots)
        self.found: Counter[Node] = Counter()
        self.ran: Counter[Node] = Counter()
        self.sent: Counter[ReceivedNodes] = Counter()
        self.flying = 0
        self.error: str | None = None
        self.to_tell: list[int] = []


def uses_all(history: History, roots: Sequence[Node]) -> bool:
    """Return whether these depend on all tensors that were sent: fast mode is for that."""
    used = history.gradients(roots)
    nodes = [node for found in history.nodes.values() for node in found]
    return all(node in used for node in nodes if node.receive is not None)
