"""A language model on two workers: PyTorch's "Distributed RNN" tutorial, on farcall.

Rank 1, `ps`, owns the embedding table and the decoder, the parts that grow with the vocabulary.
Rank 0, `trainer`, owns the LSTM and the text. In every step words go to the table, vectors come
back, the LSTM's output goes to the decoder, and a loss comes back. Distributed autograd takes the
gradient the same way in reverse; the distributed optimizer updates each parameter where it lives.

The shape is that of https://docs.pytorch.org/tutorials/intermediate/rpc_tutorial.html (part two),
but it learns from real text, and a run repeats exactly for a given seed, also when it was stopped
and resumed. `docs/rnn.md` walks through this file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from farcall import autograd as dist_autograd
from farcall import rpc
from farcall.demos import checkpoints
from farcall.demos.corpus import Corpus
from farcall.demos.progress import Monitor
from farcall.demos.rnn_parts import Decoder, EmbeddingTable, Hidden, RecurrentLayers, Shape
from farcall.demos.stopwatch import Stopwatch
from farcall.optim import DistributedOptimizer

WORKERS = ("trainer", "ps")
LARGEST_NORM = 0.5


@dataclass(frozen=True)
class RnnOptions:
    """The options of a run beside its text: equal options and texts give equal parameters."""

    epochs: int
    embedding: int
    hidden: int
    layers: int
    dropout: float
    batch_size: int
    bptt: int
    learning_rate: float
    decay: float
    vocabulary: int
    seed: int

    def shape(self, words: int) -> Shape:
        """Return the model for a vocabulary of so many words."""
        return Shape(words, self.embedding, self.hidden, self.layers, self.dropout, self.seed)


@dataclass(frozen=True)
class RnnProgress:
    """The state of a training run after a batch.

    Attributes:
        epoch: the epoch it is in, from 1.
        epochs: how many there are to be.
        batch: batches learned in this epoch.
        batches: how many an epoch has.
        words: words learned in this epoch.
        loss_sum: the sum of their losses, in nats.
        batch_loss: the loss of the last batch, in nats per word.
        seconds: time in training steps in this epoch; validation does not count.
        computing: how much of that the workers computed; known when the epoch is done.
        validated: batches validated after this epoch.
        validation_loss: in nats per word; None until the epoch is done.
    """

    epoch: int
    epochs: int
    batch: int
    batches: int
    words: int = 0
    loss_sum: float = 0.0
    batch_loss: float = 0.0
    seconds: float = 0.0
    computing: float = 0.0
    validated: int = 0
    validation_loss: float | None = None

    @property
    def loss(self) -> float:
        """The mean training loss of this epoch so far, in nats per word."""
        return self.loss_sum / self.words if self.words else 0.0

    @property
    def words_per_second(self) -> float:
        """Words learned per second of training."""
        return self.words / self.seconds if self.seconds else 0.0

    @property
    def communication(self) -> float:
        """The share of the training time in which no worker computed, 0 to 1."""
        return max(0.0, 1 - self.computing / self.seconds) if self.seconds else 0.0

    def after_batch(self, loss: float, words: int, seconds: float) -> RnnProgress:
        """Return the progress after one more batch: its words, and its mean loss in nats per word.

        Raises:
            ArithmeticError: the loss is no finite number, so nothing can be learned any more.
        """
        batch = self.batch + 1
        if not math.isfinite(loss):
            raise ArithmeticError(
                f"the loss of batch {batch} in epoch {self.epoch} is {loss}: "
                "the learning rate (--learning-rate) is too high for this text"
            )
        return replace(
            self,
            batch=batch,
            words=self.words + words,
            loss_sum=self.loss_sum + loss * words,
            batch_loss=loss,
            seconds=self.seconds + seconds,
        )


@dataclass(frozen=True)
class RnnJob:
    """The task of a run. `resume` is the checkpoint to go on from, `checkpoint` that to write."""

    options: RnnOptions
    corpus: Corpus
    checkpoint: Path
    resume: Path | None = None


class LanguageModel:
    """The model as the trainer sees it: its own LSTM, and references to the parts on `ps`."""

    def __init__(self, shape: Shape, ps: str) -> None:
        self.table_rref = rpc.remote(ps, EmbeddingTable, args=(shape,))
        self.lstm = RecurrentLayers(shape)
        self.decoder_rref = rpc.remote(ps, Decoder, args=(shape,))
        # One way to reach all three: a reference to the LSTM leads to this worker itself.
        self.parts = {
            "table": self.table_rref,
            "lstm": rpc.RRef(self.lstm),
            "decoder": self.decoder_rref,
        }

    def loss(self, words: Tensor, targets: Tensor, hidden: Hidden | None) -> tuple[Tensor, Hidden]:
        """Return the mean loss in nats of `targets`, the words after `words`, and the state then.

        Both are numbers of words, `(steps, batch)`. `hidden` is the state before, if any.
        """
        vectors = self.table_rref.rpc_sync().forward(words)
        output, hidden = self.lstm(vectors, hidden)
        loss = self.decoder_rref.rpc_sync().forward(output, targets)
        return loss, hidden

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        """References to all parameters, wherever they live."""
        rrefs: list[rpc.RRef[nn.Parameter]] = []
        for part in self.parts.values():
            rrefs += part.rpc_sync().parameter_rrefs()
        return rrefs

    def set_training(self, training: bool) -> None:
        """Set whether calls from now on are for training or for validation."""
        for part in self.parts.values():
            part.rpc_sync().set_training(training)

    def seconds_computed(self) -> float:
        """Return the seconds of training that the parts computed since this was last asked."""
        return sum(float(part.rpc_sync().seconds_computed()) for part in self.parts.values())

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Parameters and random numbers of the parts, brought here."""
        return {name: part.rpc_sync().state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, states: dict[str, dict[str, Any]]) -> None:
        """Sends the parts what `state_dict` gave."""
        for name, part in self.parts.items():
            part.rpc_sync().load_state_dict(states[name])


class RnnTrainer:
    """Teaches a language model a text, batch by batch."""

    def __init__(self, job: RnnJob) -> None:
        options, corpus = job.options, job.corpus
        self.job = job
        self.train_batches = batches(corpus.train, options.batch_size, options.bptt)
        self.validation_batches = batches(corpus.validation, options.batch_size, options.bptt)
        self.model = LanguageModel(options.shape(len(corpus.vocabulary)), ps="ps")
        self.optimizer = DistributedOptimizer(
            torch.optim.Adam, self.model.parameter_rrefs(), lr=options.learning_rate
        )
        self.schedule = ExponentialLR(self.optimizer, options.decay)
        self.updating = Stopwatch()
        self.hidden: Hidden | None = None
        self.results: list[RnnProgress] = []
        self.progress = self.start_of(epoch=1)
        if job.resume is not None:
            self.load(job.resume)

    def start_of(self, epoch: int) -> RnnProgress:
        """Return the progress when nothing of the epoch is done."""
        return RnnProgress(epoch, self.job.options.epochs, 0, len(self.train_batches))

    def train(self) -> Iterator[RnnProgress]:
        """Learns until all epochs are done. Yields after every batch, and after every epoch."""
        for epoch in range(self.progress.epoch, self.job.options.epochs + 1):
            if epoch > self.progress.epoch:
                self.progress, self.hidden = self.start_of(epoch), None
            if self.progress.validation_loss is None:
                yield from self.train_epoch()

    def train_epoch(self) -> Iterator[RnnProgress]:
        """Goes on with the epoch until it is done, then validates and writes a checkpoint."""
        for words, targets in self.train_batches[self.progress.batch :]:
            start = time.perf_counter()
            loss = self.train_batch(words, targets)
            seconds = time.perf_counter() - start
            self.progress = self.progress.after_batch(loss, targets.numel(), seconds)
            yield self.progress
        yield from self.validate()
        self.schedule.step()
        self.count_computing()
        self.results.append(self.progress)
        self.save()
        yield self.progress

    def train_batch(self, words: Tensor, targets: Tensor) -> float:
        """Make a step over all workers: forward, backward, update. Return the loss in nats."""
        with dist_autograd.context() as context_id:
            loss, hidden = self.model.loss(words, targets, self.hidden)
            dist_autograd.backward(context_id, [loss])
            with self.updating.running():
                self.optimizer.clip_grad_norm_(context_id, LARGEST_NORM)
                self.optimizer.step(context_id)
        self.hidden = (hidden[0].detach(), hidden[1].detach())
        return loss.item()

    def count_computing(self) -> None:
        """Asks all workers how long they computed since the last time, and adds it."""
        seconds = self.model.seconds_computed() + self.updating.take()
        self.progress = replace(self.progress, computing=self.progress.computing + seconds)

    def validate(self) -> Iterator[RnnProgress]:
        """Takes the loss on the validation part. Yields after every batch but the last."""
        self.model.set_training(False)
        loss_sum, count, hidden = 0.0, 0, None
        for number, (words, targets) in enumerate(self.validation_batches, start=1):
            loss, hidden = self.model.loss(words, targets, hidden)
            loss_sum += loss.item() * targets.numel()
            count += targets.numel()
            if number < len(self.validation_batches):
                yield replace(self.progress, validated=number)
        self.model.set_training(True)
        self.progress = replace(self.progress, validated=number, validation_loss=loss_sum / count)

    def save(self) -> None:
        """Writes all that a run needs to go on from here as if it had never stopped.

        Raises:
            OSError: the file can't be written.
        """
        self.count_computing()
        state = {
            "options": asdict(self.job.options),
            "source": self.job.corpus.source,
            "digest": self.job.corpus.digest(),
            "vocabulary": list(self.job.corpus.vocabulary),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "hidden": self.hidden,
            "progress": asdict(self.progress),
            "results": [asdict(result) for result in self.results],
        }
        checkpoints.save(self.job.checkpoint, state)

    def load(self, path: Path) -> None:
        """Goes on from what `save` wrote."""
        state = checkpoints.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.hidden = state["hidden"]
        epochs = self.job.options.epochs
        self.progress = replace(RnnProgress(**state["progress"]), epochs=epochs)
        self.results = [
            replace(RnnProgress(**result), epochs=epochs) for result in state["results"]
        ]


def batches(numbers: NDArray[np.int64], batch_size: int, bptt: int) -> list[tuple[Tensor, Tensor]]:
    """Words and the words that follow them, both `(steps, batch_size)`, at most `bptt` steps.

    The text is cut into `batch_size` columns that are read side by side, from top to bottom, so
    that each batch goes on where the one before it stopped. Words that don't fill a row are left
    out.
    """
    steps = len(numbers) // batch_size
    rows = torch.from_numpy(numbers[: steps * batch_size]).view(batch_size, steps).t().contiguous()
    return [
        (rows[start : start + bptt][: steps - 1 - start], rows[start + 1 : start + 1 + bptt])
        for start in range(0, steps - 1, bptt)
    ]


def run_worker(rank: int, job: RnnJob, init_method: str, monitor: Monitor[RnnProgress]) -> None:
    """Run a process of the demo: the trainer learns, `ps` waits for calls."""
    torch.set_num_threads(1)
    rpc.init_rpc(
        WORKERS[rank],
        rank=rank,
        world_size=len(WORKERS),
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=init_method),
    )
    if WORKERS[rank] == "trainer":
        trainer = RnnTrainer(job)
        for progress in trainer.train():
            monitor.report(progress)
            if monitor.stop_requested():
                trainer.save()
                break
    rpc.shutdown()
