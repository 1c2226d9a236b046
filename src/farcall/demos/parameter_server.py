"""One parameter server, several trainers, and pictures of digits: data-parallel training.

Rank 0, `ps`, has the parameters. Every other rank is a trainer with its own part of the pictures:
it gets the parameters, works out how they should change to suit one batch, and tells the server.

- In asynchronous mode no trainer waits for another. Distributed autograd takes the gradients to
  the parameters, and a DistributedOptimizer, one for all trainers, changes them.
- In synchronous mode every update is made of one batch of each trainer. It is what one process
  would do with batches as large as all of these together. No thread of the server waits meanwhile:
  PyTorch's https://docs.pytorch.org/tutorials/intermediate/rpc_async_execution.html, on farcall.

`docs/parameter-server.md` walks through this file.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.demos.progress import Monitor
from farcall.optim import DistributedOptimizer

GOAL = 0.95
TEST_SHARE = 0.2
MEASURE_SECONDS = 0.1

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class ParameterServerOptions:
    """The options of a run. Synchronous runs with equal options end with equal parameters."""

    mode: Literal["async", "sync"]
    trainers: int
    epochs: int
    batch_size: int
    learning_rate: float
    hogwild: bool
    seed: int


@dataclass(frozen=True)
class ParameterServerProgress:
    """The state of a training run.

    Attributes:
        number: of this measurement, from 0.
        seconds: time since training began.
        accuracy: share of the test pictures that are told right, 0 to 1.
        updates: how often the parameters were changed.
        images: pictures learnt from so far, by all trainers; counted anew in every epoch.
        epochs: how often all training pictures were learnt from, on average.
    """

    number: int
    seconds: float
    accuracy: float
    updates: int
    images: int
    epochs: float

    @property
    def updates_per_second(self) -> float:
        """Updates per second, over the whole run so far."""
        return self.updates / self.seconds if self.seconds else 0.0

    @property
    def images_per_second(self) -> float:
        """Pictures learnt from per second, over the whole run so far."""
        return self.images / self.seconds if self.seconds else 0.0


class Pictures(NamedTuple):
    """Pictures of digits, and which digits they are.

    Attributes:
        images: shape `(n, 1, 8, 8)`, from 0 (white) to 1 (black).
        labels: shape `(n,)`, from 0 to 9.
    """

    images: Tensor
    labels: Tensor


def load_digits(seed: int) -> tuple[Pictures, Pictures]:
    """Return the pictures for training and those for testing, drawn at random: 1437 and 360.

    They are scikit-learn's: 8 x 8 pixels, handwritten, and part of the package. Every digit has
    its share of both parts.
    """
    # Only the server needs scikit-learn, and importing it takes a second.
    from sklearn import datasets, model_selection  # noqa: PLC0415

    pixels, digits = datasets.load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels = torch.tensor(digits)
    for_training, for_testing = model_selection.train_test_split(
        torch.arange(len(labels)), test_size=TEST_SHARE, stratify=labels, random_state=seed
    )
    training = Pictures(images[for_training], labels[for_training])
    return training, Pictures(images[for_testing], labels[for_testing])


def make_model() -> nn.Module:
    """Scores `(n, 10)` for pictures `(n, 1, 8, 8)`: a convolutional network, 6,090 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def accuracy_of(scores: Tensor, pictures: Pictures) -> float:
    """Share of the pictures whose digit has the highest of their scores, shape `(n, 10)`."""
    return float((scores.argmax(dim=1) == pictures.labels).double().mean())


class ParameterServer(ABC):
    """Owns the model. Trainers call its methods, several at once."""

    def __init__(self, options: ParameterServerOptions) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.model = make_model()

    @abstractmethod
    def place_trainer(self, rank: int, pictures: Pictures) -> rpc.RRef[Trainer]:
        """Makes a trainer on the worker of this rank, and hands it its pictures."""

    def fetch(self) -> Parameters:
        """Return the parameters as they are now, for a trainer.

        Copies, since the originals may change before these are on their way. In an autograd
        context the gradients of the copies find back to the originals.
        """
        return {name: parameter.clone() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def accuracy(self, pictures: Pictures) -> float:
        """Share of the pictures that the model tells right. It may be changing meanwhile."""
        return accuracy_of(self.model(pictures.images), pictures)


class Trainer(ABC):
    """Learns from its own pictures, batch by batch. Lives on its own worker."""

    def __init__(self, rank: int, pictures: Pictures, options: ParameterServerOptions) -> None:
        self.rank = rank
        self.pictures = pictures
        self.options = options
        self.model = make_model()  # for its layers; the parameters that count are the server's
        self.batches_learnt = 0
        self.images_learnt = 0
        self.stopped = False

    def train(self) -> None:
        """Goes through the pictures once in every epoch."""
        for batch in self.batches():
            if self.stopped:
                return
            self.learn(batch)
            self.batches_learnt += 1
            self.images_learnt += len(batch.labels)

    def batches(self) -> Iterator[Pictures]:
        """Yield the pictures in batches, shuffled anew for every epoch."""
        images, labels = self.pictures
        generator = torch.Generator().manual_seed(1000 * self.options.seed + self.rank)
        for _ in range(self.options.epochs):
            order = torch.randperm(len(labels), generator=generator)
            for chosen in torch.split(order, self.options.batch_size):
                yield Pictures(images[chosen], labels[chosen])

    @abstractmethod
    def learn(self, batch: Pictures) -> None:
        """Has the server's parameters changed so that they suit `batch` better."""

    def learnt(self) -> tuple[int, int]:
        """Batches and pictures learnt from so far."""
        return self.batches_learnt, self.images_learnt

    def stop(self) -> None:
        """Ends `train` after the current batch."""
        self.stopped = True


class AsyncServer(ParameterServer):
    """Has one optimizer, which all trainers use whenever they like."""

    def __init__(self, options: ParameterServerOptions) -> None:
        super().__init__(options)
        self.optimizer = DistributedOptimizer(
            torch.optim.Adam,
            [rpc.RRef(parameter) for parameter in self.model.parameters()],
            lr=options.learning_rate,
            hogwild=options.hogwild,
        )

    def place_trainer(self, rank: int, pictures: Pictures) -> rpc.RRef[Trainer]:
        """Makes a trainer that has a reference to this server, and its optimizer."""
        arguments = (rank, pictures, self.options, rpc.RRef(self), self.optimizer)
        return rpc.remote(rank, AsyncTrainer, args=arguments)


class AsyncTrainer(Trainer):
    """Changes the parameters after every batch, whatever the other trainers do."""

    def __init__(
        self,
        rank: int,
        pictures: Pictures,
        options: ParameterServerOptions,
        server: rpc.RRef[AsyncServer],
        optimizer: DistributedOptimizer,
    ) -> None:
        super().__init__(rank, pictures, options)
        self.server = server
        self.optimizer = optimizer

    def learn(self, batch: Pictures) -> None:
        """Forward here, backward to the server, and a step of the optimizer there."""
        with dist_autograd.context() as context_id:
            parameters = self.server.rpc_sync().fetch()
            scores = functional_call(self.model, parameters, batch.images)
            loss = cross_entropy(scores, batch.labels)
            dist_autograd.backward(context_id, [loss])
            self.optimizer.step(context_id)


class SyncServer(ParameterServer):
    """Changes the parameters when it has a gradient from every trainer. Thread-safe."""

    def __init__(self, options: ParameterServerOptions) -> None:
        super().__init__(options)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=options.learning_rate)
        self.lock = threading.Lock()
        self.awaited = set(range(1, options.trainers + 1))
        self.delivered: dict[int, tuple[list[Tensor], int]] = {}
        self.updated: torch.futures.Future[Parameters] = torch.futures.Future()

    def place_trainer(self, rank: int, pictures: Pictures) -> rpc.RRef[Trainer]:
        """Makes a trainer that has a reference to this server."""
        arguments = (rank, pictures, self.options, rpc.RRef(self))
        return rpc.remote(rank, SyncTrainer, args=arguments)

    @rpc.functions.async_execution
    def update_and_fetch(
        self, rank: int, gradients: list[Tensor], images: int
    ) -> torch.futures.Future[Parameters]:
        """Take the gradients of trainer `rank`; return the parameters after the update.

        The gradients are of the loss summed over so many `images`. It returns a
        future at once, and no thread waits for it. The last trainer to call completes it for all.
        """
        with self.lock:
            self.delivered[rank] = gradients, images
            updated = self.updated
        self.update_if_complete()
        return updated

    def leave(self, rank: int) -> None:
        """Let the others go on without trainer `rank`, which is done."""
        with self.lock:
            self.awaited.discard(rank)
        self.update_if_complete()

    def update_if_complete(self) -> None:
        """Changes the parameters if all who still train have delivered, and answers them."""
        with self.lock:
            if not self.delivered or not self.delivered.keys() >= self.awaited:
                return
            self.update()
            self.delivered.clear()
            parameters = self.fetch()
            updated, self.updated = self.updated, torch.futures.Future()
        updated.set_result(parameters)

    def update(self) -> None:
        """Make a step with the mean gradient over all delivered images."""
        # In the order of ranks: a sum of floating-point numbers depends on the order.
        delivered = [self.delivered[rank] for rank in sorted(self.delivered)]
        images = sum(images for _, images in delivered)
        sums = zip(*(gradients for gradients, _ in delivered), strict=True)
        for parameter, of_trainers in zip(self.model.parameters(), sums, strict=True):
            parameter.grad = torch.stack(of_trainers).sum(dim=0) / images
        self.optimizer.step()


class SyncTrainer(Trainer):
    """Changes the parameters together with the other trainers."""

    def __init__(
        self,
        rank: int,
        pictures: Pictures,
        options: ParameterServerOptions,
        server: rpc.RRef[SyncServer],
    ) -> None:
        super().__init__(rank, pictures, options)
        self.server = server
        self.parameters: Parameters = {}

    def train(self) -> None:
        """Trains like others, and tells the server at the end, so that no trainer waits for it."""
        try:
            self.parameters = self.server.rpc_sync().fetch()
            super().train()
        finally:
            self.server.rpc_sync().leave(self.rank)

    def learn(self, batch: Pictures) -> None:
        """Forward and backward here; the server's answer comes when all trainers are there."""
        scores = functional_call(self.model, self.parameters, batch.images)
        loss = cross_entropy(scores, batch.labels, reduction="sum")
        gradients = list(torch.autograd.grad(loss, list(self.parameters.values())))
        self.parameters = self.server.rpc_sync().update_and_fetch(
            self.rank, gradients, len(batch.labels)
        )


class Job:
    """A training job, run by the server: spreads the work, and measures what comes of it."""

    def __init__(self, options: ParameterServerOptions, training: Pictures, test: Pictures) -> None:
        self.sync = options.mode == "sync"
        self.server = SyncServer(options) if self.sync else AsyncServer(options)
        self.test = test
        self.images_per_epoch = len(training.labels)
        self.trainers = []
        for rank in range(1, options.trainers + 1):
            part = Pictures(*(whole[rank - 1 :: options.trainers] for whole in training))
            self.trainers.append(self.server.place_trainer(rank, part))

    def train(self) -> Iterator[ParameterServerProgress]:
        """Lets all trainers work until they are done. Yields measurements meanwhile."""
        yield self.measure(0, 0.0)
        start = time.perf_counter()
        calls = [trainer.rpc_async(timeout=0).train() for trainer in self.trainers]
        ended = threading.Event()
        torch.futures.collect_all(calls).add_done_callback(lambda _: ended.set())
        for number in itertools.count(1):
            ended.wait(MEASURE_SECONDS)
            done = [call for call in calls if call.done()]
            torch.futures.wait_all(done)  # raises what went wrong on a trainer
            yield self.measure(number, time.perf_counter() - start)
            if len(done) == len(calls):
                return

    def measure(self, number: int, seconds: float) -> ParameterServerProgress:
        """Asks the trainers how far they are, and tests the model."""
        learnt = torch.futures.wait_all([trainer.rpc_async().learnt() for trainer in self.trainers])
        batches, images = zip(*learnt, strict=True)
        return ParameterServerProgress(
            number=number,
            seconds=seconds,
            accuracy=self.server.accuracy(self.test),
            # In synchronous mode an update takes one batch of every trainer that has any left.
            updates=max(batches) if self.sync else sum(batches),
            images=sum(images),
            epochs=sum(images) / self.images_per_epoch,
        )

    def stop(self) -> None:
        """Has all trainers end after their current batch."""
        torch.futures.wait_all([trainer.rpc_async().stop() for trainer in self.trainers])


def run_worker(
    rank: int,
    options: ParameterServerOptions,
    init_method: str,
    monitor: Monitor[ParameterServerProgress],
) -> None:
    """Run a process of the demo: rank 0 is the server, the others wait for calls."""
    torch.set_num_threads(1)
    rpc.init_rpc(
        "ps" if rank == 0 else f"trainer{rank}",
        rank=rank,
        world_size=options.trainers + 1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=init_method),
    )
    if rank == 0:
        job = Job(options, *load_digits(options.seed))
        for progress in job.train():
            monitor.report(progress)
            if monitor.stop_requested():
                job.stop()
    rpc.shutdown()
