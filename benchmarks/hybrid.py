"""Training an embedding that lives on another worker with a linear layer that lives here.

The model and the batches of PyTorch's example `distributed/rpc/ddp_rpc`: an `EmbeddingBag` on the
parameter server, reached through `RemoteModule`, and a `Linear` on the trainer. `train` has one
trainer, which is this process. `train_replicated` is the example itself: a master (this process)
has two trainers train together, whose linear layers are replicas under DistributedDataParallel.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from steps import Step
from torch import Tensor, distributed, nn, optim
from torch.nn.parallel import DistributedDataParallel
from workers import modules_of

EMBEDDINGS, DIMENSIONS, CLASSES = 100, 16, 8
LEAST_INDICES, MOST_INDICES, LONGEST_BAG = 20, 50, 10
LEARNING_RATE = 0.05
BATCHES = 10  # of an epoch of the example; the same ones in each epoch here
SERVER = "worker1"
TRAINERS = ("worker2", "worker3")


class Batch(NamedTuple):
    """Attributes:
    indices: of embeddings, int64, shape `(n,)`.
    offsets: where each bag of indices starts, int64, shape `(bags,)`.
    target: the class of each bag, int64, shape `(bags,)`.
    """

    indices: Tensor
    offsets: Tensor
    target: Tensor


def new_batch(generator: torch.Generator) -> Batch:
    """Draw 20 to 50 indices, in bags of 1 to 10."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    count = draw(LEAST_INDICES, MOST_INDICES)
    offsets = [0]
    while (start := offsets[-1] + draw(1, LONGEST_BAG)) < count:
        offsets.append(start)
    return Batch(
        torch.randint(EMBEDDINGS, (count,), generator=generator),
        torch.tensor(offsets),
        torch.randint(CLASSES, (len(offsets),), generator=generator),
    )


class Trainer:
    """Trains the shared embedding and its own linear layer, batch by batch."""

    def __init__(self, implementation: str, embedding: Any, linear: nn.Module, seed: int) -> None:
        modules = modules_of(implementation)
        self.autograd = modules.autograd
        self.embedding = embedding
        self.linear = linear
        parameters = [
            *embedding.remote_parameters(),
            *(modules.rpc.RRef(parameter) for parameter in linear.parameters()),
        ]
        self.optimizer = modules.optim.DistributedOptimizer(optim.SGD, parameters, lr=LEARNING_RATE)
        generator = torch.Generator().manual_seed(seed)
        self.batches = [new_batch(generator) for _ in range(BATCHES)]

    def learn(self, batch: Batch) -> float:
        """Take one step: forward, distributed backward, optimizer step. Return the loss."""
        with self.autograd.context() as context_id:
            scores = self.linear(self.embedding.forward(batch.indices, batch.offsets))
            loss = nn.functional.cross_entropy(scores, batch.target)
            self.autograd.backward(context_id, [loss])
            self.optimizer.step(context_id)
        return float(loss)

    def epoch(self) -> float:
        """Take one step for each batch. Return the mean loss."""
        return sum(self.learn(batch) for batch in self.batches) / len(self.batches)


def remote_embedding(implementation: str) -> Any:
    return modules_of(implementation).nn.RemoteModule(
        SERVER, nn.EmbeddingBag, args=(EMBEDDINGS, DIMENSIONS), kwargs={"mode": "sum"}
    )


def train(implementation: str) -> Iterator[Step]:
    """Give each step of one trainer, which is this process."""
    trainer = Trainer(
        implementation, remote_embedding(implementation), nn.Linear(DIMENSIONS, CLASSES), seed=0
    )
    while True:
        for batch in trainer.batches:
            start = time.perf_counter()
            loss = trainer.learn(batch)
            yield Step(time.perf_counter() - start, loss)


def new_replica(implementation: str, embedding: Any, rank: int, store: str) -> Trainer:
    """Make the trainer of this rank, on its own worker. All ranks must do it at the same time."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=len(TRAINERS)
    )
    torch.manual_seed(0)
    linear = DistributedDataParallel(nn.Linear(DIMENSIONS, CLASSES))
    return Trainer(implementation, embedding, linear, seed=rank)


def run_epoch(trainer: Any) -> float:
    """Run an epoch on a trainer's worker, given its reference; return the mean loss."""
    mean: float = trainer.local_value().epoch()
    return mean


def train_replicated(implementation: str) -> Iterator[Step]:
    """Give each epoch of two trainers, as the mean time and the mean loss of its steps."""
    rpc = modules_of(implementation).rpc
    embedding = remote_embedding(implementation)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        trainers = [
            rpc.remote(worker, new_replica, args=(implementation, embedding, rank, store))
            for rank, worker in enumerate(TRAINERS)
        ]
        while True:
            start = time.perf_counter()
            epochs = [
                rpc.rpc_async(trainer.owner(), run_epoch, args=(trainer,)) for trainer in trainers
            ]
            means = [epoch.wait() for epoch in epochs]
            seconds = (time.perf_counter() - start) / BATCHES
            yield Step(seconds, sum(means) / len(means))
