"""How driver and workers become a group of fixed size: what each starts its agent with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # as in stores.py
    FileStore,
    PrefixStore,
)

from farcall import rpc
from farcall.runtime.membership.records import GATE, Gate
from farcall.runtime.membership.signed_store import SignedStore
from farcall.runtime.membership.signing import signer_of
from farcall.runtime.options.timeouts import validate_timeout

DRIVER = "main"
GENERATION = 0  # of the only group at its store
OBITUARY_SECONDS = 1.0  # between the loss of a worker and the news of how its process ended
START_SECONDS = 60.0  # that all have to meet, once each has imported the user's program
NOT_OPTIONS = {
    "init_method": "the workers meet in a private folder",
    "store": "the workers meet in a private folder",
    "listen": "the workers are on this machine",
}


def check(options: Mapping[str, Any]) -> None:
    """Raise what is wrong with the options of a group.

    Raises:
        TypeError: one is unknown, or of the wrong type.
        ValueError: one makes no sense.
    """
    for name, reason in NOT_OPTIONS.items():
        if name in options:
            raise TypeError(f"farcall.local() takes no {name}: {reason}")
    rpc.RpcBackendOptions(**options)


def settings(options: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the keywords of `RpcBackendOptions`, and the limit of calls after the start.

    Calls have no limit unless the user gives one: a script waits for its own functions.

    Args:
        options: what the user has given, and where the workers meet.
    """
    limit = validate_timeout(options.get("rpc_timeout", 0.0))
    fixed = {"listen": "127.0.0.1", "rpc_timeout": START_SECONDS}
    return {**options, **fixed}, limit


def abort(path: str, secret: bytes, size: int, reason: str) -> None:
    """End the start of a group, for all that have come: a worker of it is gone.

    Args:
        path: of the file where they meet.
        secret: of the group.
        size: of the group.
        reason: what they are told.
    """
    prefix = f"farcall/{GENERATION}"
    store = PrefixStore(prefix, FileStore(path, size))
    gate = Gate("aborted", DRIVER, reason)
    SignedStore(store, prefix, signer_of(secret, None)).settle("gate", GATE, gate)
