"""The options of a worker as torch.distributed.rpc names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from farcall.log import get_logger
from farcall.runtime.options.backend_options import (
    DEFAULT_INIT_METHOD,
    DEFAULT_RPC_TIMEOUT,
    DEFAULT_WORKER_THREADS,
    RpcBackendOptions,
)
from farcall.runtime.options.devices import Device, DeviceMap
from farcall.runtime.options.types import FarcallOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = get_logger(__name__)

_TRANSPORTS = frozenset({"shm", "uv", "ibv"})
_CHANNELS = frozenset(
    {"basic", "cma", "mpt_uv", "xth", "cuda_basic", "cuda_gdr", "cuda_ipc", "cuda_xth"}
)


class TensorPipeRpcBackendOptions(RpcBackendOptions, only_options=True):
    """The options under the name and with the arguments of torch.distributed.rpc's.

    Args:
        num_worker_threads, rpc_timeout, init_method, device_maps, devices: see
            `RpcBackendOptions`, as is every further keyword.
        _transports, _channels: TensorPipe's own; accepted and ignored.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument has a value that makes no sense, or TensorPipe has no such
            transport or channel.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, DeviceMap] | None = None,
        devices: Sequence[Device] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
        **farcall_options: Unpack[FarcallOptions],
    ) -> None:
        super().__init__(
            rpc_timeout,
            init_method,
            num_worker_threads=num_worker_threads,
            device_maps=device_maps,
            devices=devices,
            **farcall_options,
        )
        _ignore("transport", _transports, _TRANSPORTS)
        _ignore("channel", _channels, _CHANNELS)


def _ignore(what: str, names: Sequence[str] | None, known: frozenset[str]) -> None:
    for name in names or ():
        if name not in known:
            raise ValueError(f"Unknown {what}: {name}")
        _log.debug("TensorPipe's %s %r is ignored: farcall has its own transports", what, name)
