"""A model over two workers: distributed autograd and the distributed optimizer."""

import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from torch import optim
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

STEPS = 20


def train():
    torch.manual_seed(0)
    weight = rpc.remote("worker1", torch.zeros, args=(2,), kwargs={"requires_grad": True})
    bias = rpc.RRef(torch.zeros(1, requires_grad=True))
    optimizer = DistributedOptimizer(optim.SGD, [weight, bias], lr=0.1)
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(8, 2)
        with dist_autograd.context() as context_id:
            outputs = rpc.rpc_sync("worker1", predict, args=(weight, inputs)) + bias.local_value()
            loss = (outputs - inputs.sum(1) - 3).square().mean()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    print(rpc.__name__, losses[-1] < losses[0] / 10, flush=True)


def predict(weight, inputs):
    return inputs @ weight.local_value()


def run(rank, store):
    options = rpc.TensorPipeRpcBackendOptions(init_method=store)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1],), nprocs=2)
