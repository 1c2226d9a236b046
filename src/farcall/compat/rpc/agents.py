"""The result of `_get_current_rpc_agent`: farcall's agent, shown as torch shows one."""

from __future__ import annotations

from typing import Any

from farcall.ids import WorkerInfo
from farcall.runtime.agent import Agent
from farcall.runtime.options.backend_options import RpcBackendOptions


class RpcAgent:
    """The agent of this process. Thread-safe.

    Args:
        agent: what it stands for.
        options: what that was started with.
        is_static_group: whether its group has a fixed size.
    """

    def __init__(self, agent: Agent, options: RpcBackendOptions, is_static_group: bool) -> None:
        self.agent = agent
        self.is_static_group = is_static_group
        self._options = options

    def __repr__(self) -> str:
        me = self.agent.me
        return f"<{type(self).__name__} of {me.name!r} (rank {me.id})>"

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Return the info of this worker, or of the one with that name or id."""
        if worker is None:
            return self.agent.me.info
        return self.agent.directory.resolve(worker).worker.info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return the infos of all workers that are known and not lost, with this one, by id."""
        known = [peer.worker.info for peer in self.agent.directory.live()]
        return sorted(known, key=lambda info: info.id)

    def get_debug_info(self) -> dict[str, str]:
        """Counts, as text, under the names that torch has for them."""
        executor, threads = self.agent.executor, self._options.num_worker_threads
        return {
            "agent.num_pending_requests": str(self.agent.coordinator.active),
            "agent.thread_pool_size": str(threads),
            "agent.num_idle_threads": str(threads - executor.running),
        }

    get_metrics = get_debug_info

    def get_device_map(self, to: str) -> dict[Any, Any]:
        """Return the device map towards a worker."""
        return dict(self._options.device_maps.get(to, {}))

    _get_device_map = get_device_map

    def _get_backend_options(self) -> RpcBackendOptions:
        return self._options

    @property
    def store(self) -> Any:
        """The store at which the workers met, if `init_rpc` was given one; else None."""
        return self._options.store

    def join(self, shutdown: bool = False, timeout: float = 0.0) -> None:
        """Do nothing: `shutdown` of the module does it all."""

    sync = join

    def shutdown(self) -> None:
        """End at once."""
        self.agent.shutdown(False, 0)

    def _update_group_membership(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "TensorPipeAgent._update_group_membership belongs to torch's own agent in C++; "
            "farcall's learns by itself who comes and goes"
        )


class TensorPipeAgent(RpcAgent):
    """The agent of the backend TENSORPIPE."""
