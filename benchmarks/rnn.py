"""Training the language model of PyTorch's tutorial "Distributed RNN using RPC".

The embedding table and the decoder live on another worker, the LSTM here. `train` runs it over the
modules of either implementation, `train_here` the same model in one process without any of them.
Both go on forever and give each iteration: forward, loss, backward, optimizer step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from steps import Step
from torch import nn, optim
from workers import modules_of

DROPOUT = 0.5
LEARNING_RATE = 0.05
BATCHES = 8

Hidden = tuple[torch.Tensor, torch.Tensor]


class Size(NamedTuple):
    """A model and its input: `steps` tokens of each of `columns` texts per iteration."""

    ntoken: int
    ninp: int
    nhid: int
    nlayers: int
    steps: int
    columns: int


TINY = Size(ntoken=10, ninp=2, nhid=3, nlayers=4, steps=5, columns=3)
REAL = Size(ntoken=10000, ninp=256, nhid=256, nlayers=2, steps=35, columns=20)


class EmbeddingTable(nn.Module):
    """The encoding layers."""

    def __init__(self, ntoken: int, ninp: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(DROPOUT)
        self.encoder = nn.Embedding(ntoken, ninp)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(steps, columns) of int64 to (steps, columns, ninp)."""
        embedded: torch.Tensor = self.drop(self.encoder(tokens))
        return embedded


class Decoder(nn.Module):
    """The decoding layers."""

    def __init__(self, ntoken: int, nhid: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(DROPOUT)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        """(steps, columns, nhid) to (steps, columns, ntoken)."""
        decoded: torch.Tensor = self.decoder(self.drop(output))
        return decoded


def new_lstm(size: Size) -> nn.LSTM:
    return nn.LSTM(size.ninp, size.nhid, size.nlayers, dropout=DROPOUT)


def call_method(method: Callable[..., Any], rref: Any, *args: Any) -> Any:
    return method(rref.local_value(), *args)


def parameter_rrefs(module: nn.Module, implementation: str) -> list[Any]:
    """Return an RRef for each parameter of a module of this process."""
    rpc = modules_of(implementation).rpc
    return [rpc.RRef(parameter) for parameter in module.parameters()]


class RemoteModel(nn.Module):
    """The embedding table and the decoder on a worker, the LSTM here."""

    def __init__(self, implementation: str, worker: str, size: Size) -> None:
        super().__init__()
        self.rpc = modules_of(implementation).rpc
        self.table = self.rpc.remote(worker, EmbeddingTable, args=(size.ntoken, size.ninp))
        # Its parameters are asked for, and so made, before the decoder draws random numbers, too.
        table_parameters = self._remote_method(parameter_rrefs, self.table, implementation)
        self.rnn = new_lstm(size)
        self.decoder = self.rpc.remote(worker, Decoder, args=(size.ntoken, size.nhid))
        self.parameter_rrefs = [
            *table_parameters,
            *parameter_rrefs(self.rnn, implementation),
            *self._remote_method(parameter_rrefs, self.decoder, implementation),
        ]

    def forward(self, tokens: torch.Tensor, hidden: Hidden) -> tuple[torch.Tensor, Hidden]:
        embedded = self._remote_method(EmbeddingTable.forward, self.table, tokens)
        output, hidden = self.rnn(embedded, hidden)
        return self._remote_method(Decoder.forward, self.decoder, output), hidden

    def _remote_method(self, method: Callable[..., Any], rref: Any, *args: Any) -> Any:
        return self.rpc.rpc_sync(rref.owner(), call_method, args=(method, rref, *args))


class LocalModel(nn.Module):
    """The same in one process."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.table = EmbeddingTable(size.ntoken, size.ninp)
        self.rnn = new_lstm(size)
        self.decoder = Decoder(size.ntoken, size.nhid)

    def forward(self, tokens: torch.Tensor, hidden: Hidden) -> tuple[torch.Tensor, Hidden]:
        output, hidden = self.rnn(self.table(tokens), hidden)
        return self.decoder(output), hidden


def batches(size: Size) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Forever: tokens of (steps, columns) and those that follow them, of (steps * columns)."""
    text = torch.randint(size.ntoken, (BATCHES, size.steps + 1, size.columns))
    for index in itertools.count():
        part = text[index % BATCHES]
        yield part[:-1], part[1:].flatten()


def no_hidden(size: Size) -> Hidden:
    shape = (size.nlayers, size.columns, size.nhid)
    return torch.zeros(shape), torch.zeros(shape)


def loss_of(
    model: nn.Module, tokens: torch.Tensor, target: torch.Tensor, hidden: Hidden
) -> tuple[torch.Tensor, Hidden]:
    hidden[0].detach_()
    hidden[1].detach_()
    output, hidden = model(tokens, hidden)
    return nn.functional.cross_entropy(output.flatten(0, 1), target), hidden


def train(implementation: str, worker: str, size: Size) -> Iterator[Step]:
    """Give each iteration, with the parameters on two workers."""
    _, autograd, distributed_optim, _ = modules_of(implementation)
    model = RemoteModel(implementation, worker, size)
    optimizer = distributed_optim.DistributedOptimizer(
        optim.SGD, model.parameter_rrefs, lr=LEARNING_RATE
    )
    hidden = no_hidden(size)
    for tokens, target in batches(size):
        start = time.perf_counter()
        with autograd.context() as context_id:
            loss, hidden = loss_of(model, tokens, target, hidden)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        yield Step(time.perf_counter() - start, float(loss))


def train_here(size: Size) -> Iterator[Step]:
    """Give each iteration in one process."""
    model = LocalModel(size)
    optimizer = optim.SGD(model.parameters(), lr=LEARNING_RATE)
    hidden = no_hidden(size)
    for tokens, target in batches(size):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss, hidden = loss_of(model, tokens, target, hidden)
        loss.backward()
        optimizer.step()
        yield Step(time.perf_counter() - start, float(loss))
