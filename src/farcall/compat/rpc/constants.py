"""The names of `torch.distributed.rpc.constants`."""

from __future__ import annotations

from datetime import timedelta

from farcall.runtime.options.backend_options import (
    DEFAULT_INIT_METHOD,
    DEFAULT_RPC_TIMEOUT,
    DEFAULT_WORKER_THREADS,
)
from farcall.runtime.options.timeouts import UNSET_RPC_TIMEOUT

DEFAULT_RPC_TIMEOUT_SEC: float = DEFAULT_RPC_TIMEOUT
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS: int = DEFAULT_WORKER_THREADS
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_PROCESS_GROUP_TIMEOUT",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
]
