"""The oracle of the directory: sees all workers, and judges what each says by DIR-1 to DIR-7."""

from __future__ import annotations

from collections import defaultdict

from farcall.ids import MAX_MEETINGS, MET_AGAIN, original
from farcall.protocol.directory import DISCARD_SECONDS, Found, Standing
from simulator.directory.world import Link, Node, Record, Store
from simulator.schedule import Violation


class DirectoryOracle:
    """The judge. `violations` has the broken promises."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        # Of each worker: when it noted the loss of a record, and when it dropped an incarnation.
        self._lost_at: defaultdict[Node, dict[Record, float]] = defaultdict(dict)
        self._dropped: defaultdict[Node, dict[int, float]] = defaultdict(dict)
        self._here: defaultdict[Node, dict[str, Record]] = defaultdict(dict)  # by the news
        self._ended: defaultdict[Node, dict[int, int]] = defaultdict(dict)  # the last meeting

    def violate(self, invariant: str, text: str) -> None:
        """Take down a broken promise."""
        self.violations.append(Violation(invariant, text))

    # Events.

    def resolved(self, node: Node, found: Found[Record], *, asked: bool) -> None:
        """Note that a worker has looked a key up."""
        if (
            node.machine.is_open
            and not asked
            and found.standing in (Standing.LOST, Standing.UNKNOWN)
        ):
            self.violate("DIR-4", f"{node} says {found.standing.name} and has not asked")

    def check(self, node: Node) -> None:
        """Judge the tables of a worker, which may have changed just now."""
        ended, holder = self._ended[node], node.machine.holder
        for record in node.machine.parties():
            if record.loss_cause is not None:
                ended[record.begun] = max(ended.get(record.begun, -1), record.meeting)
                continue
            if record.meeting <= ended.get(record.begun, -1):
                self.violate("DIR-3", f"{node} takes an ended meeting with {record.begun} for new")
            if not node.unnoted:
                for key in record.keys:
                    found = holder(key)
                    if found is None or found.loss_cause is not None:
                        self.violate("DIR-1", f"{node} has {key!r} for the lost, and one lives")
        self._read_news(node)

    def _read_news(self, node: Node) -> None:
        here, machine = self._here[node], node.machine
        while machine.news:
            record, is_here = machine.news.popleft()
            name = record.worker.name
            if here.get(name) is not (None if is_here else record):
                self.violate(
                    "DIR-7", f"{node} is told out of turn that {record.worker} is {is_here}"
                )
            if is_here:
                here[name] = record
            else:
                here.pop(name, None)
        if not node.unnoted:
            for name in {record.worker.name for record in machine.parties()}:
                if here.get(name) is not machine.known(name):
                    self.violate("DIR-7", f"{node} was not told who has {name!r} now")

    def noted(
        self, node: Node, record: Record, before: list[Record], gone: list[int], now: float
    ) -> None:
        """Note that a worker's directory was told of a loss, and has discarded others."""
        after = node.machine.parties()
        limit = now - DISCARD_SECONDS
        lost, dropped = self._lost_at[node], self._dropped[node]
        for old in before:
            if old not in after:
                dropped[old.worker.incarnation] = now
                if old.loss_cause is None or lost.get(old, now) > limit:
                    self.violate("DIR-6", f"{node} discards {old.worker} too soon")
        lost.setdefault(record, now)
        self._check_gone(node, gone, now)
        for kept in after:
            is_old = node.machine.is_open or kept is not node.machine.newest(kept.begun)
            if is_old and lost.get(kept, now) < limit:
                self.violate("DIR-5", f"{node} keeps {kept.worker}")
        known = {kept.begun for kept in after}
        recent = {original(one) for one, when in dropped.items() if when >= limit}
        numbers = set(node.machine._met_again)
        if surplus := numbers - known - recent:
            self.violate("DIR-5", f"{node} keeps the numbers of meetings with {surplus}")

    def _check_gone(self, node: Node, gone: list[int], now: float) -> None:
        dropped, limit = self._dropped[node], now - DISCARD_SECONDS
        for incarnation in gone:
            if node.machine.of_incarnation(incarnation) is not None:
                self.violate("DIR-6", f"{node} is to discard {incarnation}, which is known")
            if dropped.pop(incarnation, now) > limit:
                self.violate("DIR-6", f"{node} is to discard {incarnation} everywhere too soon")
            if not node.machine.of_incarnation(incarnation + MET_AGAIN):
                self._ended[node].pop(original(incarnation), None)
        if late := [one for one, when in dropped.items() if when < limit]:
            self.violate("DIR-6", f"{node} never says that {late} are to be discarded")

    def drops(self, node: Node, link: Link) -> None:
        """Note that a worker does not keep a link to which it has agreed."""
        if node.machine.meeting(link.other(node).incarnation) < link.meeting:
            self.violate("DIR-2", f"{node} keeps no link to {link.other(node)} in {link.meeting}")

    def heard_of(self, node: Node, incarnation: int, now: float) -> None:
        """Note that a worker takes down the number of a meeting with one that it does not know."""
        self._dropped[node][incarnation] = now

    def superseded(self, node: Node, record: Record, now: float) -> None:
        """Start the clock of a worker that is met again, unless workers may come and go."""
        if not node.machine.is_open:
            self._lost_at[node][record] = now

    # The end.

    def check_pair(self, one: Node, other: Node) -> None:
        """Judge what two living workers, between whom all is well, know of each other."""
        meetings = [one.machine.meeting(other.incarnation), other.machine.meeting(one.incarnation)]
        if max(meetings) >= MAX_MEETINGS - 1:
            return
        for a, b in ((one, other), (other, one)):
            record = a.machine.newest(b.incarnation)
            if record is None or record.loss_cause is not None:
                self.violate("DIR-2", f"to {a}, {b} is {record and record.loss_cause}")
            elif a.machine.known(b.me.name) is not record:
                self.violate("DIR-1", f"{a} does not find {b} by its name")
        if meetings[0] != meetings[1]:
            self.violate("DIR-2", f"{one} and {other} are in meetings {meetings}")

    def check_registered(self, node: Node, store: Store) -> None:
        """Judge whether the store knows a worker after all is well for some time."""
        if store.records.get(node.me.name) != node.me:
            self.violate("LOOK-5", f"the store does not know {node}")
