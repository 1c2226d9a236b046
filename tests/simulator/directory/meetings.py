"""Links, meetings and losses of simulated workers, as the transport and `Losses` have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random

from farcall.ids import meeting_of, nth_incarnation, original
from farcall.protocol.directory import Verdict
from simulator.agenda import Agenda
from simulator.directory.oracle import DirectoryOracle
from simulator.directory.world import Link, Node, Record

NOTICED = 40.0  # seconds after which the end of a link is noticed over a network that is cut
ATTEMPT_SECONDS = 5.0  # to reach a worker that was lost
LONGEST_SEARCH = 30.0  # seconds between two attempts

Done = Callable[[str], None]  # told how an attempt has ended


class Meetings:
    """The links between workers.

    Args:
        nodes: the workers, by their original incarnations.
        agenda: the future events.
        random: draws delays.
        oracle: judges.
        slowest: seconds that a message may take.
        note: takes down what happens.
        on_peer_lost: told of each worker that is lost to another.

    Attributes:
        cuts: incarnations of two between whom nothing gets through, and until when.
    """

    def __init__(
        self,
        nodes: Mapping[int, Node],
        agenda: Agenda[Node],
        random: Random,
        oracle: DirectoryOracle,
        slowest: float,
        note: Callable[..., None],
        on_peer_lost: Callable[[Node, Record], None],
    ) -> None:
        self._nodes = nodes
        self._agenda = agenda
        self._clock = agenda.clock
        self._random = random
        self._oracle = oracle
        self._slowest = slowest
        self._note = note
        self._on_peer_lost = on_peer_lost
        self.cuts: dict[frozenset[int], float] = {}

    def _at(self, moment: float, node: Node, act: Callable[[], None]) -> None:
        self._agenda.at(moment, node, act)

    def soon(self, node: Node, act: Callable[[], None]) -> None:
        delay = (0.0, 0.001, self._slowest)[int(3 * self._random.random())] * self._random.random()
        self._agenda.at(self._clock.now + delay, node, act)

    def is_cut(self, one: Node, other: Node) -> bool:
        ends = frozenset((one.incarnation, other.incarnation))
        return bool(self.cuts) and self._clock.now < self.cuts.get(ends, 0.0)

    def use(self, node: Node, record: Record, deadline: float) -> None:
        incarnation = record.worker.incarnation
        if incarnation == node.incarnation:
            return
        for link in node.links:
            if link.dialler is node and link.peer(node).incarnation == incarnation:
                self._send_frame(node, link)
                return

        def done(how: str) -> None:
            if how not in {"linked", "late"}:
                self.declare_lost(node, record, how)

        self._dial(node, incarnation, deadline, done)

    # Handshakes, as `handshake.py` and `connections.py` in `transport/connect/` have them.

    def _dial(self, node: Node, incarnation: int, until: float, done: Done) -> None:
        if incarnation in node.dialling:
            return
        node.dialling.add(incarnation)
        waiting = [done]

        def end(how: str) -> None:
            if waiting:
                self._note(node, "dials", self._nodes[original(incarnation)], how)
                node.dialling.discard(incarnation)
                waiting.pop()(how)

        target, begun = self._nodes[original(incarnation)], node.incarnation
        said = node.machine.meeting(target.incarnation)

        def accept() -> None:
            agreed = max(said, target.machine.meeting(begun))
            if self._random.random() < 0.6:  # proofs are exchanged
                self.soon(target, partial(admit, agreed))
            else:
                admit(agreed)

        def admit(agreed: int) -> None:
            if not waiting or not target.alive:
                return
            if self._admits(target, node, agreed):
                self.soon(node, partial(greet, agreed))
            else:
                self.soon(node, partial(end, "refused"))

        def greet(agreed: int) -> None:
            if not waiting or self.is_cut(node, target):
                return
            if agreed and not self._admits(node, target, agreed):
                end("refused")
                return
            link = Link(node, target, agreed)
            self.soon(target, partial(self._keep_theirs, target, link))
            if self._keep(node, link):
                end("linked" if agreed == meeting_of(incarnation) else "anew")

        if not self.is_cut(node, target):
            if target.alive:
                self.soon(target, accept)
            else:
                self.soon(node, partial(end, "absent"))
        self._at(min(until, self._clock.now + 60.0), node, partial(end, "late"))

    def _admits(self, node: Node, other: Node, meeting: int) -> bool:
        """Return whether a worker wants a link: `Losses.admit`."""
        machine, incarnation = node.machine, other.incarnation
        verdict, record = machine.verdict(incarnation, meeting), machine.newest(incarnation)
        if verdict is Verdict.ANEW:
            if record is not None:
                self.declare_lost(node, record, "it had given this worker up")
                self._oracle.superseded(node, record, self._clock.now)
            if machine.meet_again(incarnation, meeting, self._clock.now):
                self._note(node, "meets", other, "again; meeting", meeting)
            elif record is None and machine.meeting(incarnation) == meeting:
                last = nth_incarnation(incarnation, meeting - 1)
                self._oracle.heard_of(node, last, self._clock.now)
        elif verdict is not Verdict.WELCOME:
            self._note(node, "refuses", other, verdict)
        self._oracle.check(node)
        return verdict in (Verdict.WELCOME, Verdict.ANEW)

    def _keep_theirs(self, node: Node, link: Link) -> None:
        if self._keep(node, link) and self._random.random() < 0.7:  # else nothing is sent for now
            self.soon(node, partial(self._on_frame, node, link))

    def _keep(self, node: Node, link: Link) -> bool:
        """Have one side keep a link, unless that is of an earlier meeting by now."""
        other = link.other(node)
        if node.machine.meeting(other.incarnation) != link.meeting:
            self._oracle.drops(node, link)
            self.tell_end(other, link)
            return False
        node.links.append(link)
        if not other.alive or (node is link.acceptor and link not in other.links):
            self.tell_end(node, link)
        return True

    def _send_frame(self, node: Node, link: Link) -> None:
        self.soon(link.other(node), partial(self._on_frame, link.other(node), link))

    def _on_frame(self, node: Node, link: Link) -> None:
        """Act on a frame as `Agent.handle` does."""
        if link not in node.links:
            return
        record = self._record(node, link)
        present = node.machine.meeting(link.other(node).incarnation)
        if record is not None and record.loss_cause is None and present != link.meeting:
            self._oracle.violate("DIR-3", f"{node} hears in {link.meeting}, and it is {present}")

    def _record(self, node: Node, link: Link) -> Record | None:
        peer = link.peer(node)
        record = node.machine.of_incarnation(peer.incarnation)
        if record is None:
            record = node.machine.heard(peer)
            self._oracle.check(node)
        return record

    # Ends.

    def tell_end(self, node: Node, link: Link) -> None:
        """Let a link that has ended at its other end also end here, sooner or later."""
        cut = self.is_cut(node, link.other(node))
        delay = (NOTICED if cut else self._slowest) * self._random.random()
        self._at(self._clock.now + delay, node, partial(self._on_end, node, link))

    def _on_end(self, node: Node, link: Link) -> None:
        if link in node.links:
            node.links.remove(link)
            self.tell_end(link.other(node), link)
            record = self._record(node, link)
            if record is not None:
                self.declare_lost(node, record, "the link ended")

    def declare_lost(self, node: Node, record: Record, cause: str) -> None:
        """Lose a peer as `Losses.declare_lost` does."""
        if record.loss_cause is not None:
            return
        other, meeting = self._nodes[record.begun], record.meeting
        self._note(node, "loses", other, "in meeting", f"{meeting}:", cause)
        record.loss_cause = cause
        for link in [one for one in node.links if self._leads_to(one, node, record)]:
            node.links.remove(link)
            self.tell_end(link.other(node), link)
        node.unnoted += 1
        self._oracle.check(node)

        def note() -> None:
            node.unnoted -= 1
            self.on_peer_lost(node, record)
            if record.left is None:
                seconds = min(2.0 ** min(record.meeting, 9), LONGEST_SEARCH)
                self._search(node, record, seconds)
            self._on_peer_lost(node, record)

        if self._random.random() < 0.8:
            note()
        else:  # another thread is at it
            self._at(self._clock.now + 0.01 * self._random.random(), node, note)

    def _leads_to(self, link: Link, node: Node, record: Record) -> bool:
        return link.peer(node).incarnation == record.worker.incarnation

    def on_peer_lost(self, node: Node, record: Record) -> None:
        before = node.machine.parties()
        gone = node.machine.on_peer_lost(record, self._clock.now)
        self._oracle.noted(node, record, before, gone, self._clock.now)
        self._oracle.check(node)

    def _search(self, node: Node, record: Record, seconds: float) -> None:
        """Search as `Search` and `Losses._reach` do."""

        def reach() -> None:
            if node.machine.is_current(record):
                again = nth_incarnation(record.begun, record.meeting + 1)
                self._dial(node, again, self._clock.now + ATTEMPT_SECONDS, done)

        def done(how: str) -> None:
            if how == "late":
                self._search(node, record, min(2 * seconds, LONGEST_SEARCH))

        self._at(self._clock.now + seconds, node, reach)

    def on_goodbye(self, node: Node, link: Link) -> None:
        if link in node.links:
            record = self._record(node, link)
            if record is not None:
                record.left = "it has shut down"
