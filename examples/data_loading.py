"""Data loading by workers: they make the batches, some ahead of the trainer.

Each batch is a call, made some batches before it is needed, to one worker after the other. The
window of such calls bounds the batches that are ready: workers can't run ahead of the trainer.
Batches come in a fixed order and depend on the seed alone: equal seeds give equal runs.

    python examples/data_loading.py --seed 0

Expect a line per 25 batches, in some five seconds: the accuracy rises to over 90 %. The lines also
say how long the workers took to make batches, and how long the trainer has waited for them.
"""

import argparse
import collections
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import farcall

WORKERS, WINDOW, BATCHES, BATCH, SIZE, GOAL = 2, 4, 150, 32, 16, 0.9


@farcall.actor
class Loader:
    """Makes noisy pictures of bars, horizontal (0) or vertical (1)."""

    def load(self, seed):
        """Return a batch of pictures, their classes, and how many seconds they took."""
        start, random = time.perf_counter(), torch.Generator().manual_seed(seed)
        pictures = torch.randn(BATCH, SIZE, SIZE, generator=random)
        classes = torch.randint(2, (BATCH,), generator=random)
        places = torch.randint(SIZE, (BATCH,), generator=random)
        for picture, kind, place in zip(pictures, classes, places, strict=True):
            picture.select(int(kind), place).add_(2)
        return pictures, classes, time.perf_counter() - start


def batches(loaders, seed):
    """Give the batches in their order, with a window of calls that were made ahead."""
    window = collections.deque()
    for number in range(BATCHES):
        loader = loaders[number % len(loaders)]
        window.append(loader.load(seed * BATCHES + number))
        if len(window) == WINDOW:
            yield window.popleft().wait()
    while window:
        yield window.popleft().wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of random numbers (default: 0)")
    seed = parser.parse_args().seed
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Unflatten(1, (1, SIZE)), nn.Conv2d(1, 8, 5), nn.ReLU(), nn.AdaptiveMaxPool2d(1),
        nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    making = waiting = right = 0.0
    with farcall.local(WORKERS) as group:
        loaders = [farcall.spawn(worker, Loader) for worker in group]
        start = time.perf_counter()
        for number, (pictures, classes, seconds) in enumerate(batches(loaders, seed), 1):
            making, waiting = making + seconds, waiting + time.perf_counter() - start
            scores = model(pictures)
            optimizer.zero_grad()
            cross_entropy(scores, classes).backward()
            optimizer.step()
            right += (scores.argmax(dim=1) == classes).float().mean().item()
            if number % 25 == 0:
                accuracy, right = right / 25, 0.0
                print(
                    f"batch {number}: accuracy {accuracy:.0%}; {making:.2f} s to make all batches, "
                    f"{waiting:.2f} s of waiting for them"
                )
            start = time.perf_counter()
    if accuracy < GOAL:
        raise SystemExit(f"failed: accuracy {accuracy:.0%}")
    print(f"ok: accuracy {accuracy:.0%}")


if __name__ == "__main__":
    main()
