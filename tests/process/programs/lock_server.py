"""A parameter server as a global object of `__main__`, made once, by the first call."""

import sys
from threading import Lock

import torch
import torch.multiprocessing as mp
from torch import nn

from farcall import rpc

WORLD_SIZE = 3
STEPS = 4


class ParameterServer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 2)
        self.pushes = 0
        self.lock = Lock()

    def forward(self, inputs):
        return self.model(inputs).detach()

    def push(self, gradients):
        with self.lock, torch.no_grad():
            self.pushes += 1
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=False):
                parameter.sub_(0.1 * gradient)
            return self.pushes


param_server = None
global_lock = Lock()


def get_parameter_server():
    global param_server  # noqa: PLW0603
    with global_lock:
        if not param_server:
            param_server = ParameterServer()
        return param_server


def run_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method, rref, *args, **kwargs):
    return rpc.rpc_sync(rref.owner(), run_method, args=(method, rref, *args), kwargs=kwargs)


def train(rank):
    server = rpc.remote("parameter_server", get_parameter_server)
    for _step in range(STEPS):
        output = remote_method(ParameterServer.forward, server, torch.ones(3, 4))
        assert output.shape == (3, 2)
        remote_method(ParameterServer.push, server, [torch.ones(2, 4), torch.ones(2)])
    return server


def run(rank, port):
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=8, rpc_timeout=300, init_method=f"tcp://localhost:{port}"
    )
    name = "parameter_server" if rank == 0 else f"trainer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=WORLD_SIZE, rpc_backend_options=options)
    if rank > 0:
        train(rank)
    rpc.shutdown()
    if rank == 0:
        print("pushes", param_server.pushes, flush=True)


if __name__ == "__main__":
    mp.spawn(run, args=(sys.argv[1],), nprocs=WORLD_SIZE, join=True)
