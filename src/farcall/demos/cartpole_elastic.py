"""CartPole with observers that die while they play, and come back.

It is the agent of `cartpole.py`, in a group that observers join and leave. An episode counts if one
observer has played it to its end. The parts that others had played when they died are left out.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from farcall import rpc
from farcall.demos.cartpole import CartpoleAgent, CartpoleOptions, Trajectory
from farcall.demos.elastic import Chaos

ROLE = "observer"


class ElasticAgent(CartpoleAgent):
    """An agent that plays with all observers that are there."""

    def __init__(self, options: CartpoleOptions, chaos: Chaos) -> None:
        super().__init__(options)
        self.chaos = chaos
        self.observer_ids = itertools.count(1)

    def is_solved(self) -> bool:
        """Return whether the goal is met, and everything was endured that was to be."""
        return super().is_solved() and self.chaos.is_over

    def play(self) -> list[Trajectory]:
        """Lets all observers play one episode, and returns what those played that lived."""
        while True:
            self.add_newcomers()
            futures = {}
            for observer_id, observer_rref in list(self.observer_rrefs.items()):
                with self.parting_from(observer_id):
                    future = observer_rref.rpc_async().run_episode(self.agent_rref)
                    futures[observer_id] = future
            for observer_id, future in futures.items():
                with self.parting_from(observer_id):
                    future.wait()
            if self.trajectories:
                return list(self.trajectories.values())

    @contextlib.contextmanager
    def parting_from(self, observer_id: int) -> Iterator[None]:
        """Forgets the observer if it turns out to be dead."""
        try:
            yield
        except rpc.PeerLost:
            del self.observer_rrefs[observer_id], self.trajectories[observer_id]

    def add_newcomers(self) -> None:
        """Makes an observer on each worker that has none. Waits until there is a worker."""
        busy = {observer_rref.owner_name() for observer_rref in self.observer_rrefs.values()}
        for worker in rpc.wait_for(role=ROLE):
            if worker.name not in busy:
                self.add_observer(worker.name, next(self.observer_ids))
