"""An asynchronous parameter server: trainers use one model at once, and none waits for another.

The model is on the worker `server`. A trainer fetches the parameters in an autograd context, so the
backward pass takes the gradients to where they came from, and a DistributedOptimizer makes the step
there. Others may have made theirs meanwhile: gradients are a little old, which training survives.

    python examples/parameter_server.py --seed 0

Expect a line per epoch, in some five seconds: the accuracy rises to over 90 %.
"""

import argparse

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import farcall
from farcall import autograd, rpc
from farcall.optim import DistributedOptimizer

TRAINERS, FEATURES, CLASSES, EXAMPLES, BATCH, EPOCHS, GOAL = 3, 20, 4, 1200, 32, 8, 0.9


def make_model():
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


class Server:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = make_model()

    def references(self):
        return [rpc.RRef(parameter) for parameter in self.model.parameters()]

    def fetch(self):
        """Return the parameters by name: copies, since the next step may come at any time."""
        return {name: value.clone() for name, value in self.model.named_parameters()}

    def accuracy(self, inputs, labels):
        with torch.no_grad():
            return (self.model(inputs).argmax(dim=1) == labels).float().mean().item()


class Trainer:
    def __init__(self, server, optimizer, inputs, labels):
        self.server, self.optimizer = server, optimizer
        self.inputs, self.labels = inputs, labels
        self.model = make_model()  # for its layers: the parameters are the server's

    def train(self):
        """Learn from the data of this trainer once."""
        for batch in torch.randperm(len(self.labels)).split(BATCH):
            with autograd.context() as context:
                parameters = self.server.fetch.sync()
                scores = functional_call(self.model, parameters, self.inputs[batch])
                autograd.backward(context, [cross_entropy(scores, self.labels[batch])])
                self.optimizer.step(context)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of random numbers (default: 0)")
    seed = parser.parse_args().seed
    torch.manual_seed(seed)
    inputs = torch.randn(EXAMPLES + 500, FEATURES)
    labels = (inputs @ torch.randn(FEATURES, CLASSES)).argmax(dim=1)
    parts = zip(inputs[500:].chunk(TRAINERS), labels[500:].chunk(TRAINERS), strict=True)
    names = ["server", *(f"trainer{n}" for n in range(TRAINERS))]
    with farcall.local(len(names), names=names):
        server = farcall.spawn("server", Server, seed, concurrency=TRAINERS)
        optimizer = DistributedOptimizer(torch.optim.Adam, server.references.sync(), lr=3e-3)
        trainers = [
            farcall.spawn(name, Trainer, server, optimizer, *part)
            for name, part in zip(names[1:], parts, strict=True)
        ]
        for epoch in range(EPOCHS):
            for training in [trainer.train() for trainer in trainers]:
                training.wait()
            accuracy = server.accuracy.sync(inputs[:500], labels[:500])
            print(f"epoch {epoch}: accuracy {accuracy:.0%}")
    if accuracy < GOAL:
        raise SystemExit(f"failed: accuracy {accuracy:.0%}")
    print(f"ok: accuracy {accuracy:.0%}")


if __name__ == "__main__":
    main()
