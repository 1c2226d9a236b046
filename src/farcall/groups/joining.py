"""The start of a group of fixed size: arguments for the agents of driver and workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # as in stores.py

from farcall import rpc
from farcall.runtime.agent import Agent
from farcall.runtime.membership.records import GATE, GateOutcome
from farcall.runtime.membership.signed_store import SignedStore
from farcall.runtime.membership.signing import signer_of
from farcall.runtime.options.timeouts import validate_timeout
from farcall.runtime.quirks import Quirks

DRIVER = "main"
GENERATION = 0  # of the only group at its store
START_SECONDS = 60.0  # that all have to meet, once each has imported the user's program
LOOPBACK = "127.0.0.1"


def settings(options: Mapping[str, Any], listen: str = LOOPBACK) -> tuple[dict[str, Any], float]:
    """Return the keywords of `RpcBackendOptions`, and the limit of calls after the start.

    Calls have no limit unless the user gives one: a script waits for its own functions.

    Args:
        options: what the user has given, and where the workers meet.
        listen: the address of this machine under which the others reach it.
    """
    limit = validate_timeout(options.get("rpc_timeout", 0.0))
    fixed = {"listen": listen, "rpc_timeout": START_SECONDS}
    return {**options, **fixed}, limit


def join(
    name: str, rank: int, size: int, options: Mapping[str, Any], listen: str = LOOPBACK
) -> Agent:
    """Start this process's agent and meet the others of a group.

    Args:
        name: of this worker, or of the driver.
        rank: its number; the driver's is the last.
        size: how many they are, with the driver.
        options, listen: as `settings` takes them.

    Raises:
        RendezvousError: they did not meet.
    """
    keywords, limit = settings(options, listen)
    agent = rpc.start_default_agent(
        name, rank, size, rpc.RpcBackendOptions(**keywords), Quirks(), GENERATION
    )
    agent.status.rpc_timeout = limit
    return agent


def abort(store: Store, secret: bytes, reason: str) -> None:
    """End the start of a group, for all that have come: a worker of it is gone.

    Args:
        store: where they meet; no other thread uses this object.
        secret: of the group.
        reason: what they are told.
    """
    prefix = f"farcall/{GENERATION}"
    gate = GateOutcome("aborted", DRIVER, reason)
    board = SignedStore(PrefixStore(prefix, store), prefix, signer_of(secret, None))
    board.settle("gate", GATE, gate)
