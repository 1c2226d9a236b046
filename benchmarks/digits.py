"""The parameter server demo, batch by batch: `farcall.demos.parameter_server`, as it is.

For torch the demo's imports of farcall are replaced, on every worker. The pictures are random
numbers, so that nothing has to be loaded. This process is the server, and drives two trainers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from plans import TORCH
from steps import Step
from torch import Tensor
from workers import modules_of

from farcall.demos import parameter_server as demo

TRAINERS = 2
PICTURES = 1437  # of which each trainer has its part; as many as the demo trains with
TESTED = 360
BATCHES = 10  # of each trainer in a burst


def use(implementation: str) -> None:
    """Have the demo, in this process, run over an implementation."""
    modules = modules_of(implementation)
    demo.rpc = modules.rpc
    demo.dist_autograd = modules.autograd
    if implementation == TORCH:
        demo.DistributedOptimizer = partial(without_hogwild, modules.optim.DistributedOptimizer)


def without_hogwild(make: Callable[..., Any], *args: Any, hogwild: bool, **options: Any) -> Any:
    """Make an optimizer of an implementation that has no such option."""
    assert not hogwild
    return make(*args, **options)


def new_pictures(count: int, teacher: Tensor) -> demo.Pictures:
    """Make random pictures. Which digit they are, a linear `teacher` says, shape `(64, 10)`."""
    images = torch.rand(count, 1, 8, 8)
    return demo.Pictures(images, ((images.flatten(1) - 0.5) @ teacher).argmax(dim=1))


def learn_batches(implementation: str, trainer: Any, count: int) -> None:
    """Learn from the next batches. Runs on a trainer's worker, with its reference."""
    use(implementation)
    learner = trainer.local_value()
    if not hasattr(learner, "to_learn"):
        learner.to_learn = learner.batches()
        if isinstance(learner, demo.SyncTrainer):
            learner.parameters = learner.server.rpc_sync().fetch()
    for batch in itertools.islice(learner.to_learn, count):
        learner.learn(batch)


def train(implementation: str, mode: Literal["sync", "async"]) -> Iterator[Step]:
    """Give each burst of ten batches of each trainer: the time per batch, and the test loss."""
    use(implementation)
    rpc = modules_of(implementation).rpc
    options = demo.ParameterServerOptions(
        mode,
        TRAINERS,
        epochs=1_000_000,
        batch_size=32,
        learning_rate=3e-3,
        hogwild=False,
        seed=0,
    )
    teacher = torch.randn(64, 10)
    job = demo.Job(options, new_pictures(PICTURES, teacher), new_pictures(TESTED, teacher))
    # One trainer begins: torch's optimizer makes its state at the first step, and fails with
    # KeyError if two make it at once.
    if mode == "async":
        first = job.trainers[0]
        rpc.rpc_sync(first.owner(), learn_batches, args=(implementation, first, 1))
    while True:
        start = time.perf_counter()
        calls = [
            rpc.rpc_async(trainer.owner(), learn_batches, args=(implementation, trainer, BATCHES))
            for trainer in job.trainers
        ]
        for call in calls:
            call.wait()
        seconds = (time.perf_counter() - start) / BATCHES
        yield Step(seconds, loss_of(job))


@torch.no_grad()
def loss_of(job: demo.Job) -> float:
    """Return the loss of the server's model over the pictures for testing."""
    scores = job.server.model(job.test.images)
    return float(torch.nn.functional.cross_entropy(scores, job.test.labels))
