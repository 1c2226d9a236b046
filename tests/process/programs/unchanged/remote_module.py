"""A layer on another worker, as torch.distributed.nn has it."""

import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import RemoteModule


class Hybrid(nn.Module):
    def __init__(self):
        super().__init__()
        self.remote = RemoteModule("worker1/cpu", nn.Linear, args=(20, 30))
        self.local = nn.Linear(30, 1)

    def forward(self, x):
        return self.local(self.remote(x).relu())


def train():
    model = Hybrid()
    x = torch.randn(128, 20)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [model(x).sum()])
        here = len(dist_autograd.get_gradients(context_id))
    shapes = [tuple(p.to_here().shape) for p in model.remote.remote_parameters()]
    shape = tuple(model.remote.forward_async(x).wait().shape)
    print(rpc.__name__, here, shapes, shape, flush=True)


def run(rank, store):
    options = rpc.TensorPipeRpcBackendOptions(init_method=store)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1],), nprocs=2)
