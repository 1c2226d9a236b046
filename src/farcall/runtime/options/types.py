"""Types of the options of a worker that are no options: which backend, and which keywords."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import TypedDict

from torch.distributed import Store  # type: ignore[attr-defined]  # as in stores.py

from farcall.runtime.options.secret import Secret
from farcall.serde import Only
from farcall.transport.connect.tls_config import TlsConfig


class BackendType(enum.Enum):
    """The backends to run on; the names are torch.distributed.rpc's, for its programs.

    TENSORPIPE stands for farcall's own transports, PROCESS_GROUP for process groups. Each belongs
    to the class of options that is named after it, and the class of the options decides.
    """

    TENSORPIPE = "tensorpipe"
    PROCESS_GROUP = "process_group"

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


class FarcallOptions(TypedDict, total=False):
    """The keywords of `RpcBackendOptions` that torch.distributed.rpc has not."""

    store: Store | None
    role: str | None
    max_threads: int | None
    max_in_flight_bytes: int | None
    max_queued_requests: int | None
    max_queued_bytes: int | None
    secret: Secret | str | bytes | None
    tls: TlsConfig | None
    encrypt: bool | None
    listen: str | None
    insecure: bool | None
    policy: Only | Mapping[str, Only] | None
    transports: Sequence[str] | None
    paths: Collection[str] | None
    tcp_streams: int | None
    dead_host_timeout: float | None
    shared_memory: int | None
    shared_tensors: str | None
    keep_freed_memory: int | None
    move_threads: bool | None
    limit_openmp_spin: bool | None
