"""The options of the backend PROCESS_GROUP, and which options go with which backend."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # as in stores.py

from farcall.runtime.membership.endpoints import EndpointPlace, ListeningEndpoint
from farcall.runtime.options import checks as check
from farcall.runtime.options.backend_options import (
    DEFAULT_INIT_METHOD,
    DEFAULT_RPC_TIMEOUT,
    RpcBackendOptions,
)
from farcall.runtime.options.types import BackendType, FarcallOptions
from farcall.runtime.process_groups.nccl import NcclCandidate
from farcall.runtime.process_groups.opening import BACKENDS, open_group
from farcall.transport.process_group.endpoint import ProcessGroupEndpoint

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_SEND_RECV_THREADS = 4


class ProcessGroupRpcBackendOptions(RpcBackendOptions, only_options=True):
    """The backend PROCESS_GROUP: frames travel over a process group made for this alone.

    The group has a fixed size, and its ranks are connected with each other when it starts. It has
    neither authentication nor encryption, so there is no secret: workers listen on loopback unless
    `listen` and `insecure` say otherwise. Tensors on CUDA devices that a device map names go by
    nccl, if every worker's options name CUDA devices and no two workers share one; else through the
    CPU's memory.

    Args:
        num_send_recv_threads: how many handlers may run at once; torch.distributed.rpc ran them in
            the threads that sent and received.
        group_backend: what carries the messages: "gloo", or "mpi" where torch was built with it.
            Default: `FARCALL_GROUP_BACKEND` of the environment; else "gloo".
        rpc_timeout, init_method: see `RpcBackendOptions`, as is every further keyword. The
            options of farcall's own transports (`transports`, `paths`, `tcp_streams`,
            `shared_tensors`) mean nothing here.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument has a value that makes no sense.
    """

    group_backend: str

    _checks = {
        **RpcBackendOptions._checks,
        "group_backend": partial(
            check.one_of, "group_backend", variable="FARCALL_GROUP_BACKEND", known=BACKENDS
        ),
    }

    def __init__(
        self,
        *,
        num_send_recv_threads: int = DEFAULT_SEND_RECV_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT,
        init_method: str = DEFAULT_INIT_METHOD,
        group_backend: str | None = None,
        **farcall_options: Unpack[FarcallOptions],
    ) -> None:
        self._assign(group_backend=group_backend)
        threads = check.thread_count("num_send_recv_threads", num_send_recv_threads)
        super().__init__(rpc_timeout, init_method, num_worker_threads=threads, **farcall_options)

    @property
    def num_send_recv_threads(self) -> int:
        """The same as `num_worker_threads`."""
        return self.num_worker_threads

    @property
    def uses_machine_secret(self) -> bool:
        """No: see above."""
        return False

    def open_endpoint(self, place: EndpointPlace) -> ListeningEndpoint:
        """Wait for the others, and connect with all of them.

        Raises:
            ValueError: the group has no fixed size, or a secret is set.
            RendezvousTimeout: not all came in time; says which ranks are missing.
            RendezvousError: they can't be connected.
        """
        if place.world_size is None:
            raise ValueError(
                "a process group has a fixed size: pass rank and world_size to init_rpc, or set "
                "RANK and WORLD_SIZE; workers that come and go need the backend TENSORPIPE"
            )
        if place.credential.secret is not None or place.credential.tls is not None:
            raise ValueError(
                "process groups have no authentication, so the backend PROCESS_GROUP can't honour "
                "the secret or the certificates: leave out FARCALL_SECRET, FARCALL_SECRET_FILE, "
                "FARCALL_TLS_... and the options secret= and tls=, or use TENSORPIPE"
            )
        candidate = NcclCandidate(
            PrefixStore("nccl", place.store), place.me.id, self._cuda_devices()
        )
        group = open_group(
            self.group_backend,
            place.store,
            place.me.id,
            place.world_size,
            place.advertise[0],
            place.timeout,
            place.me.name,
        )
        try:
            channels = candidate.channels(place.world_size)
        except BaseException:
            group.close()
            raise
        return ProcessGroupEndpoint(place.me, group, place.admit, device_channels=channels)

    def _cuda_devices(self) -> list[torch.device]:
        """Return this worker's own devices, as far as its options name them."""
        mapped = [device for one in self.device_maps.values() for device in one]
        return [device for device in (*self.devices, *mapped) if device.type == "cuda"]


def check_backend(backend: BackendType | None, options: RpcBackendOptions) -> None:
    """Raises TypeError: these are the options of another backend."""
    over_group = isinstance(options, ProcessGroupRpcBackendOptions)
    if backend is not None and over_group is not (backend is BackendType.PROCESS_GROUP):
        raise TypeError(f"backend is {backend}, but its options are {type(options).__name__}")
