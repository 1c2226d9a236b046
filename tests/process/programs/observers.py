"""An agent whose observers call it back while it waits for their episodes."""

import os
import sys

import torch
import torch.multiprocessing as mp

from farcall import rpc
from farcall.rpc import RRef, remote, rpc_async, rpc_sync

AGENT_NAME = "agent"
OBSERVER_NAME = "observer{}"
EPISODES = 3
STEPS = 10


def _call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def _remote_method(method, rref, *args, **kwargs):
    args = [method, rref, *args]
    return rpc_sync(rref.owner(), _call_method, args=args, kwargs=kwargs)


class Observer:
    def __init__(self):
        self.id = rpc.get_worker_info().id

    def run_episode(self, agent_rref):
        for step in range(STEPS):
            state = torch.full((4,), float(step))
            action = _remote_method(Agent.select_action, agent_rref, self.id, state)
            _remote_method(Agent.report_reward, agent_rref, self.id, float(action))


class Agent:
    def __init__(self, world_size):
        self.ob_rrefs = []
        self.agent_rref = RRef(self)
        self.rewards = {}
        for ob_rank in range(1, world_size):
            ob_info = rpc.get_worker_info(OBSERVER_NAME.format(ob_rank))
            self.ob_rrefs.append(remote(ob_info, Observer))
            self.rewards[ob_info.id] = []

    def select_action(self, ob_id, state):
        return int(state[0]) % 2

    def report_reward(self, ob_id, reward):
        self.rewards[ob_id].append(reward)

    def run_episode(self):
        futs = []
        for ob_rref in self.ob_rrefs:
            futs.append(
                rpc_async(
                    ob_rref.owner(),
                    _call_method,
                    args=(Observer.run_episode, ob_rref, self.agent_rref),
                )
            )
        for fut in futs:
            fut.wait()


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = sys.argv[1]
    if rank == 0:
        rpc.init_rpc(AGENT_NAME, rank=rank, world_size=world_size)
        agent = Agent(world_size)
        for _ in range(EPISODES):
            agent.run_episode()
        print({ob: sum(rewards) for ob, rewards in sorted(agent.rewards.items())}, flush=True)
    else:
        rpc.init_rpc(OBSERVER_NAME.format(rank), rank=rank, world_size=world_size)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(3,), nprocs=3, join=True)
