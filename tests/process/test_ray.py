"""`farcall.ray.start`: groups of actors, on a cluster of two nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from known_secrets import SECRET
from ray_nodes import two_nodes

import farcall
from farcall import autograd, rpc
from farcall.groups import Group
from farcall.runtime.current import current_agent

ray = pytest.importorskip("ray")
SMALL = {"CPU": 0.1}


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count


def my_name() -> str:
    return rpc.get_worker_info().name


def node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def assigned() -> dict[str, float]:
    return dict(ray.get_runtime_context().get_assigned_resources())


def double_by_ray(number: int) -> int:
    """Uses Ray within a worker of farcall."""
    return int(ray.get(ray.remote(num_cpus=0)(lambda: 2 * number).remote()))


def addresses() -> tuple[str, ...]:
    return current_agent().me.addresses


def environment_and_command() -> bytes:
    return Path("/proc/self/environ").read_bytes() + Path("/proc/self/cmdline").read_bytes()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as made:
        ray.init(made.address, log_to_driver=False)
        try:
            yield made
        finally:
            ray.shutdown()


@pytest.fixture(scope="module")
def shared(cluster: Any) -> Iterator[Group]:
    with farcall.ray.start(3, resources=SMALL, strategy="SPREAD", secret=SECRET) as made:
        yield made


def test_a_worker_is_called(shared: Group) -> None:
    assert shared[0].call(max, 1, 2) == 2
    assert shared[1].call(sorted, [1, 2], reverse=True) == [2, 1]
    assert shared["worker2"].call_async(my_name).wait() == "worker2"


def test_an_object_lives_on_a_worker(shared: Group) -> None:
    counter = shared[1].remote(Counter, 5)
    assert counter.owner_name() == "worker1"
    assert [counter.rpc_sync().add(1), counter.rpc_sync().add(2)] == [6, 8]


def test_all_and_map(shared: Group) -> None:
    assert shared.all.call(my_name) == ["worker0", "worker1", "worker2"]
    assert shared.map(abs, range(0, -20, -1)) == list(range(20))


def test_workers_call_each_other_and_the_driver(shared: Group) -> None:
    assert shared[0].call(rpc.rpc_sync, "worker1", my_name) == "worker1"
    assert shared[2].call(rpc.rpc_sync, "main", my_name) == "main"


def test_gradients_flow_through_workers(shared: Group) -> None:
    with autograd.context() as context:
        x = torch.ones(3, requires_grad=True)
        autograd.backward(context, [shared[1].call(torch.mul, x, 4).sum()])
        assert torch.equal(autograd.get_gradients(context)[x], torch.full((3,), 4.0))


def test_workers_are_on_both_nodes_with_the_resources_that_they_asked_for(shared: Group) -> None:
    assert len(set(shared.all.call(node))) == 2
    assert shared.all.call(assigned) == [SMALL] * 3


def test_ray_can_be_used_in_workers(shared: Group) -> None:
    assert shared[0].call(double_by_ray, 4) == 8


def test_workers_listen_at_the_addresses_of_their_nodes(shared: Group) -> None:
    known = {one["NodeManagerAddress"] for one in ray.nodes()}
    for found in [addresses(), *shared.all.call(addresses)]:
        tcp = [url for url in found if url.startswith("tcp://")]
        assert tcp
        assert all(any(f"//{host}:" in url for host in known) for url in tcp), tcp


def test_the_secret_is_in_no_environment_command_or_log(shared: Group) -> None:
    secret = SECRET.encode()
    for said in shared.all.call(environment_and_command):
        assert secret not in said
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    paths = (Path(folder, name) for folder, _, names in os.walk(session) for name in names)
    for path in paths:
        with suppress(FileNotFoundError):  # Ray has removed it since
            assert not path.is_file() or secret not in path.read_bytes(), path


def test_a_second_group_is_refused(shared: Group) -> None:
    with pytest.raises(RuntimeError, match=r"has a group already.*group\.close"):
        farcall.ray.start(1)
    with pytest.raises(RuntimeError, match=r"farcall.ray.start\(\) starts workers from a dr"):
        shared[0].call(farcall.ray.start, 1)
