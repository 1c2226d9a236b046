"""A pipeline: a model in three stages on three workers, batches in micro-batches.

The driver sends each micro-batch to the first stage, and gets a reference to what comes out; that
goes to the next stage, which fetches the value from the worker that has it. Nothing waits until the
losses are there, so the stages work at the same time, each on a micro-batch of its own. Distributed
autograd takes the gradients back through all of them, and a DistributedOptimizer makes the step.

    python examples/pipeline.py --seed 0

Expect ten lines, in some five seconds: losses of the pipeline, and of the same model in this
process. They are equal but for rounding.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import mse_loss

import farcall
from farcall import autograd, rpc
from farcall.optim import DistributedOptimizer

INPUTS, WIDTH, STEPS, BATCH, MICRO_BATCHES, RATE = 16, 64, 10, 64, 8, 0.1


@farcall.actor  # one micro-batch at a time, in the order in which they come
class Stage:
    def __init__(self, layers):
        self.layers = layers

    def forward(self, inputs):
        """Return the outputs for a reference to inputs."""
        return self.layers(inputs.to_here())

    def references(self):
        return [rpc.RRef(parameter) for parameter in self.layers.parameters()]


def pipeline_loss(stages, inputs, targets):
    """Send all micro-batches on their way; return the mean of their losses."""
    outputs = []
    for micro_batch in inputs.chunk(MICRO_BATCHES):
        value = rpc.RRef(micro_batch)
        for stage in stages[:-1]:
            value = stage.remote().forward(value)
        outputs.append(stages[-1].forward(value))
    losses = [
        mse_loss(output.wait(), target)
        for output, target in zip(outputs, targets.chunk(MICRO_BATCHES), strict=True)
    ]
    return torch.stack(losses).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of random numbers (default: 0)")
    torch.manual_seed(parser.parse_args().seed)
    layers = [
        nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh()),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.Linear(WIDTH, 1),
    ]
    model = nn.Sequential(*layers)  # the same, here
    local = torch.optim.SGD(model.parameters(), lr=RATE)
    equal = True
    with farcall.local(3) as group:
        with torch.no_grad():  # the layers are copied: no gradient comes back to those here
            stages = [farcall.spawn(group[n], Stage, layers[n]) for n in range(3)]
        parameters = [one for stage in stages for one in stage.references.sync()]
        distributed = DistributedOptimizer(torch.optim.SGD, parameters, lr=RATE)
        for step in range(STEPS):
            inputs = torch.randn(BATCH, INPUTS)
            targets = inputs.sin().sum(dim=1, keepdim=True)
            with autograd.context() as context:
                loss = pipeline_loss(stages, inputs, targets)
                autograd.backward(context, [loss])
                distributed.step(context)
            local_loss = mse_loss(model(inputs), targets)
            local.zero_grad()
            local_loss.backward()
            local.step()
            print(f"step {step}: loss {loss:.6f}, in one process {local_loss:.6f}")
            equal = equal and torch.allclose(loss, local_loss)
    if not equal:
        raise SystemExit("failed: the losses differ")
    print("ok: the losses are equal")


if __name__ == "__main__":
    main()
