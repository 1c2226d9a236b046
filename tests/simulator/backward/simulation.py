"""One schedule of backward passes: forward history, then messages, runs and deaths at random.

A schedule is drawn from one `random.Random(seed)`. One to three contexts come first, each with a
history of forward calls. Then passes begin, late forward calls are on their way, messages arrive in
any order, runs go on node by node, threads are slow to do what their machine said, a backward
function raises, workers die and are noticed, and contexts whose passes are over end. It goes on
until nothing is left to do.

Violations; see `farcall.protocol.passes` and `contexts`:

BWD-1  A pass succeeded, and a leaf's gradient is not what it should be.
BWD-2  A receive sent two Grads, or one that the roots don't depend on; or it sent none, and the
       pass succeeded. A node, or the hooks of a leaf, were run twice.
BWD-3  A pass succeeded, and was not over at some worker, or gradients were on their way.
BWD-4  In the end a worker knows of a context that has ended, or whose creator died.
BWD-5  A pass did not end; or failed, though no worker died, no function raised, nothing had been
       freed, and nothing was unused in fast mode; or failed with an error that is no reason. A call
       got no answer.
BWD-6  A pass failed, and when all is quiet, its root lives and a worker that had the context when
       the pass failed does not know that it did.
BWD-7  A pass succeeded in fast mode, and something is unused at a worker that took part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from farcall.testing.network import Faults, Network
from simulator.backward.fate import ROOT_DIED, Fate, uses_all
from simulator.backward.history import (
    History,
    Leaf,
    Node,
    ReceivedNodes,
    draw_history,
    gather,
)
from simulator.backward.messages import AboutPass, Forward, Grad, Options
from simulator.backward.passes import Content
from simulator.backward.planted import BackwardBug, machines_with
from simulator.backward.worker import Worker
from simulator.backward.world import Run
from simulator.schedule import Result, Schedule, Script

REASONS = ("raised", "lost", "second time", "not all", "context ended", "no context")  # to fail
MAX_EVENTS = 20_000  # of a schedule that ends


def simulate_backward(
    seed: int,
    faults: Faults | None = None,
    *,
    bug: BackwardBug | None = None,
    script: Script | None = None,
) -> Result:
    """Run one schedule of the protocols of backward passes and contexts.

    Args:
        seed: equal arguments give equal results.
        faults: `reordering` and `crash` count; drawn from the seed when None. Links lose nothing.
        bug: a mistake to plant in the machines, to see it found.
        script: see `Schedule`. The inputs are contexts, what happens in them, passes, and faults.
    """
    return _BackwardSchedule(seed, faults, bug, script).run()


class _Run(NamedTuple):
    """A run of nodes at a worker; `expire` it when it waits for too long."""

    worker: int
    steps: Run
    expire: Callable[[], None]


class _BackwardSchedule(Schedule):
    def __init__(
        self, seed: int, faults: Faults | None, bug: BackwardBug | None, script: Script | None
    ) -> None:
        super().__init__(seed, script)
        random = self._random
        self._faults = faults or _draw_faults(random)
        self._machines = machines_with(bug)
        self._network: Network[tuple[Any, int]] = Network(self._clock, random, self._faults)
        self._workers: dict[int, Worker] = {}
        self._runs: list[_Run] = []
        self._notices: list[tuple[int, int]] = []
        self._acquainted: set[frozenset[int]] = set()
        self._histories: dict[int, History] = {}
        self._fates: dict[tuple[int, Options], Fate] = {}
        self._not_begun: list[tuple[int, Options]] = []
        self._deaths = random.choice((0, 0, 1, 1, 2)) if self._faults.crash else 0
        self._raised = False
        count = random.choice((2, 3, 3, 4, 5))
        self._workers_at_start = count
        for number in range(1, count + 1):
            self._workers[number] = Worker(number, self._machines, self)
        for _ in range(random.choice((1, 1, 2, 3))):
            if self._happens():
                self._look_back(count)

    def _look_back(self, count: int) -> None:
        """Draw a context, the calls that were made in it, and the passes that will begin."""
        random = self._random
        history = draw_history(random, count, self._happens)
        gathers = random.random() < 0.3 and self._happens()
        last = gather(history, history.creator) if gathers else None
        creator = self._workers[history.creator]
        context = creator.contexts.next_id()
        self._histories[context] = history
        sends = {worker: dict(history.sends.get(worker, {})) for worker in self._workers}
        averaging = [
            worker for worker in self._workers if random.random() < 0.15 and self._happens()
        ]
        contents = {
            worker: Content(sends[worker], history.receives(), averages=worker in averaging)
            for worker in self._workers
        }
        creator.contexts.create(context, contents[creator.id])
        for sender, receiver in history.messages:
            giver, taker = self._workers[sender], self._workers[receiver]
            giver.give(context, taker.id)
            self._met(sender, receiver)
            taker.enter(context, giver.id, contents[taker.id])
        for number in range(random.choice((1, 1, 2))):
            root = creator.id if random.random() < 0.5 else random.choice(list(history.nodes))
            nodes = history.nodes[root]
            roots = [random.choice(nodes[-4:]) for _ in range(random.choice((1, 1, 2)))]
            if last in nodes and random.random() < 0.7:
                roots = [last]
            fast = random.random() < 0.5 and (uses_all(history, roots) or random.random() < 0.15)
            options = Options(number + 1, fast, root)
            if not self._happens():
                continue
            self._fates[context, options] = Fate(history, roots, options)
            self._not_begun.append((context, options))
        self._use_up(context, sends)
        if random.random() < 0.2:
            every = [node for nodes in history.nodes.values() for node in nodes]
            node = random.choice(every)
            if self._happens():
                node.raises = self._raised = True
        for worker in self._workers.values():
            if random.random() < 0.3:
                hops = random.randrange(4)
                if self._happens():
                    self._forward(worker, context, hops)

    def _use_up(self, context: int, sends: dict[int, dict[int, list[Node]]]) -> None:
        """Free some sent tensors, as a pass does that did not retain its graph."""
        senders = [sender for sender, numbers in sends.items() if numbers]
        if not senders or self._random.random() > 0.1:
            return
        sender = self._pick(senders)
        number = self._pick(list(sends[sender]))
        if not self._happens():
            return
        del sends[sender][number]
        for (where, _), fate in self._fates.items():
            if where == context:
                used = {(receive.sender, receive.number) for receive in fate.live}
                fate.may_fail |= (sender, number) in used

    def _play(self) -> None:
        while not self._violations and self._step():
            if len(self._log) > MAX_EVENTS:
                self._violate("BWD-5", "no end in sight")
        if not self._violations:
            self._check_end()

    def _step(self) -> bool:
        """Let one thing happen; False: nothing is left that can."""
        random = self._random
        acts: list[Callable[[], bool]] = []
        acts += [self._begin] * bool(self._not_begun)
        acts += [self._deliver] * (3 * bool(len(self._network)))
        acts += [self._advance] * (3 * bool(self._runs))
        acts += [self._notice] * bool(self._notices)
        acts += [self._end] * bool(self._over())
        if self._deaths and random.random() < self._faults.crash and self._happens():
            acts.append(self._crash)
        random.shuffle(acts)
        return any(act() for act in acts) or self._time_out()

    # Events.

    def _begin(self) -> bool:
        context, options = self._pick(self._not_begun)
        self._not_begun.remove((context, options))
        fate = self._fates[context, options]
        worker = self._workers.get(options.root)
        if worker is None or worker.contexts.get(context) is None:
            fate.error = "never began"
            return True
        self._note(f"w{worker.id} begins pass", context, options, "from", fate.roots)
        worker.backward(context, options, fate.roots)
        return True

    def _deliver(self) -> bool:
        arrival = self._network.deliver()
        if arrival is None:
            return False
        source, target, (message, call) = arrival
        self._note(f"w{source} -> w{target}", message, "call", call)
        worker = self._workers.get(target)
        if worker is not None:
            self._count_flying(message, -1)
            worker.receive(source, message, call)
            if isinstance(message, Forward) and message.hops:
                self._forward(worker, message.context, message.hops - 1)
        return True

    def _forward(self, worker: Worker, context: int, hops: int) -> None:
        """Make a call inside the context, if the worker has it."""
        others = [peer for peer in self._workers if peer not in worker.lost_peers]
        peer = self._pick(others)
        if worker.give(context, peer) is not None:
            self.send(worker.id, peer, Forward(context, hops), 0)

    def _advance(self) -> bool:
        """Let one run go on by a node; return False if all of them wait for a gradient."""
        for run in self._random.sample(self._runs, len(self._runs)):
            goes_on = next(run.steps, None) if run.worker in self._workers else None
            if goes_on is None:
                self._runs.remove(run)
            if goes_on is not False:
                return True
        return False

    def _time_out(self) -> bool:
        """Time out runs that have waited too long, once nothing else happens any more."""
        runs, self._runs = self._runs, []
        for run in runs:
            if run.worker in self._workers:
                self._note(f"w{run.worker} waits for nothing")
                run.expire()
        return bool(runs)

    def _runs_on(self) -> bool:
        """Return whether some run waits for nothing."""
        return any(run.worker in self._workers for run in self._runs) and self._advance()

    def _crash(self) -> bool:
        victim = self._pick(list(self._workers))
        self._deaths -= 1
        self._note(f"w{victim} dies")
        del self._workers[victim]
        for fate in self._fates.values():
            if fate.options.root == victim and fate.error is None:
                fate.error = ROOT_DIED
        self._notices = [notice for notice in self._notices if notice[0] != victim]
        for who in self._workers:
            if frozenset((who, victim)) in self._acquainted:
                self._will_notice(who, victim)
        return True

    def _met(self, one: int, other: int) -> None:
        self._acquainted.add(frozenset((one, other)))

    def _will_notice(self, who: int, whom: int) -> None:
        worker = self._workers.get(who)
        if (
            worker is not None
            and whom not in worker.lost_peers
            and (who, whom) not in self._notices
        ):
            self._notices.append((who, whom))

    def _notice(self) -> bool:
        who, whom = self._pick(self._notices)
        self._notices.remove((who, whom))
        self._note(f"w{who} declares lost w{whom}")
        self._workers[who].on_peer_lost(whom)
        return True

    def _over(self) -> list[int]:
        """Contexts that can end: all of their passes are over."""
        open_ones = {key[0] for key, fate in self._fates.items() if fate.error is None}
        return [
            context
            for context, history in self._histories.items()
            if context not in open_ones
            and (worker := self._workers.get(history.creator)) is not None
            and worker.contexts.get(context) is not None
        ]

    def _end(self) -> bool:
        if not (len(self._network) or self._notices or self._runs_on()):
            self._check_failed()
        context = self._pick(self._over())
        self._note("context", context, "ends")
        self._workers[self._histories[context].creator].end(context)
        return True

    # Reports of workers.

    def send(self, worker: int, peer: int, message: Any, call: int) -> None:
        """Send a message. If its target can't be reached, the worker will find that it is dead."""
        self._met(worker, peer)
        if peer not in self._workers:
            self._will_notice(worker, peer)
        self._count_flying(message, 1)
        self._network.send(worker, peer, (message, call))

    def _count_flying(self, message: Any, change: int) -> None:
        if isinstance(message, AboutPass) and isinstance(message.what, Grad):
            self._fates[message.context, message.options].flying += change

    def start(self, worker: int, run: Run, expire: Callable[[], None]) -> None:
        """Note that a run begins."""
        self._runs.append(_Run(worker, run, expire))

    def is_held_up(self) -> bool:
        """Return whether a thread is slow."""
        return self._random.random() < 0.2 and self._happens()

    def ran(self, context: int, options: Options, node: Node) -> None:
        """Note that a node is run."""
        self._note(f"w{node.worker} runs", node)
        fate = self._fates[context, options]
        fate.ran[node] += 1
        if fate.ran[node] > 1 and (not isinstance(node, Leaf) or node.has_hooks):
            self._violate("BWD-2", f"{node} is run twice in pass {options} of {context}")

    def accumulated(self, context: int, options: Options, leaf: Node, gradient: int) -> None:
        """Note that a leaf gets a gradient."""
        self._fates[context, options].found[leaf] += gradient

    def sent(self, context: int, options: Options, receive: ReceivedNodes) -> None:
        """Note that the gradients of a receive go off."""
        fate = self._fates[context, options]
        fate.sent[receive] += 1
        if fate.sent[receive] > 1:
            self._violate("BWD-2", f"{receive} sends two GRADs in pass {options} of {context}")
        if receive not in fate.live and not fate.may_fail:
            self._violate("BWD-2", f"{receive} sends a GRAD though nothing depends on it")

    def ended(self, context: int, options: Options, error: str) -> None:
        """Note that a pass has ended at the worker that began it."""
        self._note("pass", options, "of", context, "ends:", error or "success")
        fate = self._fates[context, options]
        if fate.error is not None:
            self._violate("BWD-5", f"pass {options} of {context} ends twice")
        fate.error = error
        if error:
            workers = self._workers.values()
            fate.to_tell = [each.id for each in workers if each.contexts.get(context)]
            if not (self._raised or self._has_died() or fate.may_fail):
                self._violate("BWD-5", f"pass {options} of {context} failed: {error}")
            if not any(reason in error for reason in REASONS):
                self._violate("BWD-5", f"pass {options} of {context} failed, but not why: {error}")
            return
        if +fate.found != +Counter(fate.expected):
            text = f"pass {options} of {context}: {dict(fate.found)}, expected {fate.expected}"
            self._violate("BWD-1", text)
        missing = fate.live - set(fate.sent)
        if missing:
            self._violate("BWD-2", f"pass {options} of {context}: no GRADs of {missing}")
        if fate.flying:
            self._violate("BWD-3", f"{fate.flying} GRADs of pass {options} of {context} fly")
        self._check_over(context, options)

    # Judgement.

    def _has_died(self) -> bool:
        return len(self._workers) < self._workers_at_start

    def _check_over(self, context: int, options: Options) -> None:
        for worker in self._workers.values():
            content = worker.contexts.get(context)
            backward = None if content is None else content.passes.get(options)
            if backward is not None and not backward.is_idle:
                text = f"pass {options} of {context} is not over at w{worker.id}"
                self._violate("BWD-3", text)
            if backward is not None and options.fast and backward.machine.missing:
                text = f"pass {options} of {context} does not use all that w{worker.id} sent"
                self._violate("BWD-7", text)

    def _check_failed(self) -> None:
        """Check, once all is quiet, that all who had the context know of a failed pass."""
        for (context, options), fate in self._fates.items():
            if options.root not in self._workers:
                continue  # it may have died before it told anybody
            for number in fate.to_tell:
                worker = self._workers.get(number)
                content = None if worker is None else worker.contexts.get(context)
                if content is None:
                    continue
                backward = content.passes.get(options)
                if backward is None or not backward.error:
                    text = f"w{number} does not know that it failed"
                    self._violate("BWD-6", f"pass {options} of {context}: {text}")

    def _check_end(self) -> None:
        for (context, options), fate in self._fates.items():
            if fate.error is None:
                self._violate("BWD-5", f"pass {options} of {context} does not end")
        for worker in self._workers.values():
            if len(worker.contexts):
                text = f"w{worker.id} keeps {len(worker.contexts)} contexts"
                self._violate("BWD-4", text)
            if worker.open_calls:
                self._violate("BWD-5", f"w{worker.id} gets no answer to {worker.open_calls} calls")

    # Helpers.

    def _pick(self, options: Sequence[Any]) -> Any:
        return options[self._random.randrange(len(options))]


def _draw_faults(random: Random) -> Faults:
    return Faults(
        reordering=0.0 if random.random() < 0.3 else 0.5 * random.random(),
        crash=0.0 if random.random() < 0.5 else 0.2 * random.random(),
    )
