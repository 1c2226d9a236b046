"""The three parts of a word-level language model. Each can live on any worker.

A part has random numbers of its own, for its first parameters and for dropout. So what it computes
depends on what it is given and on nothing else, and parts on several workers come to the same
result as the same parts in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farcall import rpc
from farcall.demos.stopwatch import Stopwatch

Hidden = tuple[Tensor, Tensor]
"""The state of the LSTM between two batches: two tensors `(layers, batch, hidden)`."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: how many words, how wide, how deep. `seed` is what it starts from."""

    words: int
    embedding: int
    hidden: int
    layers: int
    dropout: float
    seed: int


class ModelPart(nn.Module):
    """A module that other workers use by reference."""

    def __init__(self, seed: int, dropout: float) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.dropout = dropout
        self.stopwatch = Stopwatch()

    def draw_parameters(self, bound: float) -> None:
        """Draws all parameters, evenly from -bound to bound."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=self.generator)

    def drop(self, tensor: Tensor) -> Tensor:
        """Drop out as `nn.Dropout` does, with this part's own random numbers. Any shape."""
        if not self.training or self.dropout == 0:
            return tensor
        kept = torch.rand(tensor.shape, generator=self.generator) >= self.dropout
        return tensor * (kept / (1 - self.dropout))

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Measure the computation of a call, and record its graph, while training."""
        measured = self.stopwatch.running() if self.training else contextlib.nullcontext()
        with measured, torch.set_grad_enabled(self.training):
            yield

    def set_training(self, training: bool) -> None:
        """Set whether calls from now on are for training or for validation."""
        self.train(training)

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        """Return a reference to each parameter, for their optimizer."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def seconds_computed(self) -> float:
        """Return the seconds of training that this part computed since this was last asked."""
        return self.stopwatch.take()

    def get_extra_state(self) -> Tensor:
        """Makes the random numbers a part of `state_dict`."""
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Goes on with the random numbers of a `state_dict`."""
        self.generator.set_state(state)


class EmbeddingTable(ModelPart):
    """Words to vectors."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(3 * shape.seed, shape.dropout)
        self.table = nn.Embedding(shape.words, shape.embedding)
        self.draw_parameters(0.1)
        self.stopwatch.stops_with_gradient_of(self.table.weight)

    def forward(self, words: Tensor) -> Tensor:
        """Return vectors `(steps, batch, embedding)` for numbers of words `(steps, batch)`."""
        with self.computing():
            vectors = self.drop(self.table(words))
        if self.training:
            self.stopwatch.starts_with_gradient_of(vectors)
        return vectors


class RecurrentLayers(ModelPart):
    """The LSTM: from the words so far to a guess at the next."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(3 * shape.seed + 1, shape.dropout)
        self.lstm = nn.LSTM(shape.embedding, shape.hidden, shape.layers)
        self.draw_parameters(shape.hidden**-0.5)

    def forward(self, vectors: Tensor, hidden: Hidden | None) -> tuple[Tensor, Hidden]:
        """Output `(steps, batch, hidden)` for vectors `(steps, batch, embedding)`.

        `hidden` is the state after the words before these, None at the beginning of a text; the
        state after them is returned.
        """
        with self.computing():
            output, hidden = self.lstm(vectors, hidden)
            output = self.drop(output)
        if self.training:
            self.stopwatch.starts_with_gradient_of(output)
            self.stopwatch.stops_with_gradient_of(vectors)
        return output, hidden


class Decoder(ModelPart):
    """Guesses to words, and at once to how wrong they are.

    The loss is taken here, where the probabilities are: they are the largest tensor of all, and
    the loss is a single number to send back.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(3 * shape.seed + 2, shape.dropout)
        self.linear = nn.Linear(shape.hidden, shape.words)
        self.draw_parameters(0.1)

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, in nats per word, of LSTM output `(steps, batch, hidden)`.

        `targets` are the numbers `(steps, batch)` of the words that really came.
        """
        with self.computing():
            scores = self.linear(output).flatten(0, 1)
            loss = nn.functional.cross_entropy(scores, targets.flatten())
        if self.training:
            self.stopwatch.starts_with_gradient_of(loss)
            self.stopwatch.stops_with_gradient_of(output)
        return loss
