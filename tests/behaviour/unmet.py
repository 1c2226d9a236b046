"""A store that answers when a test says so, and workers that have not met."""

from __future__ import annotations

import threading
import time

from farcall.ids import Worker
from farcall.runtime.agent import Agent
from farcall.runtime.membership.lookup import NotAsked, StoreIsLate


class Store:
    """It answers when the test says so."""

    def __init__(self) -> None:
        self.workers: dict[str | int, Worker] = {}
        self.asked = threading.Event()
        self.answers = threading.Event()
        self.is_gone = False
        self.deadlines: list[float] = []  # of the questions

    def find(self, name: str | int, deadline: float) -> Worker | None:
        self.deadlines.append(deadline)
        if self.is_gone:
            raise NotAsked("no process hosts it")
        self.asked.set()
        if not self.answers.wait(max(0.0, deadline - time.monotonic())):
            raise StoreIsLate("it has not answered in time")
        return self.workers.get(name)

    def part(self, agent: Agent, stranger: Worker) -> None:
        """Let an agent know nothing of a worker that the store knows."""
        self.workers |= {stranger.name: stranger, stranger.id: stranger}
        directory = agent.directory._machine
        directory._by_incarnation.pop(stranger.incarnation, None)
        for key in (stranger.name, stranger.id, stranger.info):
            directory._by_key.pop(key, None)
