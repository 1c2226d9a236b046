"""A parameter server that answers all trainers of a batch at once, without a thread for each."""

import os
import sys
import threading

import torch
import torch.multiprocessing as mp
from torch import nn

from farcall import rpc

TRAINERS = 3
BATCHES = 5


class BatchUpdateParameterServer:
    def __init__(self, batch_update_size):
        self.model = nn.Linear(3, 1, bias=False)
        self.lock = threading.Lock()
        self.future_model = torch.futures.Future()
        self.batch_update_size = batch_update_size
        self.curr_update_size = 0
        self.updates = 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)

    def get_model(self):
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(ps_rref, grads):
        self = ps_rref.local_value()
        with self.lock:
            self.curr_update_size += 1
            for p, g in zip(self.model.parameters(), grads, strict=False):
                p.grad += g
            fut = self.future_model
            if self.curr_update_size >= self.batch_update_size:
                for p in self.model.parameters():
                    p.grad /= self.batch_update_size
                self.curr_update_size = 0
                self.updates += 1
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                fut.set_result(self.model)
                self.future_model = torch.futures.Future()
        return fut


class Trainer:
    def __init__(self, ps_rref):
        self.ps_rref = ps_rref

    def train(self):
        m = self.ps_rref.rpc_sync().get_model()
        for _ in range(BATCHES):
            m(torch.ones(2, 3)).sum().backward()
            m = rpc.rpc_sync(
                self.ps_rref.owner(),
                BatchUpdateParameterServer.update_and_fetch_model,
                args=(self.ps_rref, [p.grad for p in m.cpu().parameters()]),
            )
        return m.weight.detach()


def run_trainer(ps_rref):
    return Trainer(ps_rref).train()


def run_ps(trainers):
    server = BatchUpdateParameterServer(len(trainers))
    ps_rref = rpc.RRef(server)
    futs = [rpc.rpc_async(trainer, run_trainer, args=(ps_rref,)) for trainer in trainers]
    weights = torch.futures.wait_all(futs)
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    print("updates", server.updates, flush=True)


def run(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = sys.argv[1]
    # One thread: the three calls of a batch wait in it at once.
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=1, rpc_timeout=0)
    if rank != 0:
        rpc.init_rpc(
            f"trainer{rank}", rank=rank, world_size=world_size, rpc_backend_options=options
        )
    else:
        rpc.init_rpc("ps", rank=rank, world_size=world_size, rpc_backend_options=options)
        run_ps([f"trainer{r}" for r in range(1, world_size)])
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run, args=(TRAINERS + 1,), nprocs=TRAINERS + 1, join=True)
