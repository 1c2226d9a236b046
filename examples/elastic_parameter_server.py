"""A parameter server whose trainers come and go: one is killed, one joins, one leaves.

The server, this process, has the model, under a name. Trainers are processes that join when they
like, find the model by its name, fetch it, and push gradients until they are dismissed. None waits
for another, and a trainer that dies takes nothing with it but its own batch.

    python examples/elastic_parameter_server.py --seed 0

Expect a line when a trainer joins, is lost or leaves, in some ten seconds. The loss falls below 1.
"""

import argparse
import multiprocessing
import signal
import tempfile
import threading

import torch
from torch import nn

import farcall
from farcall import rpc

INPUTS, BATCH, UPDATES, PATIENCE, GOAL = 8, 32, 300, 300, 1.0


def loss_of(model, size, generator):
    """Return the loss of a model that is to add up the absolute values of its inputs."""
    inputs = torch.randn(size, INPUTS, generator=generator)
    return nn.functional.mse_loss(model(inputs), inputs.abs().sum(dim=1, keepdim=True))


@farcall.actor  # one call at a time
class Server:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.updates, self.dismissed, self.changed = 0, set(), threading.Condition()

    def push(self, trainer, gradients):
        """Make a step; return the model as it is now, or None: the trainer may go."""
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        with self.changed:
            self.updates += 1
            self.changed.notify_all()
        return None if trainer in self.dismissed else self.model

    def wait(self, updates):  # called by the process of the server, and has no turn to wait for
        with self.changed:
            end = self.updates + updates
            self.changed.wait_for(lambda: self.updates >= end, timeout=PATIENCE)
        return loss_of(self.model, 500, torch.Generator().manual_seed(10**6)).item()

    def tell(self, event):
        print(f"{event.worker.name} {event.kind}: update {self.updates}, loss {self.wait(0):.2f}")


def train(name, store, seed):  # in a process of its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, which ends its trainers
    rpc.init_rpc(name, rpc_backend_options=rpc.RpcBackendOptions(init_method=store))
    server = farcall.handle(rpc.get_object("server"))
    generator, model = torch.Generator().manual_seed(seed), server.model.get()
    while model is not None:
        loss = loss_of(model, BATCH, generator)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        model = server.push.sync(name, gradients)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of random numbers (default: 0)")
    seed = parser.parse_args().seed
    with tempfile.TemporaryDirectory() as folder:
        store, spawn = f"file://{folder}/store", multiprocessing.get_context("spawn")
        rpc.init_rpc("server", rpc_backend_options=rpc.RpcBackendOptions(init_method=store))
        handle = farcall.spawn("server", Server, seed, name="server")
        server = handle.local_value()
        of_trainer = [(f"trainer{number}", store, 1000 * seed + number) for number in range(3)]
        trainers = [spawn.Process(target=train, args=args, daemon=True) for args in of_trainer]
        with rpc.on_join(server.tell), rpc.on_leave(server.tell):
            trainers[0].start()
            trainers[1].start()
            rpc.wait_for("trainer0", "trainer1", timeout=PATIENCE)
            server.wait(UPDATES)
            trainers[1].kill()
            trainers[2].start()
            rpc.wait_for("trainer2", timeout=PATIENCE)
            server.dismissed.add("trainer0")
            trainers[0].join()
            loss = server.wait(UPDATES)
            server.dismissed.add("trainer2")
            trainers[2].join()
        rpc.shutdown()
    if loss > GOAL:
        raise SystemExit(f"failed: loss {loss:.2f}")
    print(f"ok: loss {loss:.2f}")
