"""`torch.distributed.rpc._testing`: the backend FAULTY_TENSORPIPE, over our faults."""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Collection, Mapping

import torch
from torch import distributed as dist  # noqa: F401 - torch's module has it

from farcall.compat import rpc  # noqa: F401 - likewise
from farcall.compat.rpc import backend_registry
from farcall.compat.rpc.agents import TensorPipeAgent
from farcall.compat.rpc.constants import (
    DEFAULT_INIT_METHOD,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
)
from farcall.compat.rpc.starting import register_own
from farcall.rref import fetch
from farcall.runtime.agent import Agent
from farcall.runtime.options.backend_options import RpcBackendOptions
from farcall.runtime.options.tensorpipe import TensorPipeRpcBackendOptions
from farcall.serde import name_of
from farcall.testing.faults import Fault, Matches, inject, of_type
from farcall.torch_internals import find_builtin
from farcall.wire.messages import Message, Received, Register, Release, ReleaseContext, Request

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions", "is_available"]

FETCH = name_of(fetch)


def is_available() -> bool:
    """Return whether there is fault injection: always."""
    return True


@functools.cache
def _is_script(name: str) -> bool:
    """Return whether a function of that name is an operator of torch's, or TorchScript."""
    try:
        function = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return False
    if isinstance(function, torch.jit.ScriptFunction):
        return True
    return find_builtin(function) is not None


def _requests(*, script: bool, creates: bool) -> Matches:
    def matches(message: Message) -> bool:
        return (
            isinstance(message, Request)
            and bool(message.creates) == creates
            and message.function != FETCH
            and _is_script(message.function) == script
        )

    return matches


def _fetches(message: Message) -> bool:
    return isinstance(message, Request) and message.function == FETCH


# torch's names of messages, and which of farcall's do the same.
MESSAGES: dict[str, Matches] = {
    "SCRIPT_CALL": _requests(script=True, creates=False),
    "PYTHON_CALL": _requests(script=False, creates=False),
    "SCRIPT_REMOTE_CALL": _requests(script=True, creates=True),
    "PYTHON_REMOTE_CALL": _requests(script=False, creates=True),
    "SCRIPT_RREF_FETCH_CALL": _fetches,
    "PYTHON_RREF_FETCH_CALL": _fetches,
    "RREF_FORK_REQUEST": of_type(Register),
    "RREF_CHILD_ACCEPT": of_type(Received),
    "RREF_USER_DELETE": of_type(Release),
    "CLEANUP_AUTOGRAD_CONTEXT_REQ": of_type(ReleaseContext),
}


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Options with faults.

    Args:
        messages_to_fail: torch's names of messages of which some are lost.
        messages_to_delay: torch's names of messages that are late -> seconds.
        num_fail_sends: how many of each are lost.

    Raises:
        ValueError: there is no message of that name; see `MESSAGES`.
    """

    def __init__(
        self,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        messages_to_fail: Collection[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(
            num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method
        )
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends
        for name in (*self.messages_to_fail, *self.messages_to_delay):
            if name not in MESSAGES:
                raise ValueError(f"no message is called {name!r}; there are {', '.join(MESSAGES)}")

    def faults(self) -> list[Fault]:
        """Return the faults for `farcall.testing.faults.inject`."""
        lost = [Fault(MESSAGES[name], losses=self.num_fail_sends) for name in self.messages_to_fail]
        late = [Fault(MESSAGES[name], delay=s) for name, s in self.messages_to_delay.items()]
        return lost + late


class FaultyTensorPipeAgent(TensorPipeAgent):
    """The agent of the backend FAULTY_TENSORPIPE."""

    def __init__(self, agent: Agent, options: RpcBackendOptions, is_static_group: bool) -> None:
        super().__init__(agent, options, is_static_group)
        assert isinstance(options, FaultyTensorPipeRpcBackendOptions)
        inject(agent, options.faults())


register_own("FAULTY_TENSORPIPE", FaultyTensorPipeRpcBackendOptions, FaultyTensorPipeAgent)
_backend = backend_registry.BackendType["FAULTY_TENSORPIPE"].value
_faulty_tensorpipe_construct_rpc_backend_options_handler = (
    _backend.construct_rpc_backend_options_handler
)
_faulty_tensorpipe_init_backend_handler = _backend.init_backend_handler
faulty_agent_backend_registry = sys.modules[__name__]  # torch has these two in a module of its own
__path__: list[str] = []  # and here a package
