"""The parameter server demo while its processes die: trainers every few seconds, the server once.

It is asynchronous training as in `parameter_server.py`. The process that runs the job is neither
server nor trainer: it stays. The server is supervised: when its process has come back it is made
again, from its last snapshot, and all references lead to the new one. A trainer that comes back
begins anew; its results are with the server.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call

from farcall import rpc
from farcall.demos.elastic import Chaos
from farcall.demos.parameter_server import (
    GOAL,
    MEASURE_SECONDS,
    AsyncServer,
    AsyncTrainer,
    ParameterServerOptions,
    ParameterServerProgress,
    Pictures,
    accuracy_of,
    make_model,
)
from farcall.optim import DistributedOptimizer

# An rpc.RRef to an ElasticServer that leads to the next one: its calls take `retry`, too.
FollowingRRef = Any

SERVER, TRAINER = "server", "trainer"
SNAPSHOT_SECONDS = 1.0
SERVER_DEATHS = 20  # within a minute are too many


class ElasticServer(AsyncServer):
    """A server that hands out its optimizer, and whose state can be saved."""

    def get_optimizer(self) -> DistributedOptimizer:
        """Return, for trainers, the optimizer of this server's parameters."""
        return self.optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a snapshot: the parameters, and Adam's state of them."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a snapshot."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class ElasticTrainer(AsyncTrainer):
    """A trainer that outlives its server."""

    def __init__(
        self, rank: int, pictures: Pictures, options: ParameterServerOptions, server: FollowingRRef
    ) -> None:
        optimizer = server.rpc_sync(retry=SERVER_DEATHS).get_optimizer()
        super().__init__(rank, pictures, options, server, optimizer)
        self.following = server

    def learn(self, batch: Pictures) -> None:
        """Learns from a batch; once more, with the next server, if this one dies meanwhile."""
        while True:
            try:
                return super().learn(batch)
            except rpc.PeerLost:
                self.optimizer = self.following.rpc_sync(retry=SERVER_DEATHS).get_optimizer()


@dataclass
class Placed:
    """A trainer, and how far it was when it was last asked."""

    trainer: rpc.RRef[ElasticTrainer]
    batches: int = 0
    images: int = 0

    def ask(self) -> None:
        """Asks how far it is. One that has died has got no further."""
        with contextlib.suppress(rpc.PeerLost):
            self.batches, self.images = self.trainer.rpc_sync().learnt()


class ElasticJob:
    """Gives work to each trainer that comes, and measures what comes of it."""

    def __init__(
        self, options: ParameterServerOptions, training: Pictures, test: Pictures, chaos: Chaos
    ) -> None:
        self.options = options
        self.training = training
        self.test = test
        self.chaos = chaos
        self.model = make_model()  # for its layers
        self.placed: list[Placed] = []
        self.errors: list[Exception] = []
        self.has_failed = threading.Event()
        self.server: FollowingRRef = rpc.supervise(
            ElasticServer,
            (options,),
            on=SERVER,
            name="parameters",
            restarts=SERVER_DEATHS,
            snapshot=rpc.Snapshot(SNAPSHOT_SECONDS, "state_dict", "load_state_dict"),
            follow=True,
        )

    def place_trainer(self, event: rpc.MemberEvent) -> None:
        """Makes a trainer on a worker that has come, if it is one for that, and sets it to work."""
        worker = event.worker
        if worker.role != TRAINER:
            return
        rank = int(worker.name.removeprefix(TRAINER))
        part = Pictures(*(whole[rank - 1 :: self.options.trainers] for whole in self.training))
        with contextlib.suppress(rpc.PeerLost):  # it has died already
            arguments = (rank, part, self.options, self.server)
            trainer = rpc.remote(worker, ElasticTrainer, args=arguments)
            trainer.rpc_async().train().add_done_callback(self.note_end)
            self.placed.append(Placed(trainer))

    def note_end(self, training: torch.futures.Future[None]) -> None:
        """Keep the error of a trainer that has ended, if it did not just die."""
        try:
            training.value()
        except rpc.PeerLost:
            pass
        except Exception as error:
            self.errors.append(error)
            self.has_failed.set()

    def train(self) -> Iterator[ParameterServerProgress]:
        """Trains until the goal is met after all deaths, or for all epochs. Yields measurements."""
        yield self.measure(0, 0.0)
        start = time.perf_counter()
        server_deaths = 0
        with rpc.on_join(self.place_trainer, present=True):
            for number in itertools.count(1):
                is_over, server_deaths_now = self.chaos.is_over, self.chaos.deaths[SERVER]
                progress = self.measure(number, time.perf_counter() - start)
                if server_deaths_now > server_deaths:
                    accuracy = f"{100 * progress.accuracy:.1f} %"
                    self.chaos.tell(f"the last snapshot has a test accuracy of {accuracy}")
                    server_deaths = server_deaths_now
                yield progress
                if is_over and progress.accuracy > GOAL:
                    return
                if progress.epochs >= self.options.epochs:
                    return
                self.has_failed.wait(MEASURE_SECONDS)

    def measure(self, number: int, seconds: float) -> ParameterServerProgress:
        """Asks the trainers how far they are, and tests the parameters that the server has.

        Raises:
            Exception: what went wrong on a trainer.
        """
        for error in self.errors:
            raise error
        placed = list(self.placed)
        for one in placed:
            one.ask()
        images = sum(one.images for one in placed)
        parameters = self.server.rpc_sync(retry=SERVER_DEATHS).fetch()
        scores = functional_call(self.model, parameters, self.test.images)
        return ParameterServerProgress(
            number=number,
            seconds=seconds,
            accuracy=accuracy_of(scores, self.test),
            updates=sum(one.batches for one in placed),
            images=images,
            epochs=images / len(self.training.labels),
        )
