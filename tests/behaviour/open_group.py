"""A group whose workers come and go, all in one process: for tests of membership."""

from __future__ import annotations

from patience import PATIENCE
from torch.distributed import HashStore  # type: ignore[attr-defined]  # as in stores.py

from farcall.autograd.autograd import Autograd
from farcall.runtime.agent import Agent
from farcall.runtime.options.backend_options import RpcBackendOptions
from farcall.runtime.options.credential import Credentials
from farcall.runtime.quirks import Quirks
from farcall.runtime.start import start_agent


class OpenGroup:
    """Starts workers that meet at one store, and closes them at the end."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.agents: list[Agent] = []

    def join(self, name: str, role: str = "", rpc_timeout: float = PATIENCE) -> Agent:
        options = RpcBackendOptions(rpc_timeout, store=self.store, role=role)
        agent = start_agent(name, -1, None, options, Credentials(), 0, Quirks(), Autograd)
        self.agents.append(agent)
        return agent

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
