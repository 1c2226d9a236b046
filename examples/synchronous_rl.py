"""One agent, many observers, in step: actions for all observers by one pass through the policy.

Each observer has games of its own on a worker: balls fall, and paddles have to be below them at the
end. For each step it asks the agent, this process, what to do. The agent answers when all have
asked: a method marked `async_execution` returns a future, and no thread waits. When the games are
over the agent learns by REINFORCE (Williams, 1992, https://doi.org/10.1007/BF00992696). Equal seeds
give equal runs, whichever observer is first.

    python examples/synchronous_rl.py --seed 0

Expect a line per 20 rounds, for some ten seconds: the share of balls caught rises to over 90 %.
"""

import argparse
import threading

import torch
from torch import nn
from torch.distributions import Categorical

import farcall
from farcall import rpc

OBSERVERS, GAMES, WIDTH, HEIGHT, ROUNDS, GOAL = 3, 32, 7, 8, 160, 0.9
COLUMNS = torch.eye(WIDTH)


class Agent:
    def __init__(self):
        self.policy = nn.Sequential(nn.Linear(2 * WIDTH + 1, 64), nn.ReLU(), nn.Linear(64, 3))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.01)
        self.lock, self.asked, self.chosen = threading.Lock(), {}, []

    @rpc.functions.async_execution
    def act(self, observer, states):
        """Return a future of the actions for states of shape (games, features)."""
        future = torch.futures.Future()
        with self.lock:
            self.asked[observer] = states, future
            if len(self.asked) < OBSERVERS:
                return future
            states, futures = zip(*(self.asked.pop(n) for n in range(OBSERVERS)), strict=True)
        policy = Categorical(logits=self.policy(torch.stack(states)))
        actions = policy.sample()
        self.chosen.append(policy.log_prob(actions))
        for one, answer in zip(actions, futures, strict=True):
            answer.set_result(one)
        return future

    def learn(self, rewards):
        """Make what has led to more than the mean reward more likely."""
        chosen, self.chosen = torch.stack(self.chosen).sum(dim=0), []
        self.optimizer.zero_grad()
        (-chosen * (rewards - rewards.mean())).mean().backward()
        self.optimizer.step()


def observe(agent, number, seed):
    """Play all games to their end; return which balls were caught, 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    balls = torch.randint(WIDTH, (GAMES,), generator=generator)
    paddles = torch.full((GAMES,), WIDTH // 2)
    for row in range(HEIGHT):
        rows = torch.full((GAMES, 1), row / HEIGHT)
        states = torch.cat([COLUMNS[balls], COLUMNS[paddles], rows], dim=1)
        paddles = (paddles + agent.act.sync(number, states) - 1).clamp(0, WIDTH - 1)
    return (balls == paddles).float()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of random numbers (default: 0)")
    seed = parser.parse_args().seed
    torch.manual_seed(seed)
    agent, shares = Agent(), []
    with farcall.local(OBSERVERS) as group:
        reference = farcall.handle(rpc.RRef(agent))
        for number in range(ROUNDS):
            seeds = [(seed * ROUNDS + number) * OBSERVERS + one for one in range(OBSERVERS)]
            games = [one.call_async(observe, reference, one.id, seeds[one.id]) for one in group]
            caught = torch.stack([observed.wait() for observed in games])
            agent.learn(caught)
            shares.append(caught.mean().item())
            if number % 20 == 19:
                print(f"round {number + 1}: {sum(shares[-20:]) / 20:.0%} caught")
    share = sum(shares[-20:]) / 20
    if share < GOAL:
        raise SystemExit(f"failed: {share:.0%} caught")
    print(f"ok: {share:.0%} caught")
