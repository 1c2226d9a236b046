"""Processes that are measured in turn, one at a time, in short blocks.

The times of a shared machine come in bursts, good or bad, of a tenth of a second to several
seconds. So the processes of all implementations are alive at once and change places more often than
that; whatever the machine does, it does to all of them. Those whose turn it is not are stopped
with SIGSTOP, since an idle pair of torch.distributed.rpc keeps a core busy.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, Self

from plans import CASES, FARCALL, LOCAL, Group
from steps import Step, disagreement

PEER = Path(__file__).with_name("peer.py")
LIMIT_SECONDS = 300.0  # for a block, and for the end of a peer; the first block includes its start


class PeerFailed(Exception):
    """A peer died, answered nonsense, or did not answer in time."""


class Peer:
    """One start of `peer.py`, which runs only while it is asked. Ended by leaving its context.

    Args:
        implementation: of `plans.EVERY`, `LOCAL` or `BEFORE`.
        world: of `plans.WORLDS`.
        source: where farcall is imported from; None: where it is installed.
    """

    def __init__(self, implementation: str, world: str, source: Path | None = None) -> None:
        self.implementation = implementation
        self.values: dict[str, list[float]] = {}  # by case, of all steps so far
        self._folder = tempfile.TemporaryDirectory()
        self._errors = Path(self._folder.name, "stderr")
        store = Path(self._folder.name, "store")
        environment = dict(os.environ)
        if source is not None:
            environment["PYTHONPATH"] = str(source)
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(PEER), implementation, str(store), world],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                process_group=0,  # to be stopped as a whole, and not reached by Ctrl-C
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._end()
        finally:
            with self._process:
                self._signal(signal.SIGKILL)
            self._folder.cleanup()

    def ask(self, case: str, count: int) -> list[Step]:
        """Run one block, and return its steps."""
        self._signal(signal.SIGCONT)
        answer = self._answer(case, json.dumps({"case": case, "count": count}))
        self._signal(signal.SIGSTOP)
        try:
            steps = [Step(float(seconds), value) for seconds, value in json.loads(answer)]
        except (ValueError, TypeError):
            steps = []
        if len(steps) != count:
            raise self._failure(f"in {case}: answered {answer[:200]!r}")
        self.values.setdefault(case, []).extend(
            step.value for step in steps if step.value is not None
        )
        return steps

    def _answer(self, case: str, request: str) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # A request that can't be written can't be answered, and that is found there.
        with suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), f"{request}\n".encode())
        answer = b""
        end = time.monotonic() + LIMIT_SECONDS
        while not answer.endswith(b"\n"):
            left = max(0.0, end - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise self._failure(f"in {case}: did not answer within {LIMIT_SECONDS:.0f} s")
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                raise self._failure(f"in {case}: ended before it answered")
            answer += part
        return answer

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            status = self._process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._failure(f"did not end within {LIMIT_SECONDS:.0f} s") from None
        if status:
            raise self._failure(f"ended with {status}")

    def _signal(self, number: signal.Signals) -> None:
        # None is left in a group whose first process has been waited for and whose others ended.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _failure(self, what: str) -> PeerFailed:
        says = self._errors.read_text(errors="replace").strip()
        return PeerFailed(f"the {self.implementation} peer {what}\n{says}".strip())


Blocks = list[list[float]]  # seconds per call, of each block


class Measured(NamedTuple):
    """The results of a round of cases.

    Attributes:
        blocks: by case and implementation, in order of time. Block n of one implementation ran
            next to block n of the others.
        disagreements: for each case in which another implementation computed something else than
            farcall, a sentence about it.
    """

    blocks: dict[str, dict[str, Blocks]]
    disagreements: list[str]


def measure(
    group: Group, advance: Callable[[], None], sources: dict[str, Path] | None = None
) -> Measured:
    """Measure a round of cases, with fresh processes.

    Args:
        advance: called after each block.
        sources: by implementation, where farcall is imported from if not where it is installed.
    """
    with ExitStack() as stack:
        started: dict[str, Peer] = {}
        first: dict[str, str] = {}
        for case, names in group.implementations.items():
            for name in names:
                if name not in started:
                    started[name] = stack.enter_context(
                        Peer(name, group.world, (sources or {}).get(name))
                    )
                    first[name] = case
        for name, peer in started.items():
            # Waits until it is there and can be stopped.
            peer.ask(first[name], 0)
        blocks: dict[str, dict[str, Blocks]] = {}
        disagreements: list[str] = []
        for case, plan in group.plans.items():
            peers = [started[name] for name in group.implementations[case]]
            blocks[case] = {peer.implementation: [] for peer in peers}
            for peer in peers:
                peer.ask(case, plan.calls if plan.warm_up is None else plan.warm_up)
            for turn in range(plan.blocks):
                # No implementation always follows the same other.
                shift = turn % len(peers)
                for peer in peers[shift:] + peers[:shift]:
                    steps = peer.ask(case, plan.calls)
                    blocks[case][peer.implementation].append(
                        [step.seconds for step in steps[plan.dropped :]]
                    )
                    advance()
            values = {peer.implementation: peer.values.get(case, []) for peer in peers}
            disagreements += disagreements_in(case, values)
        return Measured(blocks, disagreements)


def disagreements_in(case: str, values: dict[str, list[float]]) -> Iterator[str]:
    """Give a sentence for each implementation that computed something else than farcall.

    The model in one process is left out: it draws its random numbers in another order.
    """
    agreement = CASES[case].agreement
    for name, theirs in values.items():
        if agreement is None or name in (FARCALL, LOCAL):
            continue
        found = disagreement(agreement, values[FARCALL], theirs)
        if found is not None:
            yield f"farcall computed something else than {name} in {case}: {found}"
