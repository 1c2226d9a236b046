"""Data parallel and remote at once: dense layers by DDP, an embedding by RPC.

Two trainers have replicas of the dense layers under DistributedDataParallel, which averages their
gradients. The embedding, too large for each to have one, is on `worker0`; trainers use it as a
RemoteModule. One backward pass does both, as in PyTorch's tutorial
https://docs.pytorch.org/tutorials/advanced/rpc_ddp_tutorial.html.

    python examples/ddp_with_rpc.py --seed 0

Expect a line per epoch, in some ten seconds: the loss falls below 0.1, and the replicas stay equal.
"""

import argparse
import tempfile

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import farcall
from farcall import autograd, rpc
from farcall.nn import RemoteModule
from farcall.optim import DistributedOptimizer

TRAINERS, WORDS, WIDTH, CLASSES, BATCHES, BATCH, EPOCHS, GOAL = 2, 100, 16, 4, 20, 32, 6, 0.1


@farcall.actor
class Trainer:
    def __init__(self, rank, embedding, store, seed):
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=TRAINERS)
        self.embedding = embedding
        self.dense = DistributedDataParallel(nn.Linear(WIDTH, CLASSES))
        here = [rpc.RRef(parameter) for parameter in self.dense.parameters()]
        parameters = embedding.remote_parameters() + here
        self.optimizer = DistributedOptimizer(torch.optim.Adagrad, parameters, lr=0.05)
        self.random = torch.Generator().manual_seed(1000 * seed + rank)

    def draw(self):
        """Return texts of three words, and the class of each: all its words are of that class."""
        classes = torch.randint(CLASSES, (BATCH, 1), generator=self.random)
        words = torch.randint(WORDS // CLASSES, (BATCH, 3), generator=self.random)
        return CLASSES * words + classes, classes.squeeze(1)

    def train(self):
        """Learn from some batches; return the mean loss. All trainers have to do it at once."""
        total = 0.0
        for _ in range(BATCHES):
            words, classes = self.draw()
            with autograd.context() as context:
                loss = cross_entropy(self.dense(self.embedding(words)), classes)
                autograd.backward(context, [loss])
                self.optimizer.step(context)
            total += loss.item()
        return total / BATCHES

    def weights(self):
        return self.dense.module.weight.detach()

    def close(self):
        distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of random numbers (default: 0)")
    seed = parser.parse_args().seed
    with tempfile.TemporaryDirectory() as folder, farcall.local(1 + TRAINERS) as group:
        group.all.call(torch.manual_seed, seed)
        embedding = RemoteModule("worker0/cpu", nn.EmbeddingBag, args=(WORDS, WIDTH))
        trainers = [
            farcall.spawn(group[1 + rank], Trainer, rank, embedding, f"file://{folder}/store", seed)
            for rank in range(TRAINERS)
        ]
        for epoch in range(EPOCHS):
            losses = [future.wait() for future in [trainer.train() for trainer in trainers]]
            loss = sum(losses) / TRAINERS
            print(f"epoch {epoch}: loss {loss:.3f}")
        first, second = [trainer.weights.sync() for trainer in trainers]
        are_equal = torch.equal(first, second)
        for trainer in trainers:
            trainer.close.sync()
    if loss > GOAL or not are_equal:
        raise SystemExit(f"failed: loss {loss:.3f}, equal replicas: {are_equal}")
    print(f"ok: loss {loss:.3f}, the replicas are equal")


if __name__ == "__main__":
    main()
