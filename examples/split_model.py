"""A model split over workers: its large tables elsewhere, its core here, trained as one.

The embedding and the decoder, which grow with the vocabulary, are RemoteModules on two workers; the
LSTM between them is here. All are parts of one ordinary module: `forward` calls them, distributed
autograd takes the gradients back, and one optimizer steps all parameters where they are.

    python examples/split_model.py --seed 0

Expect a line per 25 steps, in some five seconds: the model learns which word is next in sequences
that count in threes, and the loss falls from 4 to below 0.2.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import farcall
from farcall import autograd, rpc
from farcall.nn import RemoteModule
from farcall.optim import DistributedOptimizer

WORDS, WIDTH, LENGTH, BATCH, STEPS, GOAL = 50, 32, 8, 32, 150, 0.2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = RemoteModule("worker0/cpu", nn.Embedding, args=(WORDS, WIDTH))
        self.core = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.decoder = RemoteModule("worker1/cpu", nn.Linear, args=(WIDTH, WORDS))

    def forward(self, words):
        """Return scores of the next words, of shape (batch, length, words)."""
        hidden, _ = self.core(self.embedding(words))
        return self.decoder(hidden)

    def references(self):
        """Return references to all parameters, wherever they are."""
        here = [rpc.RRef(parameter) for parameter in self.core.parameters()]
        return here + self.embedding.remote_parameters() + self.decoder.remote_parameters()


def draw():
    """Return sequences such as 7, 10, 13 ..."""
    first = torch.randint(WORDS, (BATCH, 1))
    return (first + 3 * torch.arange(LENGTH + 1)) % WORDS


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of random numbers (default: 0)")
    seed = parser.parse_args().seed
    with farcall.local(2) as group:
        group.all.call(torch.manual_seed, seed)
        torch.manual_seed(seed)
        model = Model()
        optimizer = DistributedOptimizer(torch.optim.Adam, model.references(), lr=0.01)
        for step in range(1, STEPS + 1):
            words = draw()
            with autograd.context() as context:
                scores = model(words[:, :-1])
                loss = cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())
                autograd.backward(context, [loss])
                optimizer.step(context)
            if step % 25 == 0:
                print(f"step {step}: loss {loss:.3f}")
    if loss > GOAL:
        raise SystemExit(f"failed: loss {loss:.3f}")
    print(f"ok: loss {loss:.3f}")


if __name__ == "__main__":
    main()
