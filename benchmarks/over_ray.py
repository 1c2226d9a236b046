"""Ray in the shape of torch.distributed.rpc: a worker is an actor, a reference another one.

Rank 0 starts all of it; other ranks have nothing to do. Tensors go as NumPy arrays, which Ray
shares between processes without a copy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from packed import to_array, to_tensor

THREADS = 16


@ray.remote(max_concurrency=THREADS)
class Worker:
    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return to_array(function(*map(to_tensor, args)))


class Future:
    def __init__(self, reference: ray.ObjectRef) -> None:
        self._reference = reference

    def wait(self) -> Any:
        return to_tensor(ray.get(self._reference))


class Proxy:
    """Calls methods of an actor, and waits for their results."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._actor, name)
        return lambda *args: ray.get(method.remote(*args))


class Reference:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def rpc_sync(self) -> Proxy:
        return Proxy(self._actor)


class Caller:
    """Rank 0."""

    def __init__(self, store: str, size: int) -> None:
        # Workers must find the modules of this folder, as functions go by name.
        path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        ray.init(
            num_cpus=size,  # an actor wants one to start with
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(Path(store).parent / "ray"),
        )
        self._workers = {f"worker{rank}": Worker.remote() for rank in range(1, size)}

    def rpc_sync(self, to: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        return self.rpc_async(to, function, args).wait()

    def rpc_async(self, to: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        return Future(self._workers[to].run.remote(function, *map(to_array, args)))

    def remote(self, _to: str, kind: type) -> Reference:
        return Reference(ray.remote(kind).remote())

    def shutdown(self) -> None:
        ray.shutdown()


class Other:
    def shutdown(self) -> None:
        """End the actors, with rank 0."""


def join(store: str, size: int, rank: int) -> Caller | Other:
    return Other() if rank else Caller(store, size)
