"""Federated averaging: clients learn from data that stays with them, a server averages the models.

FedAvg of McMahan et al., https://arxiv.org/abs/1602.05629: in each round the clients get the model,
train it on their own data for some epochs, and return it; the new model is the mean of theirs,
weighted by how many examples each has. The clients' data differ in kind and in number. In a round
some clients are not reached, and one is lost for good: the round goes on with those that answer.

    python examples/federated_averaging.py --seed 0

Expect eight lines in some five seconds: the accuracy rises to over 90 %, with clients absent.
"""

import argparse
import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import farcall
from farcall import errors

FEATURES, CLASSES, ROUNDS, EPOCHS, GOAL = 10, 3, 8, 5, 0.9
SIZES = [400, 200, 100, 50]  # examples of each client
UNREACHED, CRASH = 0.2, (3, 1)  # how often a client is not reached; round and client of a crash


class Unreached(Exception):
    """A client has no network in this round."""


def draw(size, center, generator):
    """Draw examples around a center, and the classes that a fixed rule gives them."""
    rule = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(size, FEATURES, generator=generator) + center
    return inputs, (inputs @ rule).argmax(dim=1)


@farcall.actor
class Client:
    def __init__(self, number, seed):
        self.number = number
        self.random = torch.Generator().manual_seed(1000 * seed + number)
        center = torch.randn(FEATURES, generator=self.random)  # its data are not like others'
        self.inputs, self.labels = draw(SIZES[number], center, self.random)

    def train(self, number, model):
        """Return the model as it is after some epochs here, and the number of examples."""
        if (number, self.number) == CRASH:
            os.abort()
        if torch.rand((), generator=self.random) < UNREACHED:
            raise Unreached
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(self.labels), generator=self.random).split(20):
                optimizer.zero_grad()
                cross_entropy(model(self.inputs[batch]), self.labels[batch]).backward()
                optimizer.step()
        return model.state_dict(), len(self.labels)


def average(answers):
    """Return the mean of the models, weighted by their numbers of examples."""
    total = sum(size for _, size in answers)
    return {
        name: sum(size / total * weights[name] for weights, size in answers)
        for name in answers[0][0]
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of random numbers (default: 0)")
    seed = parser.parse_args().seed
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    inputs, labels = draw(1000, 0, torch.Generator().manual_seed(seed))
    with farcall.local(len(SIZES)) as group, torch.no_grad():
        clients = [farcall.spawn(one, Client, one.id, seed) for one in group]
        for number in range(ROUNDS):
            answers, absent = [], []
            for client, future in [(one, one.train(number, model)) for one in clients]:
                try:
                    answers.append(future.wait())
                except Unreached:
                    absent.append(f"{client.owner_name()} for now")
                except errors.PeerLost:
                    absent.append(f"{client.owner_name()} for good")
                    clients.remove(client)
            if answers:
                model.load_state_dict(average(answers))
            accuracy = (model(inputs).argmax(dim=1) == labels).float().mean().item()
            print(f"round {number}: accuracy {accuracy:.0%}, absent: {', '.join(absent) or 'none'}")
    if accuracy < GOAL:
        raise SystemExit(f"failed: accuracy {accuracy:.0%}")
    print(f"ok: accuracy {accuracy:.0%}")


if __name__ == "__main__":
    main()
