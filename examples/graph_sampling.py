"""Learning from a graph that is spread over workers: neighbours are sampled where they are stored.

The nodes of a graph, their features and their edges are spread over three workers. For a batch of
nodes the trainer, this process, asks all parts at once for some neighbours of the nodes that they
have, then for the features of all of these, and learns from nodes and neighbours together:
GraphSAGE of Hamilton et al., https://arxiv.org/abs/1706.02216, with one layer.

    python examples/graph_sampling.py --seed 0

Expect a line per 30 steps, in some five seconds: the features of a node alone tell its community in
70 % of the cases; with those of its neighbours the accuracy rises to over 85 %.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import farcall

PARTS, NODES, COMMUNITIES, DEGREE, SAMPLE, BATCH, STEPS, GOAL = 3, 1500, 5, 20, 8, 64, 120, 0.85
TEST = torch.arange(NODES - 300, NODES)  # not learnt from


@farcall.actor
class Part:
    """Every third node."""

    def __init__(self, features, edges, seed):
        self.features, self.edges = features, edges
        self.random = torch.Generator().manual_seed(seed)

    def sample(self, rows):
        """Return some neighbours of each of these nodes."""
        chosen = torch.randint(DEGREE, (len(rows), SAMPLE), generator=self.random)
        return self.edges[rows].gather(1, chosen)

    def look_up(self, rows):
        return self.features[rows]


def ask(parts, method, nodes):
    """Call a method of each part with its share of the nodes; return the rows in their order."""
    shares = [(nodes % PARTS == number).nonzero().squeeze(1) for number in range(PARTS)]
    calls = [
        getattr(part, method)(nodes[share] // PARTS)
        for part, share in zip(parts, shares, strict=True)
    ]
    return torch.cat([call.wait() for call in calls])[torch.cat(shares).argsort()]


def look_around(parts, nodes):
    """Return the features of nodes, and the means of those of some neighbours of each."""
    neighbours = ask(parts, "sample", nodes)
    own, others = torch.cat([nodes, neighbours.flatten()]), neighbours.shape
    features = ask(parts, "look_up", own)
    means = features[len(nodes) :].unflatten(0, others).mean(dim=1)
    return torch.cat([features[: len(nodes)], means], dim=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of random numbers (default: 0)")
    seed = parser.parse_args().seed
    torch.manual_seed(seed)
    communities = torch.arange(NODES) % COMMUNITIES
    features = torch.eye(COMMUNITIES)[communities] + 0.6 * torch.randn(NODES, COMMUNITIES)
    near = torch.randint(NODES // COMMUNITIES, (NODES, DEGREE)) * COMMUNITIES + communities[:, None]
    far = torch.randint(NODES, (NODES, DEGREE))
    edges = torch.where(torch.rand(NODES, DEGREE) < 0.7, near, far)
    model = nn.Sequential(nn.Linear(2 * COMMUNITIES, 32), nn.ReLU(), nn.Linear(32, COMMUNITIES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with farcall.local(PARTS) as group:
        parts = [
            farcall.spawn(one, Part, features[one.id :: PARTS], edges[one.id :: PARTS], seed)
            for one in group
        ]
        for step in range(1, STEPS + 1):
            nodes = torch.randint(len(communities) - len(TEST), (BATCH,))
            loss = cross_entropy(model(look_around(parts, nodes)), communities[nodes])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 30 == 0:
                told = model(look_around(parts, TEST)).argmax(dim=1)
                accuracy = (told == communities[TEST]).float().mean().item()
                print(f"step {step}: accuracy {accuracy:.0%}")
    if accuracy < GOAL:
        raise SystemExit(f"failed: accuracy {accuracy:.0%}")
    print(f"ok: accuracy {accuracy:.0%}")


if __name__ == "__main__":
    main()
