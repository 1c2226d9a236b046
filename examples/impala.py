"""IMPALA: actors play with weights that are some updates old, and V-trace corrects for that.

Two actors walk in corridors of their own to the goal at the right end. They fetch the model, take
steps, and put these into the learner's queue. While that is full, `put` does not return: actors
can't run ahead (back-pressure). V-trace: Espeholt et al., https://arxiv.org/abs/1802.01561, eq. 1.

    python examples/impala.py --seed 0

Expect a line per 50 updates, in some five seconds: a walk, at least 9 steps, gets shorter than 11.
"""

import argparse
import queue

import torch
from torch import nn
from torch.distributions import Bernoulli

import farcall

LENGTH, WALKERS, STEPS, ROOM, UPDATES, DISCOUNT, GOAL = 10, 32, 20, 4, 300, 0.95, 11
PLACES = torch.eye(LENGTH)


@torch.no_grad()
def play(learner, seed):
    """Be an actor until the learner has seen enough."""
    torch.manual_seed(seed)
    places, goes_on = torch.randint(LENGTH - 1, (WALKERS,)), True
    while goes_on:
        version, model = learner.fetch.sync()
        steps = []
        for _ in range(STEPS):
            policy = Bernoulli(logits=model(PLACES[places])[:, 0])
            right, before = policy.sample(), places
            places = (places + 2 * right.long() - 1).clamp(min=0)
            arrived = places == LENGTH - 1
            steps.append((before, right, policy.log_prob(right), arrived))
            places = torch.where(arrived, 0, places)
        goes_on = learner.put.sync((version, places, *map(torch.stack, zip(*steps, strict=True))))


def vtrace(ratios, rewards, discounts, values):
    """Return targets for the values, and advantages; `values` has one more, of the last places."""
    ratios, corrections = ratios.clamp(max=1), [torch.zeros_like(values[-1])]
    errors = ratios * (rewards + discounts * values[1:] - values[:-1])
    for error, trace in zip(errors.flip(0), (discounts * ratios).flip(0), strict=True):
        corrections.insert(0, error + trace * corrections[0])
    targets = values + torch.stack(corrections)
    return targets[:-1], ratios * (rewards + discounts * targets[1:] - values[:-1])


class Learner:
    def __init__(self):
        self.model, self.version = nn.Linear(LENGTH, 2), 0  # of a place: score of "right", value
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        self.unrolls, self.waits, self.is_over = queue.Queue(maxsize=ROOM), 0, False

    def fetch(self):
        return self.version, self.model

    def put(self, unroll):
        """Wait for room in the queue; return whether to go on."""
        self.waits += self.unrolls.full()
        self.unrolls.put(unroll)
        return not self.is_over

    def learn(self):
        """Make an update; return arrivals per step, and how many updates ago the weights were."""
        version, last, places, right, behaviour, arrived = self.unrolls.get()
        scores, values = self.model(PLACES[torch.cat([places, last[None]])]).unbind(dim=-1)
        chosen = Bernoulli(logits=scores[:-1]).log_prob(right)
        ratios, rewards = (chosen - behaviour).exp().detach(), arrived.float()
        targets, advantages = vtrace(ratios, rewards, DISCOUNT * (1 - rewards), values.detach())
        self.optimizer.zero_grad()
        ((targets - values[:-1]).square().mean() - (chosen * advantages).mean()).backward()
        self.optimizer.step()
        self.version += 1
        return rewards.mean(), self.version - 1 - version


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of random numbers (default: 0)")
    seed = parser.parse_args().seed
    torch.manual_seed(seed)
    learner = Learner()
    with farcall.local(2) as group:
        reference = farcall.handle(farcall.rpc.RRef(learner))
        actors = [worker.call_async(play, reference, seed + worker.id) for worker in group]
        while learner.version < UPDATES:
            rate, age = torch.tensor([learner.learn() for _ in range(50)]).mean(dim=0)
            walk, waits = f"{1 / rate:.1f} steps per walk", f"{learner.waits} waits for room"
            print(f"{learner.version}: {walk}, weights {age:.1f} updates old, {waits} so far")
        learner.is_over = True
        for _ in actors:
            learner.unrolls.get()  # makes room for the last unroll of each
    if 1 / rate > GOAL:
        raise SystemExit(f"failed: {walk}")
    print(f"ok: {walk}")
